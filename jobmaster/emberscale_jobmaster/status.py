"""The answers of `GetStatus` and `WatchPlan`."""

from collections import Counter

from emberscale_api.checkpoint import ForgottenShare
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import Role, slot_name
from emberscale_api.job.status import MAX_COUNT, RESTING, JobPhase
from emberscale_api.readable import bytes_text
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.codec import message_of, wire_evaluation, wire_phase, wire_role
from emberscale_api.shape import RoleShape
from emberscale_jobmaster import flash, relief, stragglers
from emberscale_jobmaster.figures import (
    allowed_pls,
    committed_samples,
    drained_servers,
    due_parity,
    phase_of,
    routed_servers,
    wanted_sizes,
    wanted_workers,
)
from emberscale_jobmaster.lifecycle import waiting_for
from emberscale_jobmaster.losses import is_protected, missing_rows, unprotected_reason
from emberscale_jobmaster.membership import Slot
from emberscale_jobmaster.messages import wire_applied, wire_member
from emberscale_jobmaster.observations import Observations, Sighting
from emberscale_jobmaster.operations import CheckpointPurpose, MovePhase
from emberscale_jobmaster.recovery import names_of
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.statistics import eta_seconds
from emberscale_jobmaster.warning_signs import warning_signs


def job_status(state: JobState, seen: Observations, spec: TrainingJobSpec, now: float) -> pb.JobStatus:
    """Returns the full status of the job, except the master as a member."""
    phase = phase_of(state, spec)
    reason, message = explanation(state, spec)
    samples = committed_samples(state, spec)
    expected = spec.training.epochs * state.training_records
    speed = seen.meter.rate(now) if phase is JobPhase.TRAINING else None
    return message_of(
        pb.JobStatus,
        state,
        phase=wire_phase(phase),
        reason=reason,
        message=message,
        epochs=spec.training.epochs,
        samples=min(samples, MAX_COUNT),
        expected_samples=min(expected, MAX_COUNT),
        samples_per_second=speed or 0.0,
        loss=seen.window.loss(),
        auc=seen.window.auc(),
        eta_seconds=eta_seconds(expected - samples, speed) if expected else -1.0,
        evaluations=[wire_evaluation(result) for result in state.evaluations],
        members=_members(state, seen, spec, now),
        rows=seen.rows(state.routing.table.owners),
        generation=state.routing.table.generation,
        routing_version=state.routing.table.version,
        training_seconds=state.clock.training_seconds,
        evaluated_samples=state.tally.samples if state.tally is not None else 0,
        repeated_batches=min(seen.repeated_batches(), MAX_COUNT),
        sizing=_sizing(state),
        warnings=warning_signs(state, seen, spec),
        flash=_flash(state, spec),
        allowed_pls=allowed_pls(state, spec),
        forgotten=[_forgotten(share) for share in state.forgotten],
        checkpoints=state.checkpoint_costs,
        protection=_protection(state, spec),
        traffic=seen.traffic(),
        admission=seen.admission(),
    )


def explanation(state: JobState, spec: TrainingJobSpec) -> tuple[str, str]:
    """Explains the job's phase: a CamelCase reason, and a sentence."""
    if state.outcome is not None:
        return state.outcome.reason, state.outcome.message
    troubles = [trouble for kind, trouble in state.troubles.items() if kind != CheckpointPurpose.FLASH]
    if troubles:
        trouble = max(troubles, key=lambda one: one.since)
        return trouble.reason, trouble.describe(state.clock.active_seconds)
    if state.scaling.waits_for_plan:
        return state.scaling.reason, state.scaling.message
    missing = waiting_for(state, spec)
    match phase_of(state, spec):
        case JobPhase.PENDING:
            return "WaitingForParameterServers", missing
        case JobPhase.PREPARING:
            done, total = state.ledger.done_count, state.ledger.batches
            if state.stage is Stage.DISCOVER:
                return "PreparingData", "looking for the data files"
            return "PreparingData", f"counting records: {done} of {total} data files done"
        case JobPhase.RESTORING:
            if missing:
                return "WaitingForParameterServers", missing
            return "LoadingRows", "loading rows" if state.reload is None else f"loading rows: {state.reload.reason}"
        case JobPhase.TRAINING:
            return "Training", f"epoch {state.epoch + 1} of {spec.training.epochs}{_moving(state)}"
        case JobPhase.EVALUATING:
            return "Evaluating", f"epoch {state.epoch + 1} of {spec.training.epochs}"
        case _:
            if state.rebuilding is not None or state.misses_rows:
                return "SavingModel", f"waiting to write the final checkpoint{_moving(state)}"
            return "SavingModel", "writing the final checkpoint"


def _moving(state: JobState) -> str:
    """Describes the progress of a move, or of rows that follow on demand, as the end of a sentence; else empty."""
    move, lost = state.move, state.rebuilding
    if state.misses_rows:
        return f"; {missing_rows(state)}"
    if move is None:
        return "" if lost is None else f"; the rows of {lost.names} wait for {_successors(len(lost.lost))}"
    if move.lost:
        sent = bytes_text(sum(one.copied_bytes for one in move.copied.values()))
        return f"; the rows of {names_of(move.lost)} are rebuilt from parity, {sent} so far"
    servers = f"{len(move.table.servers)} parameter servers"
    if move.phase is MovePhase.PREPARE:
        return f"; {servers} prepare to take rows"
    copied = bytes_text(sum(one.copied_bytes for one in move.copied.values()))
    return f"; rows move to {servers}, {copied} so far"


def _successors(count: int) -> str:
    return "its successor" if count == 1 else "their successors"


def plan(state: JobState, spec: TrainingJobSpec) -> pb.Plan:
    """Returns the wanted number of processes of each role, with their resources; none once the job is over."""
    phase = phase_of(state, spec)
    reason, message = explanation(state, spec)
    wanted = 0 if phase in RESTING else 1
    sizes = wanted_sizes(state, spec)
    members = 0 if state.scaling.waits_for_plan else wanted
    silent = state.members.given_up() if wanted else ()
    drained = drained_servers(state) if wanted else ()
    limits = spec.master.resources
    roles = [
        _role_plan(Role.MASTER, RoleShape(1, limits.cpu_limit, limits.memory_limit), wanted),
        _role_plan(Role.PS, sizes.ps, members),
        _role_plan(Role.WORKER, sizes.worker, members),
    ]
    return pb.Plan(
        version=state.plan_version,
        reason=reason,
        message=message,
        roles=roles,
        phase=wire_phase(phase),
        sizing=_sizing(state),
        asked=pb.ScaleRequest(ps=spec.ps.replicas or 0, workers=spec.worker.replicas or 0, waits=state.scaling.waits),
        routed_ps=routed_servers(state, spec),
        silent=[wire_member(given_up.role, given_up.index, given_up.incarnation) for given_up in silent],
        drained=[wire_member(server.role, server.index, server.incarnation) for server in drained],
    )


def _flash(state: JobState, spec: TrainingJobSpec) -> pb.FlashStatus | None:
    known, trouble = state.flash, state.troubles.get(CheckpointPurpose.FLASH)
    problem = flash.missing_store(known, spec) or (trouble.message if trouble is not None else "")
    if not problem and not flash.is_wanted(known, spec):
        return None
    return message_of(pb.FlashStatus, known, interval_seconds=flash.interval(known, spec), problem=problem)


def _forgotten(share: ForgottenShare) -> pb.ForgottenShare:
    batches = wire_applied({part.epoch: part.ranges for part in share.epochs})
    return message_of(pb.ForgottenShare, share, batches=batches)


def _protection(state: JobState, spec: TrainingJobSpec) -> pb.ProtectionStatus | None:
    is_due = due_parity(state, spec) > 0
    if not is_due and not state.rebuilt.count and not state.forgone:
        return None
    none_kept = state.forgone or "the job keeps no parity of rows any more"
    return pb.ProtectionStatus(
        protected=is_protected(state),
        problem=unprotected_reason(state, spec) if is_due else none_kept,
        lost="" if state.rebuilding is None else state.rebuilding.names,
        rebuilds=state.rebuilt.count,
        seconds=state.rebuilt.seconds,
        bytes=state.rebuilt.bytes,
        rebuilt=state.rebuilt.server,
        given_up=not is_due,
    )


def _sizing(state: JobState) -> pb.Sizing:
    scaling = state.scaling
    expected, under_way = scaling.expected_throughput, scaling.reshaping is not None
    return message_of(pb.Sizing, scaling, expected_samples_per_second=expected, scaling=under_way)


def _role_plan(role: Role, size: RoleShape, wanted: int) -> pb.RolePlan:
    return pb.RolePlan(
        role=wire_role(role),
        replicas=size.replicas * wanted,
        cpu_cores=size.cpu_cores or 0.0,
        memory_bytes=size.memory_bytes or 0,
    )


def _members(state: JobState, seen: Observations, spec: TrainingJobSpec, now: float) -> list[pb.MemberStatus]:
    members = []
    owned = Counter(f"{Role.PS.value}-{owner}" for owner in state.routing.table.bucket_owners)
    workers = wanted_workers(state, spec)
    for name, slot in sorted(state.members.slots.items()):
        process = slot.process
        sighting = seen.sightings.get(name, Sighting("", 0.0, 0.0))
        rounds = sighting.rounds if name in workers else None
        incarnation = process.incarnation if process is not None else sighting.incarnation
        members.append(
            message_of(
                pb.MemberStatus,
                sighting,
                member=wire_member(slot.role, slot.index, incarnation),
                alive=process is not None and process.alive,
                registrations=slot.registrations,
                **vars(sighting.vitals),
                metrics_address=process.metrics_address if process is not None else "",
                samples_per_second=sighting.meter.rate(now) or 0.0,
                rows=sighting.server.rows if sighting.server is not None else {},
                slowness=_slowness(state, seen, spec, slot, now),
                buckets=owned[name],
                delays_for_memory=sighting.server is not None and sighting.server.delays_for_memory,
                rounds=rounds,
            )
        )
    return members


def _slowness(state: JobState, seen: Observations, spec: TrainingJobSpec, slot: Slot, now: float) -> pb.Slowness | None:
    name = slot_name(slot.role, slot.index)
    slowness = seen.slowness(name)
    if state.over:
        return None
    if slot.role is Role.WORKER:
        remedy = stragglers.remedy(state, seen, spec, name)
    else:
        remedy = relief.remedy(state, slot.index)
        relieved = seen.reliefs.get(name)
        if remedy and relieved is not None:  # it may keep up with its peers only because it owns less
            return pb.Slowness(factor=relieved.factor, seconds=max(0.0, now - relieved.since), remedy=remedy)
    if slowness is None:
        return None
    return pb.Slowness(factor=slowness.reported, seconds=max(0.0, now - slowness.since), remedy=remedy)
