"""Carries out the effects of the job's machine on parameter servers and on the checkpoint folder.

One thread takes each effect and starts it. The outcome reaches the machine later, as an event.
"""

import structlog

from emberscale_api.checkpoint import is_flash
from emberscale_jobmaster.checkpoints import CheckpointFolder
from emberscale_jobmaster.effects import (
    AssignCall,
    CallServer,
    DeleteCheckpoint,
    Effect,
    FindCheckpoint,
    PruneCheckpoints,
    SwitchCall,
    WriteManifest,
)
from emberscale_jobmaster.flash_manifests import FlashManifests
from emberscale_jobmaster.initial import InitialFolder
from emberscale_jobmaster.parameter_servers import ServerChannels
from emberscale_jobmaster.runtime import ClosingError, JobRuntime
from emberscale_jobmaster.storage import CheckpointStorage

_log = structlog.get_logger()


class Conductor:
    """One job's conductor; `run` returns when the master closes. Raises InvalidError."""

    def __init__(
        self, runtime: JobRuntime, token: str, authority: bytes | None = None, flash_redis_url: str = ""
    ) -> None:
        self._runtime = runtime
        uri = runtime.spec.checkpoint.uri
        folder = None if uri is None else CheckpointFolder(uri)
        flash = FlashManifests(flash_redis_url, runtime.job_uid) if flash_redis_url and folder is not None else None
        initial = InitialFolder.of(runtime.job)

        def uri_of(checkpoint: str) -> str:
            if folder is None or is_flash(checkpoint) or "/" in checkpoint:  # another job's id is a URI
                return checkpoint
            return folder.uri_of(checkpoint)

        self._storage: CheckpointStorage | None = None
        if folder is not None or initial is not None:
            self._storage = CheckpointStorage(
                folder, runtime.job, runtime.job_uid, runtime.store, runtime.note, runtime.now, flash, initial
            )
        self._servers = ServerChannels(token, authority, runtime.job.to_json(), uri_of, runtime.note, runtime.now)

    def run(self) -> None:
        """Carries out effects until the master closes."""
        try:
            while True:
                self._begin(self._runtime.next_effect())
        except ClosingError:
            return
        finally:
            self._servers.forget(keep=())

    def _begin(self, effect: Effect) -> None:
        match effect:
            case CallServer(request=request):
                if isinstance(request, AssignCall | SwitchCall):  # a table comes into force: some may be replaced
                    self._servers.forget(keep=self._runtime.snapshot()[0].members.servers())
                self._servers.start(effect)
            case FindCheckpoint() | WriteManifest() | PruneCheckpoints() | DeleteCheckpoint():
                if self._storage is not None:
                    self._storage.start(effect)
            case _:
                _log.error("effect_is_not_for_the_conductor", effect=type(effect).__name__)
