"""The events of the job machine. `now` is in seconds, on a monotonic clock of the caller.

`wall` is in seconds since 1970; only events whose time must outlive the master carry it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.job import FaultToleranceStrategy
from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.operations import CopyReport, HandedPull, Source
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.reports import ServerReport, Vitals, WorkReport
from emberscale_jobmaster.scaling import Advice
from emberscale_jobmaster.sizes import RoleShapes
from emberscale_jobmaster.tasks import Finding


@dataclass(frozen=True, kw_only=True)
class _At:
    now: float


# Of the master itself


@dataclass(frozen=True, kw_only=True)
class TakenOver(_At):
    """A master starts, with the state that it found.

    * `awaits_plan`: there is a brain to ask for a first shape.
    * `alone`: no member that the previous master knew is alive, as after a whole local run has ended.
    * `has_flash_store`: there is a Redis for flash checkpoints.
    """

    wall: float
    awaits_plan: bool = False
    alone: bool = False
    has_flash_store: bool = False


@dataclass(frozen=True, kw_only=True)
class TimePassed(_At):
    """Time has passed; sent several times a second."""


# Of members


@dataclass(frozen=True, kw_only=True)
class Registered(_At):
    """A process joins. The numbers are those of the table that a parameter server has adopted, 0 without one."""

    member: MemberId
    process: Process
    generation: int = 0
    version: int = 0


@dataclass(frozen=True, kw_only=True)
class CallReceived(_At):
    """A member called, whatever the outcome of its call."""

    member: MemberId


@dataclass(frozen=True, kw_only=True)
class HeartbeatReceived(_At):
    """A heartbeat. `leases` are positions by token; `work` counts once for each `sequence`.

    A parameter server also reports the table that it has adopted. It may know tokens below `next_token` and barrier
    numbers below `next_barrier` of that generation, and checkpoints below `next_checkpoint` of any generation.

    Answered by `LeasesVoid`.
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
    next_checkpoint: int = 0


@dataclass(frozen=True, kw_only=True)
class TaskWanted(_At):
    """A worker asks for work. Answered by `Granted` if there is work."""

    member: MemberId


@dataclass(frozen=True, kw_only=True)
class TaskFinished(_At):
    """A worker has done a task."""

    member: MemberId
    token: int
    finding: Finding


@dataclass(frozen=True, kw_only=True)
class GrantLost(_At):
    """A worker never received the lease that it was granted."""

    token: int


@dataclass(frozen=True, kw_only=True)
class FailureReported(_At):
    """A member cannot continue; fatal if a retry would fail in the same way."""

    member: MemberId
    reason: str
    message: str
    fatal: bool


@dataclass(frozen=True, kw_only=True)
class BadRecordsFound(_At):
    """`distinct` malformed records are known; `fresh` are the new ones among them."""

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
class Rescaled(_At):
    """The numbers in the manifest were edited, or `waits` has changed; the step uses the edited spec.

    * `before`: the shape in force by the previous manifest.
    * `waits`: what keeps the first new parameter server from starting; empty: nothing.
    """

    before: RoleShapes
    waits: str
    wall: float


@dataclass(frozen=True, kw_only=True)
class DrainWanted(_At):
    """A parameter server must give away all that it owns; see `draining.begin`."""

    index: int
    incarnation: str
    why: str
    replaced: bool = False


@dataclass(frozen=True, kw_only=True)
class SuspensionWanted(_At):
    """The job must suspend at a checkpoint taken now."""


@dataclass(frozen=True, kw_only=True)
class Advised(_At):
    """The brain's plan in force; repeated until it is followed."""

    advice: Advice
    wall: float


@dataclass(frozen=True, kw_only=True)
class PlanMissed(_At):
    """No first plan arrived in time."""

    why: str


@dataclass(frozen=True, kw_only=True)
class IntervalAdvised(_At):
    """The brain advises the cheapest checkpoint interval, in seconds, and the cheapest strategy.

    The strategy is the one, among those that the manifest allows, that is expected to cost least.
    """

    seconds: float
    strategy: FaultToleranceStrategy = FaultToleranceStrategy.FULL_RECOVERY


@dataclass(frozen=True, kw_only=True)
class FailuresExpected(_At):
    """The brain expects the job to lose a parameter server once in this number of seconds."""

    between_failures: float


# Answers to effects


@dataclass(frozen=True)
class Loaded:
    """Answers `AssignCall`: `done`, or the progress and the problem that the server is retrying."""

    done: bool
    loaded_bytes: int = 0
    problem: str = ""
    applied: Applied = field(default_factory=dict)


@dataclass(frozen=True)
class AppliedReport:
    """Answers all calls within a barrier with all applied batches.

    Only the answer to `SnapshotCall` has `held_seconds`, and only that to `HandOverCall` has `pulls`.
    """

    applied: Applied
    held_seconds: float = 0.0
    pulls: tuple[HandedPull, ...] = ()


@dataclass(frozen=True)
class Saved:
    """Answers `SavedCall`: the files if `done`, or the progress and the problem that the server is retrying.

    `examined_rows` is the number of rows among which priority rows were chosen so far; `waited_seconds` the time for
    which the limit of bandwidth kept the writer from working.
    """

    done: bool
    written_bytes: int = 0
    problem: str = ""
    files: tuple[CheckpointFile, ...] = ()
    examined_rows: int = 0
    waited_seconds: float = 0.0


@dataclass(frozen=True)
class Prepared:
    """Answers `PrepareCall`: whether it is done. A CopyReport answers `CopyCall`.

    `loaded_bytes` and `problem` concern rows that are loaded from a checkpoint.
    """

    done: bool
    loaded_bytes: int = 0
    problem: str = ""


ServerAnswer = Loaded | AppliedReport | Saved | Prepared | CopyReport


@dataclass(frozen=True, kw_only=True)
class CallAnswer(_At):
    """The answer to a call of an operation, or the failure of that call; `serial` is the number of the call."""

    operation: int
    serial: int


@dataclass(frozen=True, kw_only=True)
class ServerAnswered(CallAnswer):
    """A parameter server, by its index, has answered a call."""

    server: int
    answer: ServerAnswer


@dataclass(frozen=True, kw_only=True)
class ServerFailed(CallAnswer):
    """A call has failed.

    `code` is the name of a gRPC status code; `damaged_file` the URI of the file that ruled out a checkpoint, or empty.
    """

    server: int
    code: str
    problem: str
    damaged_file: str = ""


@dataclass(frozen=True, kw_only=True)
class CheckpointFound(CallAnswer):
    """The newest sound checkpoint, if any.

    * `damaged`: the newer checkpoints that failed their checks, and how.
    * `incompatible`: why the job cannot continue from this checkpoint; empty if it can.
    * `unusable`: why the job has no checkpoint and cannot start from one of `spec.checkpoint.initialFrom`; else empty.
    * `newest`: the largest number of a checkpoint, complete or not; 0 if there is none.
    """

    source: Source | None
    damaged: Mapping[str, str] = field(default_factory=dict)
    incompatible: str = ""
    unusable: str = ""
    newest: int = 0


@dataclass(frozen=True, kw_only=True)
class ManifestWritten(CallAnswer):
    """A checkpoint is complete."""


@dataclass(frozen=True, kw_only=True)
class PruningDone(CallAnswer):
    """Old checkpoints are removed."""


@dataclass(frozen=True, kw_only=True)
class StorageFailed(CallAnswer):
    """The checkpoint folder was not usable; `lacks_credentials`: this process has no credentials for the store."""

    problem: str
    lacks_credentials: bool = False


Event = (
    TakenOver
    | TimePassed
    | Registered
    | CallReceived
    | HeartbeatReceived
    | TaskWanted
    | TaskFinished
    | GrantLost
    | FailureReported
    | BadRecordsFound
    | Exited
    | Rescaled
    | DrainWanted
    | SuspensionWanted
    | Advised
    | PlanMissed
    | IntervalAdvised
    | FailuresExpected
    | ServerAnswered
    | ServerFailed
    | CheckpointFound
    | ManifestWritten
    | PruningDone
    | StorageFailed
)
