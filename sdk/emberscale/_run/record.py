"""The contents of a run's folder: its files, and its record."""

import re
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from emberscale_api.errors import InvalidError
from emberscale_api.job import TrainingJob
from emberscale_api.job.status import JobPhase

_CHECKPOINT = re.compile(r"\d{8,}")


class RunStatus(StrEnum):
    """The outcome of a run: the phase in which its job rests, if it rests in one.

    `RUNNING` without a process that owns the folder, and `INTERRUPTED`, are runs that were cut short.
    """

    RUNNING = "Running"
    COMPLETE = JobPhase.COMPLETE
    FAILED = JobPhase.FAILED
    SUSPENDED = JobPhase.SUSPENDED
    INTERRUPTED = "Interrupted"


class RunRecord(BaseModel):
    """run.json.

    `seconds` is the time that earlier launches took. `uid` names the job through all of them, until it fails: what goes
    on after that from the last checkpoint is a job of its own, with `earlier_uids` before it. `manifest` is as it was
    given, with its defaults filled in; where it names no place for checkpoints they are in the run's folder.
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

    @property
    def given(self) -> TrainingJob:
        """The original manifest."""
        return TrainingJob.model_validate(self.manifest)

    def checkpoint_uri(self, paths: "RunPaths") -> str:
        """The place of its checkpoints: the manifest's, else in the run's folder."""
        uri = self.given.spec.checkpoint.uri
        return uri if uri is not None else str(paths.checkpoints.resolve())

    def job(self, paths: "RunPaths") -> TrainingJob:
        """The manifest as the run's processes get it: with the place of its checkpoints."""
        given = self.given
        checkpoint = given.spec.checkpoint.model_copy(update={"uri": self.checkpoint_uri(paths)})
        return given.model_copy(update={"spec": given.spec.model_copy(update={"checkpoint": checkpoint})})


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

    @property
    def next(self) -> "RunPaths":
        """The files of a new run while a Complete one is here."""
        return RunPaths(self.root / "next")

    def all(self) -> tuple[Path, ...]:
        """Everything that a run writes, its record last."""
        return (
            self.summary,
            self.metrics,
            self.picture,
            self.logs,
            self.state,
            self.checkpoints,
            self.model,
            self.record,
        )


def read_record(paths: RunPaths) -> RunRecord:
    """run.json of a run. Raises InvalidError if there is none or it cannot be read."""
    try:
        return RunRecord.model_validate_json(paths.record.read_bytes())
    except FileNotFoundError:
        hint = hint_at_run(paths.root)
        raise InvalidError(f"{paths.root}: holds no run: {paths.record.name} is missing{hint}") from None
    except OSError as error:
        raise InvalidError(f"{paths.record}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise InvalidError(f"{paths.record}: is not the record of a run") from error


def hint_at_run(name: Path | str) -> str:
    """Returns the end of an error that names the folder of the run with this name; empty if there is none."""
    meant = RunPaths(Path("runs", name))
    return f"; did you mean {meant.root}?" if meant.record.exists() else ""


def record_if_any(paths: RunPaths) -> RunRecord | None:
    """Returns the record of the run in the folder, None if there is none. Raises InvalidError."""
    return read_record(paths) if paths.record.exists() else None


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that readers see either the old text or the new one."""
    beside = unfinished(path)
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def unfinished(path: Path) -> Path:
    """Returns the file that `write_atomically` writes first, and leaves only if the process is killed."""
    return path.with_name(f".{path.name}.new")


def located(place: str) -> tuple[str, str]:
    """Returns the URI of the checkpoints that a PLACE names, and the id of the one that it names, empty for all."""
    paths = RunPaths(Path(place))
    uri = place.rstrip("/")
    if paths.record.exists():
        return read_record(paths).checkpoint_uri(paths), ""
    if _CHECKPOINT.fullmatch(uri.rpartition("/")[2]):
        uri, _, chosen = uri.rpartition("/")
        return uri or ".", chosen
    return uri or ".", ""
