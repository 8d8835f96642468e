"""A run's folder: what is in it, and whom it belongs to."""

import fcntl
import json
import os
import platform
import shutil
import uuid
from datetime import UTC, datetime
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from emberscale.errors import BadInputError
from emberscale.preflight import ensure_writable
from emberscale_api.job import TrainingJob
from emberscale_operator.local import RunFolder


class RunStatus(StrEnum):
    """How far a run got; a run that is `Running` with no process that owns its folder was cut short."""

    RUNNING = "Running"
    COMPLETE = "Complete"
    FAILED = "Failed"
    SUSPENDED = "Suspended"
    INTERRUPTED = "Interrupted"


_ENDED = frozenset({RunStatus.COMPLETE, RunStatus.FAILED})
_FIXED = (
    "spec.model",
    "spec.data.format",
    "spec.data.train",
    "spec.data.evaluation",
    "spec.data.shuffling",
    "spec.training.batchSize",
    "spec.training.seed",
    "spec.optimizers.sparse.type",
    "spec.optimizers.dense.type",
    "spec.checkpoint.uri",
)
_SHOWN_CHARACTERS = 80


class RunRecord(BaseModel):
    """run.json.

    `seconds` is the time that earlier launches took. `uid` names the job through all of them, until it fails: what goes
    on after that from the last checkpoint is a job of its own, with `earlier_uids` before it.
    """

    model_config = ConfigDict(extra="ignore")

    name: str
    uid: str
    earlier_uids: list[str] = Field(default_factory=list)
    status: RunStatus
    launches: int = 1
    seconds: float = 0.0
    started_at: datetime
    ended_at: datetime | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    manifest: dict[str, Any]


class RunPaths:
    """The files of a run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record = root / "run.json"
        self.summary = root / "summary.json"
        self.metrics = root / "metrics.csv"
        self.picture = root / "metrics.png"
        self.logs = root / "logs"
        self.state = root / "state"
        self.checkpoints = root / "checkpoints"
        self.model = root / "model"

    def all(self) -> tuple[Path, ...]:
        """Everything that a run writes."""
        return (
            self.record,
            self.summary,
            self.metrics,
            self.picture,
            self.logs,
            self.state,
            self.checkpoints,
            self.model,
        )


class CompleteAlreadyError(Exception):
    """There is nothing to resume: the run is Complete."""


class Run:
    """A run's folder, held by this process alone while it is entered."""

    def __init__(self, paths: RunPaths, record: RunRecord, lock: int) -> None:
        self.paths = paths
        self.record = record
        self._lock = lock

    @property
    def processes(self) -> RunFolder:
        """The part of the folder that the job's processes use."""
        return RunFolder(self.paths.root)

    @property
    def job(self) -> TrainingJob:
        """The manifest as this run resolved it."""
        return TrainingJob.model_validate(self.record.manifest)

    def begin(self) -> None:
        """Writes run.json; a new run first removes what an earlier one left."""
        if self.record.launches == 1:
            for path in self.paths.all():
                _remove(path)
        self.save()

    def cancel(self) -> None:
        """The launch came to nothing: a new run may be replaced, a resumed one is as it was."""
        self.save(status=RunStatus.FAILED if self.record.launches == 1 else RunStatus.INTERRUPTED)

    def save(self, **changes: object) -> None:
        """Writes run.json with these fields changed."""
        self.record = self.record.model_copy(update=changes)
        write_atomically(self.paths.record, self.record.model_dump_json(indent=2) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)


def open_run(root: Path, job: TrainingJob, resume: bool, overwrite: bool) -> Run:
    """Takes a folder for a run; nothing in it changes before `Run.begin`.

    A new run replaces what an earlier one that is Complete or Failed left there; one that can be resumed is replaced
    only with `overwrite`, and a folder with anything else in it never. Raises BadInputError, or CompleteAlreadyError.
    """
    existed = root.exists()
    if existed and not root.is_dir():
        raise BadInputError(f"--workdir: {root} is not a folder")
    if resume and not (root / "run.json").exists():
        raise BadInputError(f"--resume: {root} holds no run; start one without --resume")
    ensure_writable(root, "--workdir")
    lock = _lock(root)
    try:
        return _open_locked(RunPaths(root), job, resume, overwrite, lock)
    except BaseException:
        os.close(lock)
        if not existed:
            root.rmdir()
        raise


def _open_locked(paths: RunPaths, job: TrainingJob, resume: bool, overwrite: bool, lock: int) -> Run:
    earlier = read_record(paths) if paths.record.exists() else None
    resolved = _with_checkpoint_uri(job, paths)
    if resume and earlier is not None:
        if earlier.status is RunStatus.COMPLETE:
            raise CompleteAlreadyError
        _refuse_other_training(TrainingJob.model_validate(earlier.manifest), resolved)
        failed = earlier.status is RunStatus.FAILED
        record = earlier.model_copy(
            update={
                "uid": str(uuid.uuid4()) if failed else earlier.uid,
                "earlier_uids": [*earlier.earlier_uids, earlier.uid] if failed else earlier.earlier_uids,
                "status": RunStatus.RUNNING,
                "launches": earlier.launches + 1,
                "ended_at": None,
                "versions": _versions(),
                "manifest": _as_document(resolved),
            }
        )
        return Run(paths, record, lock)
    if earlier is None and any(paths.root.iterdir()):
        raise BadInputError(f"--workdir: {paths.root} is not empty and holds no run.json; choose another folder")
    if earlier is not None and earlier.status not in _ENDED and not overwrite:
        raise BadInputError(
            f"--workdir: {paths.root} holds a run that was interrupted: "
            "go on with --resume, or start anew with --overwrite"
        )
    record = RunRecord(
        name=job.metadata.name,
        uid=str(uuid.uuid4()),
        status=RunStatus.RUNNING,
        started_at=datetime.now(UTC),
        versions=_versions(),
        manifest=_as_document(resolved),
    )
    return Run(paths, record, lock)


def read_record(paths: RunPaths) -> RunRecord:
    """run.json of a run. Raises BadInputError if there is none or it cannot be read."""
    try:
        return RunRecord.model_validate_json(paths.record.read_bytes())
    except FileNotFoundError:
        raise BadInputError(f"{paths.root}: holds no run: {paths.record.name} is missing") from None
    except OSError as error:
        raise BadInputError(f"{paths.record}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise BadInputError(f"{paths.record}: is not the record of a run") from error


def write_atomically(path: Path, text: str) -> None:
    """Whoever reads the file sees the old text or the new one."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _lock(root: Path) -> int:
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BadInputError(f"--workdir: {root} is in use by another `emberscale run`") from None
    return descriptor


def _with_checkpoint_uri(job: TrainingJob, paths: RunPaths) -> TrainingJob:
    if job.spec.checkpoint.uri is not None:
        return job
    checkpoint = job.spec.checkpoint.model_copy(update={"uri": str(paths.checkpoints.resolve())})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"checkpoint": checkpoint})})


def _refuse_other_training(earlier: TrainingJob, now: TrainingJob) -> None:
    """A run may go on with other resources, limits and rates, never with another model or other data."""
    for field in _FIXED:
        if _value(earlier, field) != _value(now, field):
            raise BadInputError(f"--resume: {field} differs from that of the run, which is {_shown(earlier, field)}")


def _value(job: TrainingJob, field: str) -> Any:
    value: Any = _as_document(job)
    for key in field.split("."):
        value = value.get(key)
    return value


def _shown(job: TrainingJob, field: str) -> str:
    text = json.dumps(_value(job, field))
    return text if len(text) <= _SHOWN_CHARACTERS else "in its run.json"


def _as_document(job: TrainingJob) -> dict[str, Any]:
    return job.model_dump(mode="json", by_alias=True, exclude_none=True)


def _versions() -> dict[str, str]:
    packages = ("emberscale", "torch", "numpy", "numba")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
