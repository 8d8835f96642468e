"""The manifest of a job's newest flash checkpoint in Redis; parameter servers write the chunks that it lists."""

from collections.abc import Iterable
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from emberscale_api.checkpoint import FLASH_KEPT_SECONDS, CheckpointManifest
from emberscale_api.compatibility import FlashKeys
from emberscale_api.errors import UnavailableError

_TIMEOUT_SECONDS = 3.0
_REMOVED_AT_ONCE = 256


class FlashOutOfReachError(UnavailableError):
    """Redis cannot be used for flash checkpoints; the text says why, for people."""


class FlashManifests:
    """A connection of its own, so that rows on their way delay nothing else. All methods raise FlashOutOfReachError."""

    def __init__(self, url: str, job_uid: str) -> None:
        """Connects when it is used. Raises ValueError for a URL that is none."""
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

    def write(self, manifest: CheckpointManifest, before: CheckpointManifest | None) -> None:
        """Completes a checkpoint, and then removes the chunks that only the one `before` consists of."""
        try:
            self._redis.set(self._keys.manifest, manifest.to_json(), ex=FLASH_KEPT_SECONDS)
            if before is not None:
                self._remove(sorted(self._keys_of(before) - self._keys_of(manifest)))
        except (redis.RedisError, OSError) as error:
            raise FlashOutOfReachError(f"Redis cannot be used: {error}") from error

    def _keys_of(self, manifest: CheckpointManifest) -> set[str]:
        return {self._keys.of_file(manifest.id, file.path) for file in manifest.files}

    def _remove(self, keys: Iterable[str]) -> None:
        left = list(keys)
        while left:
            self._redis.unlink(*left[:_REMOVED_AT_ONCE])
            left = left[_REMOVED_AT_ONCE:]
