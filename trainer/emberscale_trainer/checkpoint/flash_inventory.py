"""Keeps track of one server's flash checkpoint files in Redis, and removes those that no checkpoint needs.

A key is added to a set before it is written, and taken out after it is removed. So the next server finds whatever a
broken connection or a killed server has left, without a search through the keys of all jobs.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from emberscale_api.checkpoint import FLASH_KEPT_SECONDS, CheckpointManifest, DamagedCheckpointError
from emberscale_api.compatibility import FlashKeys
from emberscale_trainer.checkpoint.flash_redis import Command, FlashRedis

_NOTED_AT_ONCE = 64


class FlashInventory:
    """The keys of the server in `folder`, over one connection. All methods raise FlashUnusableError."""

    def __init__(self, redis: FlashRedis, keys: FlashKeys, folder: str) -> None:
        self._redis = redis
        self._manifest = keys.manifest
        self._keys = keys
        self._set = keys.inventory(folder)
        self._noted = False

    def note(self, key: str) -> None:
        """Notes a key that is about to be written."""
        self._redis.send(("SADD", self._set, key))
        if not self._noted:
            self._redis.send(("EXPIRE", self._set, FLASH_KEPT_SECONDS))
            self._noted = True

    def sweep(self, kept: Collection[str] = ()) -> int:
        """Removes files that neither the manifest nor `kept` names; returns the bytes that only the manifest names."""
        noted, named = self._noted_keys() - set(kept), self._named()
        self._remove(noted - named)
        return sum(self._redis.pipelined(("STRLEN", key) for key in sorted(noted & named)))

    def clear(self) -> None:
        """Removes everything; first the manifest if it names a file here, so that no manifest names a missing file."""
        noted = self._noted_keys()
        if noted & self._named():
            self._redis.remove([self._manifest])
        self._remove(noted)

    def remove(self, keys: Iterable[str]) -> None:
        """Removes keys that no manifest names, even after refused commands."""
        self._remove(set(keys))

    def _noted_keys(self) -> set[str]:
        [noted] = self._redis.pipelined([("SMEMBERS", self._set)])
        return {key.decode() for key in noted}

    def _named(self) -> set[str]:
        [text] = self._redis.pipelined([("GET", self._manifest)])
        try:
            manifest = None if text is None else CheckpointManifest.from_json(text, self._manifest)
        except DamagedCheckpointError:  # a damaged manifest cannot be restored from
            manifest = None
        return set() if manifest is None else {self._keys.of_file(manifest.id, file.path) for file in manifest.files}

    def _remove(self, keys: set[str]) -> None:
        ordered = sorted(keys)
        self._redis.remove(ordered)
        deque(self._redis.pipelined(self._struck_off(ordered)), maxlen=0)

    def _struck_off(self, keys: list[str]) -> Iterator[Command]:
        for first in range(0, len(keys), _NOTED_AT_ONCE):
            yield ("SREM", self._set, *keys[first : first + _NOTED_AT_ONCE])
