"""The checkpoint of another job that this one starts from, at the master's edge (`spec.checkpoint.initialFrom`)."""

from dataclasses import dataclass, field

import structlog

from emberscale_api.checkpoint import CheckpointManifest, Origin
from emberscale_api.errors import InvalidError, UnavailableError, is_of_storage
from emberscale_api.job import DataContinuation, TrainingJob
from emberscale_api.origin import FIELD, InitialCheckpoints, origin_of
from emberscale_jobmaster.checkpoints import CheckpointFolder
from emberscale_jobmaster.effects import InitialWanted
from emberscale_jobmaster.operations import Restored, Source

_log = structlog.get_logger()


class InitialUnreachableError(UnavailableError):
    """The folder of `spec.checkpoint.initialFrom` cannot be read at present."""


@dataclass(frozen=True)
class InitialFound:
    """The checkpoint found, or why the job cannot start from any: its own mistake, or a defect of this program.

    `damaged` lists, by URI, newer ones that are damaged and that were not refused before.
    """

    source: Source | None = None
    damaged: dict[str, str] = field(default_factory=dict)
    unusable: str = ""


class InitialFolder:
    """The folder of `initialFrom`. Raises InvalidError for a URI that no file system can read."""

    def __init__(self, uri: str, job: TrainingJob) -> None:
        self._folder = CheckpointFolder(uri, f"{FIELD}.uri")
        self._job = job

    @classmethod
    def of(cls, job: TrainingJob) -> "InitialFolder | None":
        """Returns the folder that the manifest names, None if it names none."""
        initial = job.spec.checkpoint.initial_from
        return None if initial is None else cls(initial.uri, job)

    def find(self, wanted: InitialWanted) -> InitialFound:
        """Returns the checkpoint to start from. Raises InitialUnreachableError."""
        refused = {uri.rpartition("/")[2]: one for uri, one in wanted.refused.items()}
        try:
            initial = InitialCheckpoints(self._folder.uri, self._folder.complete(), self._folder.read, refused)
            manifest, damaged = initial.choose(self._job, wanted.pinned)
        except InvalidError as error:
            return InitialFound(unusable=str(error))
        except Exception as error:
            problem = f"{FIELD}.uri ({self._folder.uri}) cannot be used: {type(error).__name__}: {error}"
            if is_of_storage(error):
                raise InitialUnreachableError(problem) from error
            _log.exception("initial_checkpoint_not_found", uri=self._folder.uri)
            return InitialFound(unusable=f"{problem}; this is a defect: report it with the log of the master")
        new = {identifier: problem for identifier, problem in damaged.items() if identifier not in refused}
        by_uri = {initial.uri_of(identifier): problem for identifier, problem in new.items()}
        return InitialFound(initial_source(manifest, initial.uri_of(manifest.id), self._job), by_uri)


def initial_source(manifest: CheckpointManifest, uri: str, job: TrainingJob) -> Source:
    """Returns what the job takes over from another one's checkpoint, whose folder is at `uri`."""
    continuation = job.spec.data.continuation
    origin = origin_of(manifest, uri, continuation)
    if continuation is DataContinuation.RESUME:
        return Source(uri, restored_of(manifest, origin), manifest.weight_bits, initial=True)
    restored = Restored(restores=manifest.restores, origin=origin)
    return Source(uri, restored, manifest.weight_bits, initial=True, anew=True)


def restored_of(manifest: CheckpointManifest, origin: Origin | None) -> Restored:
    """The state in a checkpoint, whose job started from `origin`."""
    data = tuple((file.uri, file.bytes) for file in (*manifest.training_files, *manifest.evaluation_files))
    return Restored(
        {entry.epoch: entry.ranges for entry in manifest.applied},
        manifest.evaluations,
        data,
        manifest.training_seconds,
        manifest.forgotten,
        manifest.restores,
        origin,
    )
