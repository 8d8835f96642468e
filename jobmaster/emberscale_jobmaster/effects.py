"""The effects of the job machine. They are carried out once the state that they belong to is durable.

An event with the same operation, server and serial number answers a call. A call is tried once, and a failure is
reported. Losing an effect that has no such answer does no harm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.checkpoint import CheckpointFile, ForgottenShare, Origin
from emberscale_api.job.roles import Role
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_jobmaster.operations import HandedPull, Image
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.tasks import Task

# To a parameter server. Each answers within its `wait_seconds`; what takes longer goes on behind, and the same call
# made again attaches to it.


@dataclass(frozen=True)
class AssignCall:
    """Adopt a table of a new generation, and load rows from the checkpoint with this id; empty: from nothing.

    Of another job's checkpoint it is the URI. With `anew`, none of its batches counts as applied. `parity` is how many
    servers may be lost at a time by the parity that they are to keep; 0: as the manifest's strategy says. With
    `no_parity`, they are to keep none all the same.
    """

    table: RoutingTable
    checkpoint: str
    wait_seconds: float
    anew: bool = False
    parity: int = 0
    no_parity: bool = False


@dataclass(frozen=True)
class HoldCall:
    """Hold pushes for `hold_seconds` from now on, under a table of this version, and report all applied batches.

    `checkpoint` is the id of the one that is to be taken; empty: none.
    """

    generation: int
    version: int
    barrier: int
    hold_seconds: float
    checkpoint: str = ""


@dataclass(frozen=True)
class SettleCall:
    """Admit these batches, wait for them, keep holding, and report all applied batches."""

    generation: int
    barrier: int
    hold_seconds: float
    settle: Applied
    wait_seconds: float


@dataclass(frozen=True)
class SnapshotCall:
    """Take a snapshot for the checkpoint with this id, resume pushes, and report all batches in it.

    `flash_bytes` is what the server may have in Redis, for a flash checkpoint. `weight_bits` is in how many bits a
    persistent one stores weights; 0: as float32. Of it, only what changed since the one with the id `since` is written;
    empty: all rows. `tracked`: later ones may build on this one. Priority rows are chosen by what happened since the
    checkpoint or save `since`, which is complete.
    """

    generation: int
    barrier: int
    hold_seconds: float
    checkpoint: str
    flash_bytes: int = 0
    weight_bits: int = 0
    tracked: bool = False
    since: str = ""


@dataclass(frozen=True)
class ResumeCall:
    """Release a barrier, in whatever state it is."""

    generation: int
    barrier: int


@dataclass(frozen=True)
class SavedCall:
    """Report how much of a barrier's snapshot is written."""

    generation: int
    barrier: int
    wait_seconds: float


@dataclass(frozen=True)
class PrepareCall:
    """Make room for the rows that a move to this table brings.

    `since` is the version that the server must serve; 0: none, since it owns nothing. `checkpoint` is what a server
    that replaces a lost one loads its rows from, and `priority` the saves of priority rows over it; empty: none was
    lost. `lost` are the indexes of servers whose rows the others are to rebuild for their successors; empty: rows move.
    `parity` and `no_parity` are as of `AssignCall`.
    """

    move: int
    since: int
    table: RoutingTable
    wait_seconds: float
    checkpoint: str = ""
    lost: tuple[int, ...] = ()
    priority: tuple[str, ...] = ()
    parity: int = 0
    no_parity: bool = False


@dataclass(frozen=True)
class CopyCall:
    """Send the rows that the move gives away, and report the progress; rest meanwhile for up to `spare_seconds`."""

    move: int
    wait_seconds: float
    spare_seconds: float


@dataclass(frozen=True)
class HandOverCall:
    """Send what has changed until this barrier, keep holding for `hold_seconds`, and report all applied batches."""

    generation: int
    barrier: int
    hold_seconds: float
    move: int
    wait_seconds: float


@dataclass(frozen=True)
class SwitchCall:
    """Adopt the table of the move, and resume pushes; `applied` is all that any server has applied.

    `pulls` are outstanding, for a server that begins to order the staleness of all.
    """

    generation: int
    barrier: int
    move: int
    applied: Applied
    pulls: tuple[HandedPull, ...] = ()


@dataclass(frozen=True)
class AbandonCall:
    """Abandon the move."""

    move: int


ServerRequest = (
    AssignCall
    | HoldCall
    | SettleCall
    | SnapshotCall
    | ResumeCall
    | SavedCall
    | PrepareCall
    | CopyCall
    | HandOverCall
    | SwitchCall
    | AbandonCall
)


@dataclass(frozen=True)
class CallServer:
    """One request to one parameter server, which fails if it takes longer than `seconds`.

    Answered by `ServerAnswered` or `ServerFailed`. `serial` is 0 if nobody waits for the answer.
    """

    operation: int
    serial: int
    server: PsAddress
    request: ServerRequest
    seconds: float


# To the checkpoint folder. None of them may block another, or anything else, however long it takes.


@dataclass(frozen=True)
class InitialWanted:
    """Where the job has no checkpoint, take the one of `spec.checkpoint.initialFrom`.

    * `pinned`: the one that the job started from before.
    * `refused`: by URI, why checkpoints failed when they were loaded.
    """

    pinned: Origin | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FindCheckpoint:
    """Look for the newest sound checkpoint that is not among `refused`.

    Where `flash`, the flash checkpoint that is known to be the newest of all, is there, the folder is not asked.
    `initial` says what to take where the job has no checkpoint at all; None: nothing.
    Answered by `CheckpointFound` or `StorageFailed`.
    """

    operation: int
    serial: int
    refused: tuple[str, ...]
    flash: str = ""
    initial: InitialWanted | None = None


@dataclass(frozen=True)
class WriteManifest:
    """Complete a checkpoint by writing its manifest atomically.

    `applied` are the batches in its rows, `files` are those of all its servers. `partial_rows` is the checkpoint that
    priority rows complete; empty: it has all rows. Answered by `ManifestWritten` or `StorageFailed`.
    """

    operation: int
    serial: int
    checkpoint: str
    image: Image
    servers: int
    applied: Applied
    files: tuple[CheckpointFile, ...]
    training_records: int
    training_files: tuple[tuple[str, int], ...]
    evaluation_files: tuple[tuple[str, int], ...]
    partial_rows: str = ""


@dataclass(frozen=True)
class PruneCheckpoints:
    """Remove what is older than the newest complete checkpoint, except the `keep` newest that are not damaged.

    Answered by `PruningDone` or `StorageFailed`.
    """

    operation: int
    serial: int
    keep: int
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class DeleteCheckpoint:
    """Remove the files of an abandoned checkpoint. Not answered."""

    checkpoint: str


# To who called, and to who watches.


@dataclass(frozen=True)
class Granted:
    """To a worker that asked: its next task."""

    task: Task


@dataclass(frozen=True)
class LeasesVoid:
    """To a worker that reported leases: these tokens are not in force."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class StartedUp:
    """A process of this role serves `seconds` after it was asked for; the job stood still for `paused_seconds`."""

    role: Role
    seconds: float
    paused_seconds: float


@dataclass(frozen=True)
class CheckpointTaken:
    """A checkpoint is complete; says how many seconds of training it cost.

    `bytes` were written, in so many `seconds`; pushes were held for `held_seconds` of them. Weights are stored in
    `weight_bits`; 0: as float32.
    """

    checkpoint: str
    cost_seconds: float
    bytes: int
    seconds: float = 0.0
    held_seconds: float = 0.0
    weight_bits: int = 0


@dataclass(frozen=True)
class Moved:
    """The rows are with so many servers, `seconds` after the move began; pushes were held for `paused_seconds` of them.

    `bytes` were copied in up to so many `rounds`.
    """

    servers: int
    seconds: float
    paused_seconds: float
    bytes: int
    rounds: int


@dataclass(frozen=True)
class Reloaded:
    """Lost servers are replaced, `seconds` after they were lost; `forgotten` is what their rows have lost."""

    forgotten: ForgottenShare
    seconds: float


@dataclass(frozen=True)
class LogEvent:
    """A log event; `event` is in snake_case, `problem` says what went wrong."""

    event: str
    subject: str
    problem: str = ""


Effect = (
    CallServer
    | FindCheckpoint
    | WriteManifest
    | PruneCheckpoints
    | DeleteCheckpoint
    | Granted
    | LeasesVoid
    | StartedUp
    | CheckpointTaken
    | Moved
    | Reloaded
    | LogEvent
)
