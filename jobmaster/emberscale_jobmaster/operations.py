"""Operations of the master on its parameter servers and checkpoints, as durable data.

An operation outlives the master that began it: it holds its phase, the answers so far, and the deadline for progress.
`pending` maps the calls in flight to the serial numbers whose answers count, by the index of the server, or `STORAGE`
for the checkpoint folder. The calls follow from the operation alone, so the next master repeats them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from emberscale_api.checkpoint import CheckpointFile, ForgottenShare, Origin
from emberscale_api.frozen import replace
from emberscale_api.job.status import EvaluationResult
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_jobmaster.barrier import DrivenBarrier
from emberscale_jobmaster.ranges import Applied, Ranges
from emberscale_jobmaster.sizes import RoleShapes

STORAGE = -1
"""Stands for the checkpoint folder in place of a server's index."""

CHECKPOINT_NOT_WRITTEN = "CheckpointNotWritten"
"""The reason of the trouble of a checkpoint whose files or manifest could not be written while the job trains."""


@dataclass(frozen=True)
class Restored:
    """The state in a checkpoint, to which parameter servers roll back: batches applied on all, by epoch.

    * `data`: the (uri, bytes) of each data file that the checkpoint saw; None if the servers started from nothing.
    * `forgotten`: the batches that the rows lost in earlier partial recoveries.
    * `restores`: how often the rows were restored from quantised weights before, by the weights' bits.
    * `origin`: the checkpoint of another job that this one started from.
    """

    applied: Mapping[int, Ranges] = field(default_factory=dict)
    evaluations: tuple[EvaluationResult, ...] = ()
    data: tuple[tuple[str, int], ...] | None = None
    training_seconds: float = 0.0
    forgotten: tuple[ForgottenShare, ...] = ()
    restores: Mapping[int, int] = field(default_factory=dict)
    origin: Origin | None = None


@dataclass(frozen=True)
class Source:
    """A checkpoint to restore: its id, and what its manifest says beyond the applied batches.

    * `weight_bits`: the fewest bits in which it stores weights; 0: all are exact.
    * `initial`: it is another job's, and `checkpoint` is the URI of its folder.
    * `anew`: its rows begin another history, in which no batch is applied.
    """

    checkpoint: str
    restored: Restored
    weight_bits: int = 0
    initial: bool = False
    anew: bool = False

    @property
    def own_checkpoint(self) -> str:
        """The id of a checkpoint of this job; empty if it is another's."""
        return "" if self.initial else self.checkpoint


class RestorePhase(StrEnum):
    """The phase of a restore."""

    FIND = "Find"
    """The newest sound checkpoint is looked for."""
    LOAD = "Load"
    """All servers adopt the routing table and load their rows."""


@dataclass(frozen=True)
class Restore:
    """Brings all servers of a new generation to the newest sound checkpoint, or to nothing.

    * `deadline`: when it fails unless it makes progress before, in seconds of the job's clock.
    * `source`: the checkpoint to load, in phase LOAD; None: start from nothing.
    * `loaded`: the bytes that each server has loaded so far.
    * `problems`: the problem that each server is retrying.
    * `applied`: the batches that each finished server has restored.
    * `again_at`: when to repeat a server's failed call.
    """

    id: int
    phase: RestorePhase
    deadline: float
    pending: Mapping[int, int] = field(default_factory=dict)
    source: Source | None = None
    loaded: Mapping[int, int] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)
    applied: Mapping[int, Applied] = field(default_factory=dict)
    again_at: Mapping[int, float] = field(default_factory=dict)


class ReloadPhase(StrEnum):
    """The phase of a reload."""

    WAIT = "Wait"
    """The successors of the lost servers are awaited."""
    FIND = "Find"
    """The newest sound checkpoint is looked for."""
    LOAD = "Load"
    """The successors load their rows; the survivors learn of the next table."""
    BARRIER = "Barrier"
    """The survivors hold pushes."""
    SWITCH = "Switch"
    """The new table counts, and not all servers are known to have adopted it."""


@dataclass(frozen=True)
class Reload:
    """Replaces lost servers: their successors load the lost rows from a checkpoint, the survivors keep theirs.

    * `reason`: who was lost, for people.
    * `began_at`, `deadline`: on the job's clock; phases FIND, LOAD and BARRIER fail at the deadline unless they make
      progress before.
    * `lost`: the servers whose rows are lost. In phase WAIT, a silent server may return.
    * `source`: the checkpoint. `priority`: the saves of priority rows to load over it.
    * `number`: names the change of table to the servers, as that of a move.
    * `table`: the next routing table, from phase LOAD on.
    * `loaded`: each successor's progress, in bytes.
    * `done`: the servers that have finished their part of this phase.
    * `barrier`: the number of its barrier; the numbers of all barriers ascend.
    * `attempts`: barriers that failed, and calls that were refused.
    * `held`: what each survivor had applied when it began to hold. `applied`: what all survivors had applied.
    """

    id: int
    phase: ReloadPhase
    reason: str
    began_at: float
    deadline: float = 0.0
    lost: tuple[PsAddress, ...] = ()
    source: Source | None = None
    priority: tuple[str, ...] = ()
    number: int = 0
    table: RoutingTable | None = None
    loaded: Mapping[int, int] = field(default_factory=dict)
    done: frozenset[int] = frozenset()
    barrier: int = 0
    attempts: int = 0
    held: Mapping[int, Applied] = field(default_factory=dict)
    applied: Applied = field(default_factory=dict)
    pending: Mapping[int, int] = field(default_factory=dict)
    again_at: Mapping[int, float] = field(default_factory=dict)

    @property
    def successors(self) -> tuple[PsAddress, ...]:
        """The servers that load rows."""
        indexes = {server.index for server in self.lost}
        return tuple(server for server in self.parties if server.index in indexes)

    @property
    def survivors(self) -> tuple[PsAddress, ...]:
        """The servers that keep their rows."""
        indexes = {server.index for server in self.lost}
        return tuple(server for server in self.parties if server.index not in indexes)

    @property
    def parties(self) -> tuple[PsAddress, ...]:
        """All servers that will own something; none before phase LOAD."""
        return () if self.table is None else self.table.owners


class CheckpointPurpose(StrEnum):
    """The purpose of a checkpoint."""

    PERIODIC = "Periodic"
    SUSPENSION = "Suspension"
    FINAL = "Final"
    FLASH = "Flash"
    """A periodic checkpoint in Redis, which lasts until the next one."""
    PRIORITY = "Priority"
    """Some rows, which complete the newest checkpoint for partial recovery."""


class CheckpointPhase(StrEnum):
    """The phase of a checkpoint."""

    BARRIER = "Barrier"
    SAVE = "Save"
    """The servers write their snapshots while training continues."""
    WRITE = "Write"
    """All files are written; whether the manifest is, is not known yet."""


@dataclass(frozen=True)
class Image:
    """The job as of the start of the barrier, as the manifest describes it."""

    epoch: int
    evaluations: tuple[EvaluationResult, ...]
    training_seconds: float
    generation: int
    version: int
    forgotten: tuple[ForgottenShare, ...] = ()
    restores: Mapping[int, int] = field(default_factory=dict)
    origin: Origin | None = None


@dataclass(frozen=True)
class Checkpointing:
    """Takes one checkpoint.

    * `checkpoint`: its id, the name of its folder.
    * `began_at`, `deadline`: seconds of the job's clock; it fails at the deadline unless it makes progress before.
    * `barrier`: its barrier, whose number also names the snapshot.
    * `held_seconds`: how long pushes were held.
    * `written`, `examined`, `problems`, `files`: each server's report on its snapshot.
    * `again_at`: when to repeat a failed call to a server or to the folder.
    * `flash_bytes`: the bytes that each server may keep in Redis for a flash checkpoint.
    * `weight_bits`: the bits in which weights are stored; 0: as float32.
    * `tracked`: whether later checkpoints may build on it.
    * `since`: the checkpoint on which it builds, or which its priority rows complete; empty: none.
    * `after`: of priority rows: the newest earlier save that completes `since`, or else `since` itself.
    * `bytes_per_second`: the most that each server may write; 0: no limit. `waited_seconds`: how long that kept the
      servers from writing.
    """

    id: int
    checkpoint: str
    purpose: CheckpointPurpose
    phase: CheckpointPhase
    began_at: float
    deadline: float
    barrier: DrivenBarrier
    image: Image
    pending: Mapping[int, int] = field(default_factory=dict)
    held_seconds: float = 0.0
    written: Mapping[int, int] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)
    files: Mapping[int, tuple[CheckpointFile, ...]] = field(default_factory=dict)
    again_at: Mapping[int, float] = field(default_factory=dict)
    flash_bytes: int = 0
    weight_bits: int = 0
    tracked: bool = False
    since: str = ""
    after: str = ""
    examined: Mapping[int, int] = field(default_factory=dict)
    bytes_per_second: int = 0
    waited_seconds: float = 0.0

    @property
    def is_flash(self) -> bool:
        """Whether it goes to Redis."""
        return self.purpose is CheckpointPurpose.FLASH

    @property
    def is_for_priority(self) -> bool:
        """Whether it has priority rows only."""
        return self.purpose is CheckpointPurpose.PRIORITY

    @property
    def servers(self) -> tuple[PsAddress, ...]:
        """The servers that save their rows in it."""
        return self.barrier.servers

    @property
    def all_files(self) -> tuple[CheckpointFile, ...]:
        """The files of all servers, by index."""
        return tuple(file for _, files in sorted(self.files.items()) for file in files)

    def awaits_files_of(self, index: int, incarnation: str) -> bool:
        """Whether this process of a parameter server has yet to write files of it."""
        writes = self.phase is CheckpointPhase.SAVE and index not in self.files
        return writes and (index, incarnation) in {(one.index, one.incarnation) for one in self.servers}

    @property
    def most_written(self) -> int:
        """The bytes in the files of the server that wrote most."""
        own = [sum(file.bytes for file in files if not file.checkpoint) for files in self.files.values()]
        return max(own, default=0)


class MovePhase(StrEnum):
    """The phase of a move."""

    PREPARE = "Prepare"
    """Servers make room for what they will receive."""
    COPY = "Copy"
    """The servers transfer rows while training continues."""
    BARRIER = "Barrier"
    """Pushes are held, and the last changes are sent."""
    SWITCH = "Switch"
    """The new table counts, and not all servers are known to have adopted it."""


@dataclass(frozen=True)
class CopyReport:
    """A server's progress in sending the rows that it gives away.

    In a rebuild, `rounds` counts the pieces of its own rows that the server took out of the parity, and the pieces of
    parity that it sent to other holders. `rebuilt` has the batches in the rows of each lost server, by its index.
    """

    ready: bool
    copied_bytes: int
    rounds: int
    rebuilt: Mapping[int, Applied] = field(default_factory=dict)


@dataclass(frozen=True)
class HandedPull:
    """A pull for training whose push has not come; another server orders it from now on.

    * `batches`: the number of batches, from `batch` on.
    * `unseen`: the batches of other pushes that the pull may not have seen.
    """

    session: int
    epoch: int
    batch: int
    token: int
    unseen: int
    batches: int = 1
    is_round: bool = False


@dataclass(frozen=True)
class Move:
    """Brings rows to the servers that own them under another table, while training continues.

    * `number`: names the move to the servers; ascending over the life of the job.
    * `sizes`: the new shape. `table`: the next routing table.
    * `servers`: by index, the servers that serve now or will serve; some leave, some join.
    * `members`: the indexes of the servers that own something now or will; empty: all.
    * `pulls`: outstanding pulls, if another server takes over ordering the staleness of all.
    * `done`: the servers that have finished their part of this phase.
    * `copied`: each server's report on its copying.
    * `barrier`, `held_at`: the barrier, in phases BARRIER and SWITCH, and when it began on the job's clock.
    * `shares`: the shares by which `table` is planned, as `Routing.shares`.
    * `began_at`, `deadline`: on the job's clock.
    * `lost`: servers whose rows the others rebuild for their new owners, without a barrier; empty: rows move.
    * `on_demand`: in a rebuild, the new owners serve the rows once they know their keys; the rows follow.
    * `settled`: in phase SWITCH, by lost server: the batches that count as applied to its rebuilt rows. `forgotten`:
      those of them that these rows lack.
    """

    id: int
    number: int
    phase: MovePhase
    began_at: float
    deadline: float
    sizes: RoleShapes
    table: RoutingTable
    servers: tuple[PsAddress, ...]
    done: frozenset[int] = frozenset()
    copied: Mapping[int, CopyReport] = field(default_factory=dict)
    barrier: DrivenBarrier | None = None
    held_at: float = 0.0
    shares: tuple[float, ...] = ()
    members: tuple[int, ...] = ()
    pulls: tuple[HandedPull, ...] = ()
    lost: tuple[int, ...] = ()
    on_demand: bool = False
    settled: Mapping[int, Applied] = field(default_factory=dict)
    forgotten: tuple[ForgottenShare, ...] = ()
    pending: Mapping[int, int] = field(default_factory=dict)
    again_at: Mapping[int, float] = field(default_factory=dict)

    @property
    def parties(self) -> tuple[PsAddress, ...]:
        """The servers that take part."""
        return tuple(self.servers[index] for index in self.members) if self.members else self.servers

    @property
    def everyone(self) -> tuple[int, ...]:
        """The indexes of the servers that take part."""
        return tuple(server.index for server in self.parties)

    @property
    def leavers(self) -> tuple[PsAddress, ...]:
        """The servers that will own nothing."""
        return tuple(server for server in self.parties if server not in self.table.owners)

    @property
    def is_adoption(self) -> bool:
        """Whether the servers that are left take over the rows of lost ones."""
        return bool(self.lost) and not {*self.lost} & {server.index for server in self.table.owners}

    @property
    def is_copied(self) -> bool:
        """Whether little is left to copy, so that the barrier may begin."""
        return self.phase is MovePhase.COPY and len(self.done) == len(self.parties)

    @property
    def holds(self) -> bool:
        """Whether pushes may be held for it."""
        return self.phase in (MovePhase.BARRIER, MovePhase.SWITCH)


@dataclass(frozen=True)
class Pruning:
    """Removes checkpoints that are no longer kept; given up at the deadline."""

    id: int
    deadline: float
    pending: Mapping[int, int] = field(default_factory=dict)
    again_at: Mapping[int, float] = field(default_factory=dict)


Operation = Restore | Reload | Checkpointing | Move | Pruning
AnyOperation = TypeVar("AnyOperation", Restore, Reload, Checkpointing, Move, Pruning)


def answered(operation: AnyOperation, whom: int) -> AnyOperation:
    """Returns the operation, which no longer waits for `whom`."""
    return replace(operation, pending={index: serial for index, serial in operation.pending.items() if index != whom})


def asking_later(operation: AnyOperation, whom: int, at: float) -> AnyOperation:
    """Returns the operation, which repeats its failed call to `whom` at `at`."""
    return replace(answered(operation, whom), again_at={**operation.again_at, whom: at})
