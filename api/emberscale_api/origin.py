"""Chooses the checkpoint of another job that a job starts from (`spec.checkpoint.initialFrom`).

Pure: the caller lists the checkpoints and reads their manifests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from emberscale_api.checkpoint import CheckpointManifest, DamagedCheckpointError, Origin
from emberscale_api.errors import InvalidError
from emberscale_api.job import DataContinuation, Keeper, TrainingJob, broken_fields

FIELD = "spec.checkpoint.initialFrom"
_NAMED = 3
"""Differences that are named one by one."""


class UnusableOriginError(InvalidError):
    """The job cannot start from the checkpoint; the text says which file, why, and what to take instead."""


class _UnfitError(InvalidError):
    """The checkpoint is complete, but does not fit this job."""


@dataclass(frozen=True)
class RefusedCheckpoint:
    """Why a checkpoint failed when it was loaded, and the URI of the file that was damaged; empty: it is not known."""

    problem: str
    damaged_file: str = ""


@dataclass(frozen=True)
class InitialCheckpoints:
    """The checkpoints in the folder of `initialFrom`.

    * `uri`: of the folder. `ids`: of those that are complete, oldest first.
    * `read`: returns the manifest of one. Raises DamagedCheckpointError for one that cannot be restored.
    * `refused`: by id, the checkpoints that failed when they were loaded. A damaged file also rules out the other
      checkpoints that need it.
    """

    uri: str
    ids: Sequence[str]
    read: Callable[[str], CheckpointManifest]
    refused: Mapping[str, RefusedCheckpoint] = field(default_factory=dict)

    def uri_of(self, identifier: str) -> str:
        """The URI of one checkpoint's folder."""
        return f"{self.uri.rstrip('/')}/{identifier}"

    def choose(self, job: TrainingJob, pinned: Origin | None = None) -> tuple[CheckpointManifest, dict[str, str]]:
        """Returns the manifest of the checkpoint that the job starts from, and by id what is damaged of newer ones.

        That is `pinned`, the one that the job started from before, if it is of this folder; else the one that the
        manifest names; else the newest that can be restored. Raises UnusableOriginError.
        """
        initial = job.spec.checkpoint.initial_from
        before = self._known(pinned)
        wanted = before or (initial.id if initial is not None else None) or ""
        if not self.ids:
            raise UnusableOriginError(f"{FIELD}.uri: {self.uri} holds no complete checkpoint")
        if wanted:
            try:
                manifest = self._fit(wanted, job)
            except (DamagedCheckpointError, _UnfitError) as error:
                raise UnusableOriginError(f"{FIELD}: {error}{self._advice(job, wanted)}") from error
            if before and pinned is not None and manifest.job_uid != pinned.job_uid:
                raise UnusableOriginError(
                    f"{FIELD}: {self.uri_of(before)} is another run's now, and not what the job started from: start a "
                    "new job"
                )
            return manifest, {}
        damaged: dict[str, str] = {}
        for identifier in reversed(self.ids):
            try:
                return self._fit(identifier, job), damaged
            except DamagedCheckpointError as error:
                damaged[identifier] = str(error)
            except _UnfitError as error:
                raise UnusableOriginError(f"{FIELD}: {error}{self._advice(job, identifier)}") from error
        others = f"; neither can {len(damaged) - 1} older ones" if len(damaged) > 1 else ""
        raise UnusableOriginError(f"{FIELD}: {next(iter(damaged.values()))}{others}")

    def _known(self, pinned: Origin | None) -> str:
        """The id of a checkpoint of this folder; empty for any other."""
        identifier = "" if pinned is None else pinned.checkpoint.rpartition("/")[2]
        return identifier if pinned is not None and self.uri_of(identifier) == pinned.checkpoint else ""

    def _fit(self, identifier: str, job: TrainingJob) -> CheckpointManifest:
        """Raises DamagedCheckpointError and _UnfitError."""
        place = self.uri_of(identifier)
        if identifier in self.refused:
            raise DamagedCheckpointError(f"{place} cannot be restored: {self.refused[identifier].problem}")
        if identifier not in self.ids:
            raise DamagedCheckpointError(f"{place} is missing, or was never completed")
        try:
            manifest = self.read(identifier)
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(f"{place} cannot be restored: {error}") from error
        if problem := self._damage_shared_with_refused(manifest):
            raise DamagedCheckpointError(f"{place} cannot be restored: {problem}")
        if problem := unfit(manifest, job):
            raise _UnfitError(f"{place} {problem}")
        return manifest

    def _damage_shared_with_refused(self, manifest: CheckpointManifest) -> str:
        """Returns why another checkpoint was refused, if a file of this one is damaged; else empty."""
        damaged = {one.damaged_file: one.problem for one in self.refused.values()}
        files = (f"{self.uri_of(file.checkpoint or manifest.id)}/{file.path}" for file in manifest.files)
        return next((damaged[file] for file in files if file in damaged), "")

    def _fitting(self, job: TrainingJob) -> Iterator[str]:
        for identifier in reversed(self.ids):
            try:
                self._fit(identifier, job)
            except (DamagedCheckpointError, _UnfitError):
                continue
            yield identifier

    def _advice(self, job: TrainingJob, instead_of: str) -> str:
        """Says which checkpoint to take instead: the newest before the one that was wanted, else the newest."""
        found = None
        for identifier in self._fitting(job):
            found = found or identifier
            if int(identifier) < int(instead_of):
                found = identifier
                break
        return f"; give {FIELD}.id: '{found}' instead" if found else "; no other checkpoint there can be taken"


def unfit(manifest: CheckpointManifest, job: TrainingJob) -> str:
    """Says why the job cannot start from a checkpoint that is whole; empty if it can."""
    continuation = job.spec.data.continuation
    resumes = continuation is DataContinuation.RESUME
    changed = broken_fields(manifest.job, job, Keeper.CHECKPOINT if resumes else Keeper.MODEL)
    if changed:
        named = [f"{one.path} is {_shown(one.now)} and {_shown(one.before)} there" for one in changed[:_NAMED]]
        more = f", and {len(changed) - _NAMED} more fields differ" if len(changed) > _NAMED else ""
        return f"does not fit this job: {', '.join(named)}{more}"
    epochs, wanted = manifest.begun_epochs, job.spec.training.epochs
    if resumes and epochs > wanted:
        return f"is in epoch {epochs}, and spec.training.epochs is {wanted}: give {epochs} at least, or take Fresh"
    expected = max(1, len(manifest.applied)) * manifest.training_records
    if continuation is DataContinuation.APPEND and manifest.applied_samples != expected:
        left = expected - manifest.applied_samples
        return (
            f"has not trained all of its own files: {left:,} samples are left, which data.continuation Append would "
            "skip; Fresh takes the model alone"
        )
    return ""


def _shown(value: object) -> str:
    return "absent" if value is None else str(value)


def origin_of(manifest: CheckpointManifest, uri: str, continuation: DataContinuation) -> Origin:
    """Returns what a job takes over that starts from a checkpoint; `uri` is that of the checkpoint's folder."""
    before = manifest.origin
    trained = {} if before is None else {file.uri: file for file in before.trained}
    steps = 0 if before is None else before.dense_steps
    if continuation is not DataContinuation.RESUME:
        # rows are live only if they count a push: those that begin another history count one
        steps = 1 if manifest.applied_samples or steps else 0
    match continuation:
        case DataContinuation.FRESH:
            trained = {}
        case DataContinuation.APPEND:
            trained |= {file.uri: file for file in manifest.training_files}
        case DataContinuation.RESUME:
            pass
    return Origin(
        checkpoint=uri,
        job=manifest.job.metadata.name,
        job_uid=manifest.job_uid,
        samples=manifest.applied_samples,
        continuation=continuation,
        trained=tuple(trained.values()),
        dense_steps=steps,
    )


NOTHING_NEW = "spec.data.train: the checkpoint has trained all files; add new ones"
"""Why a job cannot train that appends to a checkpoint, and finds no other files than those trained there."""


def changed_file(origin: Origin, files: Mapping[str, int]) -> str:
    """Says which of the files, bytes by URI, is not as it was when it was trained, and what to do; empty if none."""
    for file in origin.trained:
        found = files.get(file.uri, file.bytes)
        if found != file.bytes:
            return (
                f"{file.uri} has {found:,} bytes, and had {file.bytes:,} when {origin.checkpoint} trained it; "
                "data.continuation Append trains new files only: restore it, or give the new data under another name"
            )
    return ""
