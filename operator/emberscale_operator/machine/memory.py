"""What follows from a process that ran out of memory."""

_GROWTH = 1.5
_MIB = 1 << 20


def grown_memory(limit: int) -> int:
    """Bytes for a role of which one ran out of `limit` bytes: half as much again, in whole MiB."""
    return -(-int(limit * _GROWTH) // _MIB) * _MIB
