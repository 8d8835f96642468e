"""The manifest of a job's newest flash checkpoint in Redis; parameter servers write the chunks that it lists."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from emberscale_api.checkpoint import FLASH_KEPT_SECONDS, CheckpointManifest, DamagedCheckpointError
from emberscale_api.compatibility import FlashKeys
from emberscale_api.errors import UnavailableError

_TIMEOUT_SECONDS = 3.0
_REMOVED_AT_ONCE = 256


class FlashOutOfReachError(UnavailableError):
    """Flash checkpoints cannot use Redis; the text says why."""


class FlashManifests:
    """Uses its own connection, so that row transfers do not delay others. All methods raise FlashOutOfReachError."""

    def __init__(self, url: str, job_uid: str) -> None:
        """Connects on first use. Raises ValueError for a malformed URL."""
        self._redis = redis.Redis.from_url(
            url,
            socket_timeout=_TIMEOUT_SECONDS,
            socket_connect_timeout=_TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        self._keys = FlashKeys.of(job_uid)

    def newest(self) -> CheckpointManifest | None:
        """The manifest of the newest complete checkpoint. Raises DamagedCheckpointError."""
        try:
            text = cast(bytes | None, self._redis.get(self._keys.manifest))
        except (redis.RedisError, OSError) as error:
            raise FlashOutOfReachError(f"Redis cannot be used: {error}") from error
        return None if text is None else CheckpointManifest.from_json(text, self._keys.manifest)

    def write(self, manifest: CheckpointManifest, confirm: Callable[[], object]) -> CheckpointManifest | None:
        """Completes a checkpoint, unless a newer one exists; returns the checkpoint that it replaces.

        `confirm` raises if this master was deposed. It is called between the read of the manifest and its replacement,
        which fails if another master has written a manifest meanwhile. So a paused master overwrites nothing.
        """
        key = self._keys.manifest
        try:
            with self._redis.pipeline() as transaction:
                transaction.watch(key)  # type: ignore[no-untyped-call]  # so it is in redis-py
                before = self._read(cast(bytes | None, transaction.get(key)))
                if before is not None and before.number > manifest.number:
                    raise FlashOutOfReachError(f"{before.id} is there already")
                confirm()
                transaction.multi()
                transaction.set(key, manifest.to_json(), ex=FLASH_KEPT_SECONDS)
                transaction.execute()
        except redis.WatchError as error:
            raise FlashOutOfReachError("another master has written a flash checkpoint meanwhile") from error
        except (redis.RedisError, OSError) as error:
            raise FlashOutOfReachError(f"Redis cannot be used: {error}") from error
        return before

    def remove_replaced(self, before: CheckpointManifest, manifest: CheckpointManifest) -> None:
        """Removes the files that only the checkpoint `before` uses. No later one lists them: names are never reused."""
        try:
            for some in _parts(self._keys_of(before) - self._keys_of(manifest)):
                self._redis.unlink(*some)
        except (redis.RedisError, OSError) as error:
            raise FlashOutOfReachError(f"Redis cannot be used: {error}") from error

    def sweep(self, servers: Iterable[int]) -> None:
        """Removes what these servers, by index, have left behind, except what the manifest names."""
        try:
            manifest = self._read(cast(bytes | None, self._redis.get(self._keys.manifest)))
            named = set() if manifest is None else self._keys_of(manifest)
            for server in servers:
                inventory = self._keys.inventory(f"ps-{server}")
                noted = {key.decode() for key in cast(set[bytes], self._redis.smembers(inventory))}
                for some in _parts(noted - named):
                    self._redis.unlink(*some)
                    self._redis.srem(inventory, *some)
        except (redis.RedisError, OSError) as error:
            raise FlashOutOfReachError(f"Redis cannot be used: {error}") from error

    def _read(self, text: bytes | None) -> CheckpointManifest | None:
        """Returns the manifest to replace; a garbled one counts as missing."""
        try:
            return None if text is None else CheckpointManifest.from_json(text, self._keys.manifest)
        except DamagedCheckpointError:
            return None

    def _keys_of(self, manifest: CheckpointManifest) -> set[str]:
        return {self._keys.of_file(manifest.id, file.path) for file in manifest.files}


def _parts(keys: Collection[str]) -> Iterator[list[str]]:
    """Returns keys in as many parts as one command each may have."""
    ordered = sorted(keys)
    return (ordered[first : first + _REMOVED_AT_ONCE] for first in range(0, len(ordered), _REMOVED_AT_ONCE))
