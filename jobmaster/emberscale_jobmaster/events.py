"""What happens to a job, as its machine is told. `now` is seconds on a clock of the teller that never goes back.

`wall` is seconds since 1970, and only told where something outlives the master that way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.job.data import BadRecord
from emberscale_jobmaster.applied import Applied
from emberscale_jobmaster.membership import MemberId, Process
from emberscale_jobmaster.observations import ServerReport, Vitals, WorkReport
from emberscale_jobmaster.operations import CopyReport, SnapshotFile, Source
from emberscale_jobmaster.scaling import Advice
from emberscale_jobmaster.tasks import Finding


@dataclass(frozen=True, kw_only=True)
class _At:
    now: float


# Of the master itself


@dataclass(frozen=True, kw_only=True)
class TakenOver(_At):
    """A master begins, with the state that it found.

    * `awaits_plan`: there is a brain to ask for a first shape.
    * `alone`: no member that the master before knew is alive, as after the end of a whole run on one machine.
    """

    wall: float
    awaits_plan: bool = False
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class TimePassed(_At):
    """Told several times a second."""


# Of members


@dataclass(frozen=True, kw_only=True)
class Registered(_At):
    """A process joins; the numbers are those of the table that a parameter server has adopted, 0 for none."""

    member: MemberId
    process: Process
    generation: int = 0
    version: int = 0


@dataclass(frozen=True, kw_only=True)
class Spoke(_At):
    """A member called, whatever came of its call."""

    member: MemberId


@dataclass(frozen=True, kw_only=True)
class Beat(_At):
    """A heartbeat. `leases` are positions by token; `work` counts once for each `sequence`.

    A parameter server also says which table it has adopted, and which tokens and barrier numbers it has heard of under
    that generation: all below `next_token` and `next_barrier`.

    Answered by `Dropped`.
    """

    member: MemberId
    vitals: Vitals = field(default_factory=Vitals)
    leases: Mapping[int, int] = field(default_factory=dict)
    sequence: int = 0
    work: WorkReport | None = None
    served: ServerReport | None = None
    generation: int = 0
    version: int = 0
    next_token: int = 0
    next_barrier: int = 0


@dataclass(frozen=True, kw_only=True)
class TaskWanted(_At):
    """A worker asks for work. Answered by `Granted` if there is any."""

    member: MemberId


@dataclass(frozen=True, kw_only=True)
class TaskFinished(_At):
    """A worker has done a task."""

    member: MemberId
    token: int
    finding: Finding


@dataclass(frozen=True, kw_only=True)
class GrantLost(_At):
    """A worker was never told of the lease that it was granted."""

    token: int


@dataclass(frozen=True, kw_only=True)
class FailureReported(_At):
    """A member cannot go on; fatal if trying again would fail the same way."""

    member: MemberId
    reason: str
    message: str
    fatal: bool


@dataclass(frozen=True, kw_only=True)
class BadRecordsFound(_At):
    """`distinct` malformed records are known by now, `fresh` among them for the first time."""

    distinct: int
    fresh: tuple[BadRecord, ...]


# Of the operator, of people, and of the brain


@dataclass(frozen=True, kw_only=True)
class Exited(_At):
    """The operator saw a process end."""

    member: MemberId
    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class SuspensionWanted(_At):
    """The job is to rest at a checkpoint of now."""


@dataclass(frozen=True, kw_only=True)
class Advised(_At):
    """The plan of the brain that is in force; told again until it is followed."""

    advice: Advice
    wall: float


@dataclass(frozen=True, kw_only=True)
class PlanMissed(_At):
    """No first plan has come in time."""

    why: str


@dataclass(frozen=True, kw_only=True)
class IntervalAdvised(_At):
    """The brain says how many seconds between checkpoints cost least."""

    seconds: float


# Answers to effects


@dataclass(frozen=True)
class Loaded:
    """To `AssignCall`: `done`, or how far it is and what is being tried again."""

    done: bool
    loaded_bytes: int = 0
    problem: str = ""
    applied: Applied = field(default_factory=dict)


@dataclass(frozen=True)
class Said:
    """To all calls within a barrier: all that is applied. `held_seconds` to `SnapshotCall`."""

    applied: Applied
    held_seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """To `SavedCall`: the files if it is `done`, or how far it is and what is being tried again."""

    done: bool
    written_bytes: int = 0
    problem: str = ""
    files: tuple[SnapshotFile, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """To `PrepareCall`: whether it is done. To `CopyCall`, the answer is a CopyReport."""

    done: bool


ServerAnswer = Loaded | Said | Saved | Prepared | CopyReport


@dataclass(frozen=True, kw_only=True)
class ServerAnswered(_At):
    """A parameter server, by its index, has answered a call."""

    operation: int
    serial: int
    server: int
    answer: ServerAnswer


@dataclass(frozen=True, kw_only=True)
class ServerFailed(_At):
    """A call has failed. `code` is the name of a gRPC status code."""

    operation: int
    serial: int
    server: int
    code: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class CheckpointFound(_At):
    """The newest sound checkpoint, if any.

    * `damaged`: those newer that failed their checks, and how.
    * `incompatible`: why the job cannot go on from it; empty if it can.
    * `newest`: the largest number of a checkpoint, complete or not; 0 if there is none.
    """

    operation: int
    serial: int
    source: Source | None
    damaged: Mapping[str, str] = field(default_factory=dict)
    incompatible: str = ""
    newest: int = 0


@dataclass(frozen=True, kw_only=True)
class ManifestWritten(_At):
    """A checkpoint is complete."""

    operation: int
    serial: int


@dataclass(frozen=True, kw_only=True)
class PruningDone(_At):
    """Old checkpoints are removed."""

    operation: int
    serial: int


@dataclass(frozen=True, kw_only=True)
class StorageFailed(_At):
    """The checkpoint folder could not be used."""

    operation: int
    serial: int
    problem: str


Event = (
    TakenOver
    | TimePassed
    | Registered
    | Spoke
    | Beat
    | TaskWanted
    | TaskFinished
    | GrantLost
    | FailureReported
    | BadRecordsFound
    | Exited
    | SuspensionWanted
    | Advised
    | PlanMissed
    | IntervalAdvised
    | ServerAnswered
    | ServerFailed
    | CheckpointFound
    | ManifestWritten
    | PruningDone
    | StorageFailed
)
