"""The durable state of a job; `figures` are derived from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from emberscale_api.checkpoint import ForgottenShare
from emberscale_api.dataset import DataFile
from emberscale_api.frozen import replace
from emberscale_api.job import Durability, FaultToleranceStrategy
from emberscale_api.job.data import BadRecord
from emberscale_api.job.status import CheckpointCost, EvaluationResult, JobPhase, Rebuilds
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_jobmaster.chains import Chain
from emberscale_jobmaster.flash import Flash
from emberscale_jobmaster.ledger import Ledger
from emberscale_jobmaster.membership import Drain, Membership
from emberscale_jobmaster.operations import (
    Checkpointing,
    CheckpointPurpose,
    Move,
    Operation,
    Pruning,
    Reload,
    Restore,
    Restored,
)
from emberscale_jobmaster.priority import PriorityRows
from emberscale_jobmaster.recovery import ParityGroup, Parting, Rebuilding
from emberscale_jobmaster.retry import Trouble
from emberscale_jobmaster.sizes import Scaling
from emberscale_jobmaster.statistics import Tally


class Stage(StrEnum):
    """The work that the ledger counts, or that the job waits for."""

    DISCOVER = "Discover"
    INDEX = "Index"
    READY = "Ready"
    """The data is known; the parameter servers are not all assigned."""
    TRAIN = "Train"
    EVALUATE = "Evaluate"
    SAVE = "Save"


PREPARATION = frozenset({Stage.DISCOVER, Stage.INDEX})


NOTHING_ASSIGNED = RoutingTable(generation=1, version=1, servers=(), bucket_owners=(), piece_owners=())


@dataclass(frozen=True)
class Routing:
    """The routing table, and whether every parameter server has adopted it. A table without servers assigns nothing.

    * `left`: servers that have given away all that they owned in this generation, and may still speak.
    * `shares`: the shares by which the table was planned, by index; empty: all servers have equal shares.
    """

    table: RoutingTable = NOTHING_ASSIGNED
    ready: bool = False
    left: tuple[PsAddress, ...] = ()
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class JobEnd:
    """The end of a job, or its suspension."""

    phase: JobPhase
    reason: str
    message: str


@dataclass(frozen=True)
class Clock:
    """The job's own time in seconds, which all its deadlines use.

    It runs while the job has a master and is active: time without a master, or suspended, does not count.
    """

    active_seconds: float = 0.0
    training_seconds: float = 0.0


@dataclass(frozen=True)
class JobState:
    """Everything that must survive the master. Immutable; `machine.step` returns a new one.

    * `restore`, `reload`, `checkpointings`, `move`, `prunings`: the operations under way, on the parameter servers and
      the checkpoints. All checkpoints but the last one have their snapshots.
    * `forgotten`: the batches that rows lost in partial recoveries, or that rebuilt rows lack; oldest first.
    * `troubles`: failures that are retried, by `restoring.KIND`, `reloading.KIND`, `moving.KIND` or the purpose of a
      checkpoint.
    * `next_version`: the version of the next routing table; greater than any that a server may have adopted.
      `next_generation`: the next generation; greater than any that an earlier master may have begun.
    * `shares`: the share of each parameter server relative to the others, by index; 1.0 if absent. A server with the
      share 0 owns nothing. Rows move until the routing table follows.
    * `drains`: servers that are being drained, by index, until their successors have their shares.
    * `replaced_at`: when a server was last replaced for being slow, by index; in seconds on the job's clock.
    * `chosen_parity`: the parity that servers were told to keep when they last loaded rows; 0: none.
      `chosen_durability`: with `Async`, servers that can are told to answer pushes before others hold their deltas.
    * `parity_group`: the servers whose rows the others can rebuild, or that have yet to get rebuilt rows. `rebuilding`:
      those that are being rebuilt now. `rebuilt`: those that were rebuilt.
    * `partings`: the newest roll-backs because live servers did not reach each other; oldest first.
    * `forgone`: why the job keeps no parity after too many partings, for people; empty: parity is not forgone.
    * `reloads`: the number of partial recoveries.
    * `checkpoint`: the newest complete persistent one, or the flash checkpoint that the rows were last restored from.
    * `chain`: the persistent checkpoints on which the next one may build. `checkpoint_costs`: of the newest ones.
      `most_written`: the bytes that one server wrote at most in the newest one of limited bandwidth.
    * `checkpointed_at`: when, on the job's clock, the interval to the next checkpoint began.
    * `cut_at`: when, on the job's clock, the job last had exactly the progress that `checkpoint` holds: its barrier
      began, or its rows were restored.
    * `restores`: how often the rows were restored from quantised weights, by their bits.
    * `between_failures`: seconds between losses of a parameter server that the brain expects.
    * `damaged`: checkpoints that failed their checksums, and how. `damaged_files`: the URIs of their damaged files, as
      far as they are known.
    * `ends_with`: the purpose of a complete checkpoint that ends or suspends the job.
    """

    clock: Clock = Clock()
    stage: Stage = Stage.DISCOVER
    ledger: Ledger = field(default_factory=lambda: Ledger.fresh(1))
    epoch: int = 0
    next_token: int = 1
    members: Membership = field(default_factory=Membership)
    routing: Routing = field(default_factory=Routing)
    training_files: tuple[DataFile, ...] = ()
    evaluation_files: tuple[DataFile, ...] = ()
    restored: Restored = field(default_factory=Restored)
    evaluations: tuple[EvaluationResult, ...] = ()
    tally: Tally | None = None
    bad_records: int = 0
    bad_record_samples: tuple[BadRecord, ...] = ()
    truncated_records: int = 0
    """Records in which workers cut a list of ids to its `maxLength`; a record that is trained again counts again."""
    own_errors: int = 0
    recoveries: int = 0
    reloads: int = 0
    next_operation: int = 1
    next_serial: int = 1
    next_barrier: int = 1
    next_checkpoint: int = 1
    next_version: int = 2
    next_generation: int = 2
    restore: Restore | None = None
    reload: Reload | None = None
    checkpointings: tuple[Checkpointing, ...] = ()
    move: Move | None = None
    prunings: tuple[Pruning, ...] = ()
    troubles: Mapping[str, Trouble] = field(default_factory=dict)
    checkpoint: str = ""
    chain: Chain = field(default_factory=Chain)
    checkpoint_costs: tuple[CheckpointCost, ...] = ()
    most_written: int = 0
    checkpointed_at: float = 0.0
    cut_at: float = 0.0
    restores: Mapping[int, int] = field(default_factory=dict)
    between_failures: float | None = None
    damaged: Mapping[str, str] = field(default_factory=dict)
    damaged_files: Mapping[str, str] = field(default_factory=dict)
    advised_interval: float | None = None
    """Seconds between checkpoints that the brain advises."""
    advised_strategy: FaultToleranceStrategy = FaultToleranceStrategy.FULL_RECOVERY
    """The strategy that the brain expects to cost least, among those that the manifest allows."""
    suspending_since: float | None = None
    """When the job was told to suspend, on its clock; None unless it was."""
    ends_with: CheckpointPurpose | None = None
    outcome: JobEnd | None = None
    plan_version: int = 1
    scaling: Scaling = field(default_factory=Scaling)
    flash: Flash = field(default_factory=Flash)
    shares: Mapping[int, float] = field(default_factory=dict)
    drains: Mapping[int, Drain] = field(default_factory=dict)
    replaced_at: Mapping[int, float] = field(default_factory=dict)
    forgotten: tuple[ForgottenShare, ...] = ()
    priority: PriorityRows = field(default_factory=PriorityRows)
    chosen_parity: int = 0
    chosen_durability: Durability = Durability.SYNC
    partings: tuple[Parting, ...] = ()
    forgone: str = ""
    parity_group: ParityGroup = field(default_factory=ParityGroup)
    rebuilding: Rebuilding | None = None
    rebuilt: Rebuilds = field(default_factory=Rebuilds)

    @property
    def training_records(self) -> int:
        """Records of one epoch, 0 until all files are indexed."""
        return _records(self.training_files)

    @property
    def read_files(self) -> tuple[DataFile, ...]:
        """The training files that the job reads."""
        return tuple(file for file in self.training_files if not file.trained)

    @property
    def evaluation_records(self) -> int:
        """Records of the evaluation data, 0 until all files are indexed."""
        return _records(self.evaluation_files)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations in progress."""
        if self.restore is None and self.reload is None and self.move is None:
            return self.checkpointings + self.prunings
        held = (self.restore, self.reload, *self.checkpointings, self.move, *self.prunings)
        return tuple(operation for operation in held if operation is not None)

    def having(self, operation: Operation) -> "JobState":
        """Returns the state with this operation, which replaces its earlier state or is new."""
        match operation:
            case Restore():
                return replace(self, restore=operation)
            case Reload():
                return replace(self, reload=operation)
            case Checkpointing():
                checkpointings = {one.id: one for one in self.checkpointings} | {operation.id: operation}
                return replace(self, checkpointings=tuple(checkpointings.values()))
            case Move():
                return replace(self, move=operation)
            case Pruning():
                prunings = {one.id: one for one in self.prunings} | {operation.id: operation}
                return replace(self, prunings=tuple(prunings.values()))

    def without(self, operation: Operation) -> "JobState":
        """Returns the state without this operation."""
        match operation:
            case Restore():
                return replace(self, restore=None)
            case Reload():
                return replace(self, reload=None)
            case Checkpointing():
                return replace(self, checkpointings=tuple(one for one in self.checkpointings if one.id != operation.id))
            case Move():
                return replace(self, move=None)
            case Pruning():
                return replace(self, prunings=tuple(one for one in self.prunings if one.id != operation.id))

    def asking(self, operation: Operation, *whom: int) -> "JobState":
        """Returns the state with this operation, which calls `whom` now and waits for their answers."""
        again_at = {index: at for index, at in operation.again_at.items() if index not in whom}
        pending = {**operation.pending, **dict.fromkeys(whom, self.next_serial)}
        asked = replace(operation, pending=pending, again_at=again_at)
        return replace(self.having(asked), next_serial=self.next_serial + 1)

    def beginning(self, move: Move) -> "JobState":
        """Returns the state with a new move, which takes the next numbers of an operation, a barrier and a table."""
        numbered = replace(
            self,
            next_operation=self.next_operation + 1,
            next_barrier=self.next_barrier + 1,
            next_version=self.next_version + 1,
        )
        return numbered.asking(move, *move.everyone)

    def asking_due(self, operation: Operation, now: float) -> "JobState":
        """Returns the state in which this operation makes the calls that were put off until now."""
        due = [whom for whom, at in operation.again_at.items() if now >= at]
        return self.asking(operation, *due) if due else self

    def rests(self, kind: str, now: float) -> bool:
        """Whether operations of this kind have failed, and wait for their next attempt."""
        return kind in self.troubles and now < self.troubles[kind].next_at

    def troubled(self, kind: str, trouble: Trouble) -> "JobState":
        """Returns the state after an operation of this kind has failed."""
        return replace(self, troubles={**self.troubles, kind: trouble})

    def untroubled(self, *kinds: str) -> "JobState":
        """Returns the state once operations of these kinds succeed again."""
        left = {kind: trouble for kind, trouble in self.troubles.items() if kind not in kinds}
        return replace(self, troubles=left)

    @property
    def misses_rows(self) -> bool:
        """Whether servers serve rows that are still being rebuilt."""
        group, table = self.parity_group, self.routing.table
        return bool(group.missing) and (group.generation, group.version) == (table.generation, table.version)

    @property
    def pls(self) -> float:
        """The portion of samples whose effect on the model partial recoveries have lost (CPR equation 3)."""
        return sum((share.pls for share in self.forgotten), 0.0)

    @property
    def suspending(self) -> bool:
        """Whether the job is being suspended at a checkpoint."""
        return self.suspending_since is not None

    @property
    def over(self) -> bool:
        """Whether no process has anything left to do."""
        return self.outcome is not None


def _records(files: tuple[DataFile, ...]) -> int:
    known = [file.records for file in files if file.records is not None]
    return sum(known) if len(known) == len(files) else 0


def with_scaling(state: JobState, scaling: Scaling) -> JobState:
    """Returns the state with another scaling; the operator learns of it by a new version of the plan."""
    if scaling is state.scaling or scaling == state.scaling:
        return state
    return replace(state, scaling=scaling, plan_version=state.plan_version + 1)
