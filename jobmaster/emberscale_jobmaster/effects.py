"""The effects of the job machine. They are carried out once their state is durable.

An event with the same operation, server and serial number answers a call. A call is tried once, and a failure is
reported. Losing an effect without such an answer does no harm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.checkpoint import CheckpointFile, ForgottenShare, Origin
from emberscale_api.job.roles import Role
from emberscale_api.origin import RefusedCheckpoint
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_jobmaster.operations import HandedPull, Image
from emberscale_jobmaster.parity import BY_MANIFEST, ParityOrder
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.tasks import Task

# To a parameter server. Each answers within its `wait_seconds`; work that takes longer continues in the background, and
# a repeated call attaches to it.


@dataclass(frozen=True)
class AssignCall:
    """Adopt a table of a new generation, and load rows from a checkpoint.

    * `checkpoint`: its id, or its URI if it is another job's; empty: start without rows.
    * `anew`: none of the checkpoint's batches counts as applied.
    """

    table: RoutingTable
    checkpoint: str
    wait_seconds: float
    anew: bool = False
    parity: ParityOrder = BY_MANIFEST


@dataclass(frozen=True)
class HoldCall:
    """Hold pushes for `hold_seconds` from now on, under a table of this version, and report all applied batches.

    `checkpoint` is the id of the checkpoint that the barrier is for; empty: it is for none.
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

    * `flash_bytes`: the bytes that a server may keep in Redis for a flash checkpoint.
    * `weight_bits`: the bits of a weight in a persistent checkpoint; 0: weights are float32.
    * `tracked`: later checkpoints may build on this one.
    * `since`: the complete checkpoint since which changes are written; empty: all rows are. For priority rows, the
      complete checkpoint or save since which changes count.
    * `bytes_per_second`: the most that a server may write; 0: no limit.
    """

    generation: int
    barrier: int
    hold_seconds: float
    checkpoint: str
    flash_bytes: int = 0
    weight_bits: int = 0
    tracked: bool = False
    since: str = ""
    bytes_per_second: int = 0


@dataclass(frozen=True)
class ResumeCall:
    """Release a barrier, in whatever state it is."""

    generation: int
    barrier: int


@dataclass(frozen=True)
class SavedCall:
    """Report how much of a barrier's snapshot is written; write the rest without a limit if `at_full_speed`."""

    generation: int
    barrier: int
    wait_seconds: float
    at_full_speed: bool = False


@dataclass(frozen=True)
class PrepareCall:
    """Make room for the rows that a move to this table brings.

    * `since`: the version that the server must serve; 0: the server owns nothing and serves none.
    * `checkpoint`: the checkpoint from which the successor of a lost server loads its rows; `priority`: the saves of
      priority rows to load over it; empty: no server is replaced.
    * `lost`: the indexes of servers whose rows the others rebuild for their new owners; empty: rows move.
    * `knows_async_parity`: the master counts as forgotten what rebuilt rows lack.
    * `on_demand`: as in `Move`.
    """

    move: int
    since: int
    table: RoutingTable
    wait_seconds: float
    checkpoint: str = ""
    lost: tuple[int, ...] = ()
    priority: tuple[str, ...] = ()
    parity: ParityOrder = BY_MANIFEST
    knows_async_parity: bool = False
    on_demand: bool = False


@dataclass(frozen=True)
class CopyCall:
    """Send the rows that the move gives away, and report the progress; rest meanwhile for up to `spare_seconds`."""

    move: int
    wait_seconds: float
    spare_seconds: float


@dataclass(frozen=True)
class HandOverCall:
    """Send the changes up to this barrier, keep holding for `hold_seconds`, and report all applied batches."""

    generation: int
    barrier: int
    hold_seconds: float
    move: int
    wait_seconds: float


@dataclass(frozen=True)
class SwitchCall:
    """Adopt the table of the move, and resume pushes.

    * `applied`: the batches that count as applied on a server that joins, and for the staleness bound of one that
      begins to order.
    * `pulls`: the outstanding pulls, for a server that begins to order the staleness of all.
    * `rebuilt`: by lost server, the batches that count as applied to its rows, for a server that adopts some of them.
    """

    generation: int
    barrier: int
    move: int
    applied: Applied
    pulls: tuple[HandedPull, ...] = ()
    rebuilt: Mapping[int, Applied] = field(default_factory=dict)


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


# To the checkpoint folder. However long one takes, it must not block anything else.


@dataclass(frozen=True)
class InitialWanted:
    """If the job has no checkpoint, start from one of `spec.checkpoint.initialFrom`.

    * `pinned`: the checkpoint that the job started from before.
    * `refused`: by URI, the checkpoints that failed when they were loaded.
    """

    pinned: Origin | None = None
    refused: Mapping[str, RefusedCheckpoint] = field(default_factory=dict)


@dataclass(frozen=True)
class FindCheckpoint:
    """Look for the newest sound checkpoint that is not among `refused`.

    * `flash`: the flash checkpoint known to be the newest of all; if Redis still has it, the folder is not read.
    * `initial`: what to start from if the job has no checkpoint at all; None: nothing.

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

    * `applied`: the batches in its rows. `files`: the files of all its servers.
    * `partial_rows`: the checkpoint that these priority rows complete; empty: this checkpoint has all rows.

    Answered by `ManifestWritten` or `StorageFailed`.
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
    """Remove checkpoints older than the newest complete one, except the `keep` newest that are not damaged.

    Answered by `PruningDone` or `StorageFailed`.
    """

    operation: int
    serial: int
    keep: int
    damaged: tuple[str, ...]


@dataclass(frozen=True)
class DeleteCheckpoint:
    """Remove the files of an abandoned checkpoint. Not answered.

    Parameter servers remove those of a flash checkpoint themselves. `gone` are the indexes of servers that no longer
    have rows: the files that they have left in Redis are removed, unless its manifest names them.
    """

    checkpoint: str
    gone: tuple[int, ...] = ()


# To callers, and to watchers.


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
    """A process of this role serves `seconds` after it was requested; the job paused for `paused_seconds`."""

    role: Role
    seconds: float
    paused_seconds: float


@dataclass(frozen=True)
class CheckpointTaken:
    """A checkpoint is complete; says how many seconds of training it cost.

    Writing `bytes` took `seconds`; pushes were held for `held_seconds` of them. Weights are stored in `weight_bits`
    bits; 0: as float32.
    """

    checkpoint: str
    cost_seconds: float
    bytes: int
    seconds: float = 0.0
    held_seconds: float = 0.0
    weight_bits: int = 0


@dataclass(frozen=True)
class Moved:
    """The rows are on this number of servers, `seconds` after the move began; pushes were held for `paused_seconds`.

    `bytes` were copied in at most `rounds` rounds.
    """

    servers: int
    seconds: float
    paused_seconds: float
    bytes: int
    rounds: int


@dataclass(frozen=True)
class Reloaded:
    """Lost servers are replaced, `seconds` after their loss; `forgotten` describes the batches that their rows lost."""

    forgotten: ForgottenShare
    seconds: float


@dataclass(frozen=True)
class LogEvent:
    """A log event in snake_case, with the values of its keys."""

    event: str
    fields: Mapping[str, str | float]


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
