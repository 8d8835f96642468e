"""Figures derived from the durable state of a job: shapes and servers, phase and samples, parity and checkpoints."""

from emberscale_api.checkpoint import number_of
from emberscale_api.frozen import replace
from emberscale_api.job import Durability, FaultToleranceStrategy, TrainingJobSpec
from emberscale_api.job.roles import MemberId, Role, slot_name
from emberscale_api.job.run_policy import DEFAULT_INTERVAL
from emberscale_api.job.status import JobPhase
from emberscale_api.routing import PsAddress
from emberscale_jobmaster.membership import DrainPhase
from emberscale_jobmaster.operations import Move, MovePhase, Reload, ReloadPhase
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.sizes import RoleShapes, combined, manifest_sizes
from emberscale_jobmaster.state import PREPARATION, JobState, Stage


def batches_of(records: int, batch_size: int) -> int:
    """Returns the number of batches that hold `records` records; the last may be short."""
    return -(-records // batch_size)


def sizes_of(state: JobState, spec: TrainingJobSpec) -> RoleShapes:
    """Returns the shape in force: the rows are spread over its parameter servers."""
    return state.scaling.sizes or manifest_sizes(spec)


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
