"""The bucket of one key, in plain Python: the reference for the vectorised and compiled forms."""

from emberscale_api.routing import BUCKETS, mix64


def bucket_of(key: int) -> int:
    """Returns the lowest 10 bits of the key's hash."""
    return mix64(key) & (BUCKETS - 1)
