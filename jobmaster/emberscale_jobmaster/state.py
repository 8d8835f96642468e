"""The durable state of a job, and the figures derived from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from emberscale_api.checkpoint import ForgottenShare, number_of
from emberscale_api.dataset import DataFile
from emberscale_api.frozen import replace
from emberscale_api.job import Durability, FaultToleranceStrategy, TrainingJobSpec
from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId, Role, slot_name
from emberscale_api.job.run_policy import DEFAULT_INTERVAL
from emberscale_api.job.status import CheckpointCost, EvaluationResult, JobPhase, Rebuilds
from emberscale_api.routing import PsAddress, RoutingTable
from emberscale_jobmaster.chains import Chain
from emberscale_jobmaster.flash import Flash
from emberscale_jobmaster.ledger import Ledger
from emberscale_jobmaster.membership import Drain, DrainPhase, Membership
from emberscale_jobmaster.operations import (
    Checkpointing,
    CheckpointPurpose,
    Move,
    MovePhase,
    Operation,
    Pruning,
    Reload,
    ReloadPhase,
    Restore,
    Restored,
)
from emberscale_jobmaster.priority import PriorityRows
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.recovery import ParityGroup, Parting, Rebuilding
from emberscale_jobmaster.retry import Trouble
from emberscale_jobmaster.sizes import RoleShapes, Scaling, combined, manifest_sizes
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


def batches_of(records: int, batch_size: int) -> int:
    """Returns the number of batches that hold `records` records; the last may be short."""
    return -(-records // batch_size)


def sizes_of(state: JobState, spec: TrainingJobSpec) -> RoleShapes:
    """Returns the shape in force: the rows are spread over its parameter servers."""
    return state.scaling.sizes or manifest_sizes(spec)


def with_scaling(state: JobState, scaling: Scaling) -> JobState:
    """Returns the state with another scaling; the operator learns of it by a new version of the plan."""
    if scaling is state.scaling or scaling == state.scaling:
        return state
    return replace(state, scaling=scaling, plan_version=state.plan_version + 1)


def wanted_sizes(state: JobState, spec: TrainingJobSpec) -> RoleShapes:
    """Returns the processes that should run: for the shape in force, and for a target or a drain that needs more."""
    wanted, target = sizes_of(state, spec), state.scaling.target
    if target is not None:
        wanted = combined(wanted, target)
    if state.move is not None:
        wanted = combined(wanted, state.move.sizes)
    if not state.routing.ready and state.reload is None:
        return wanted
    servers = max(wanted.ps.replicas, len(state.routing.table.servers), servers_wanted(state, spec))
    return replace(wanted, ps=replace(wanted.ps, replicas=servers))


def wanted_workers(state: JobState, spec: TrainingJobSpec) -> frozenset[str]:
    """Returns the names of the workers that should run, without those that a smaller shape has removed."""
    return frozenset(slot_name(Role.WORKER, index) for index in range(wanted_sizes(state, spec).worker.replicas))


def servers_wanted(state: JobState, spec: TrainingJobSpec) -> int:
    """Returns the wanted number of parameter servers in the routing table.

    If all servers of the job's shape are being drained, one more stands in for them until one has a successor.
    """
    servers = (state.scaling.target or sizes_of(state, spec)).ps.replicas
    if not state.drains:
        return servers
    trains = state.routing.ready and not state.suspending and not state.over
    return servers + (trains and all(_is_drained(state, index) for index in range(servers)))


def routed_servers(state: JobState, spec: TrainingJobSpec) -> int:
    """Returns the number of servers in the routing table or ready to take over rows; 0 without a table."""
    servers = len(state.routing.table.servers)
    if not servers:
        return 0
    joined = [state.members.process(Role.PS, index) for index in range(servers, servers_wanted(state, spec))]
    return servers + sum(process is not None for process in joined)


def drained_servers(state: JobState) -> tuple[MemberId, ...]:
    """Returns the servers that have given all their rows away, until their successors have a share."""
    return tuple(
        MemberId(Role.PS, index, drain.incarnation)
        for index, drain in state.drains.items()
        if drain.phase is not DrainPhase.LEAVES
    )


def wanted_shares(state: JobState, servers: int) -> tuple[float, ...]:
    """Returns the share of each server relative to the others; empty if all are equal.

    A server that is being drained, or whose rows others have adopted, has the share 0 until another process has taken
    its place.
    """
    away = {index for index in range(servers) if _is_drained(state, index) or _is_vacant(state, index)}
    if not away and not state.shares:
        return ()
    shares = tuple(0.0 if index in away else state.shares.get(index, 1.0) for index in range(servers))
    return shares if max(shares, default=0.0) > 0.0 and len(set(shares)) > 1 else ()


def _is_vacant(state: JobState, index: int) -> bool:
    """Whether a server of the routing table owns nothing and has no process."""
    table = state.routing.table
    is_routed = state.routing.ready and index < len(table.servers) and table.servers[index] not in table.owners
    return is_routed and state.members.process(Role.PS, index) is None


def _is_drained(state: JobState, index: int) -> bool:
    drain = state.drains.get(index)
    if drain is None:
        return False
    process = state.members.slot(Role.PS, index).process
    return process is None or not process.alive or process.incarnation == drain.incarnation


def leaves(state: JobState, server: PsAddress) -> bool:
    """Whether this server is to go: it is being drained, or will own nothing once a move has ended."""
    drain = state.drains.get(server.index)
    is_drained = drain is not None and drain.incarnation == server.incarnation
    return is_drained or (state.move is not None and server in state.move.leavers)


def limits_of(shares: tuple[float, ...]) -> tuple[int, ...] | None:
    """Returns the limits with which `placed` follows shares, to a thousandth; None: all are equal."""
    return tuple(max(1, round(share * 1000)) if share > 0.0 else 0 for share in shares) or None


def switching(state: JobState) -> Move | Reload | None:
    """Returns the operation whose table only some servers may have adopted; at most one, as a reload ends moves."""
    move, reload = state.move, state.reload
    if move is not None and move.phase is MovePhase.SWITCH:
        return move
    return reload if reload is not None and reload.phase is ReloadPhase.SWITCH else None


def live_servers(state: JobState, spec: TrainingJobSpec) -> tuple[PsAddress, ...]:
    """Returns the live parameter servers among those of the shape in force, by index."""
    found = map(state.members.server, range(sizes_of(state, spec).ps.replicas))
    return tuple(server for server in found if server is not None)


def missing_servers(state: JobState, sizes: RoleShapes) -> list[str]:
    """Returns the names of the parameter servers of a shape that are not alive."""
    return [
        slot_name(Role.PS, index) for index in range(sizes.ps.replicas) if state.members.process(Role.PS, index) is None
    ]


def awaits_servers(state: JobState, spec: TrainingJobSpec) -> bool:
    """Whether the shape in force lacks parameter servers, or is not decided."""
    return state.scaling.waits_for_plan or bool(missing_servers(state, sizes_of(state, spec)))


def phase_of(state: JobState, spec: TrainingJobSpec) -> JobPhase:
    """Returns the phase that people see."""
    if state.outcome is not None:
        return state.outcome.phase
    if state.reload is not None:
        return JobPhase.RESTORING
    match state.stage:
        case Stage.DISCOVER | Stage.INDEX:
            return JobPhase.PENDING if awaits_servers(state, spec) else JobPhase.PREPARING
        case Stage.READY:
            waits = not state.recoveries and awaits_servers(state, spec)
            return JobPhase.PENDING if waits else JobPhase.RESTORING
        case Stage.TRAIN:
            return JobPhase.TRAINING
        case Stage.EVALUATE:
            return JobPhase.EVALUATING
        case Stage.SAVE:
            return JobPhase.SAVING


def committed_samples(state: JobState, spec: TrainingJobSpec) -> int:
    """Returns the samples that are applied on every parameter server, over all epochs."""
    size, records = spec.training.batch_size, state.training_records
    if state.stage in PREPARATION:
        return 0
    if state.stage in (Stage.EVALUATE, Stage.SAVE):
        return (state.epoch + 1) * records
    in_epoch = sum(min(stop * size, records) - start * size for start, stop in state.ledger.done)
    return state.epoch * records + in_epoch


def checkpoint_interval(state: JobState, spec: TrainingJobSpec) -> float:
    """Returns the seconds between checkpoints: those of the manifest, else those advised, else the default."""
    return spec.checkpoint.interval or state.advised_interval or DEFAULT_INTERVAL


def allowed_pls(state: JobState, spec: TrainingJobSpec) -> float:
    """Returns the portion of lost samples that the job may reach; 0 under `Auto` unless partial recovery is advised."""
    partial = FaultToleranceStrategy.PARTIAL_RECOVERY
    is_chosen = partial in (spec.fault_tolerance.strategy, state.advised_strategy)
    return spec.fault_tolerance.allowed_pls if is_chosen else 0.0


def wanted_parity(state: JobState, spec: TrainingJobSpec) -> int:
    """Returns the parity that servers should keep once all load rows; 0 under `Auto` unless advised."""
    erasure_coding = FaultToleranceStrategy.ERASURE_CODING
    return spec.allowed_parity if erasure_coding in (spec.fault_tolerance.strategy, state.advised_strategy) else 0


def due_parity(state: JobState, spec: TrainingJobSpec) -> int:
    """Returns the parity that the rows should have now, whether or not all of them have it yet; 0: none.

    With `ErasureCoding` this is the manifest's even while parity is forgone: such a job counts as unprotected. Else it
    is the chosen one, or none with too few servers.
    """
    if spec.fault_tolerance.strategy is FaultToleranceStrategy.ERASURE_CODING:
        return spec.fault_tolerance.parity
    return 0 if 0 < len(state.routing.table.owners) <= state.chosen_parity else state.chosen_parity


def keeps_async(state: JobState, table: RoutingTable) -> bool:
    """Whether the servers of a table are told to answer pushes before others hold their deltas; all must know how."""
    processes = [state.members.process(Role.PS, one.index) for one in table.owners]
    knows = all(process is not None and process.knows_async_parity for process in processes)
    return state.chosen_durability is Durability.ASYNC and knows


def loses_answered(state: JobState) -> bool:
    """Whether a switch to rebuilt rows is under way that may lack batches whose pushes were answered."""
    move = state.move
    switches = move is not None and bool(move.lost) and move.phase is MovePhase.SWITCH
    return switches and state.chosen_durability is Durability.ASYNC


def newest_checkpoint(state: JobState) -> str:
    """Returns the id of the newest complete checkpoint of either tier that the ledger knows; empty if there is none."""
    return newest_flash(state) or state.checkpoint


def newest_flash(state: JobState) -> str:
    """Returns the flash checkpoint that is newer than all others that the ledger knows; empty if there is none."""
    newest = state.flash.checkpoint
    if not newest or newest in state.damaged:
        return ""
    return newest if not state.checkpoint or number_of(newest) >= number_of(state.checkpoint) else ""


def applied_batches(state: JobState, spec: TrainingJobSpec) -> Applied:
    """Returns the batches that the ledger counts as done, by epoch."""
    whole = ((0, batches_of(state.training_records, spec.training.batch_size)),)
    if state.stage in PREPARATION or state.stage is Stage.READY:
        return state.restored.applied
    present = state.ledger.done if state.stage is Stage.TRAIN else whole
    return {**dict.fromkeys(range(state.epoch), whole), state.epoch: present}


def samples_in(state: JobState, spec: TrainingJobSpec, batches: Applied) -> int:
    """Returns the samples of batches by epoch; the last batch of an epoch may be short."""
    size, records = spec.training.batch_size, state.training_records
    spans = (span for epoch in batches.values() for span in epoch)
    return sum(max(0, min(stop * size, records) - start * size) for start, stop in spans)
