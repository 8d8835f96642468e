"""The job machine: `step` takes an event and returns the new state of the job, and the effects to carry out.

It uses no clock, thread or network. The caller makes the state durable, then carries out the effects, in any order and
concurrently, and reports their outcomes as further events. The module of its subject handles each event; automatic
transitions (stages, operations that are due) follow every event.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from emberscale_api.frozen import replace
from emberscale_api.job import FaultToleranceStrategy, TrainingJobSpec
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster import (
    dispatch,
    draining,
    due_checkpoints,
    lifecycle,
    moving,
    progress,
    rebuilding,
    relief,
    reloading,
    reshaping,
    restoring,
    scaling,
    stragglers,
    takeover,
    tasks,
    transitions,
)
from emberscale_jobmaster.effects import Effect, Granted, LeasesVoid, LogEvent, StartedUp
from emberscale_jobmaster.events import (
    Advised,
    BadRecordsFound,
    CallAnswer,
    CallReceived,
    DrainWanted,
    Event,
    Exited,
    FailureReported,
    FailuresExpected,
    GrantLost,
    HeartbeatReceived,
    IntervalAdvised,
    PlanMissed,
    Registered,
    Rescaled,
    SuspensionWanted,
    TakenOver,
    TaskFinished,
    TaskWanted,
    TimePassed,
)
from emberscale_jobmaster.figures import due_parity, phase_of, sizes_of
from emberscale_jobmaster.observations import SILENT_STUCK_SECONDS, STUCK_SECONDS, Observations
from emberscale_jobmaster.operations import CheckpointPhase
from emberscale_jobmaster.state import PREPARATION, JobState, Stage

COUNTED_SECONDS = 1.0
"""The time that may pass before the durable clock counts it; a new phase counts it at once."""
_ABOUT = 1.1
"""The factor by which the expected time between failures must change before it is noted."""


@dataclass(frozen=True)
class MasterState:
    """The state of one master.

    * `job`: must survive the master. `seen`: may be lost with it.
    * `looked_at`: the time of the last event. `counted_at`: the time up to which the job's clock has been counted. Both
      are on the clock of the events.
    """

    job: JobState
    seen: Observations = field(default_factory=Observations)
    looked_at: float = 0.0
    counted_at: float = 0.0

    def clock(self, now: float) -> float:
        """The job's clock at a time of the events' clock, in seconds."""
        uncounted = 0.0 if self.job.over else max(0.0, now - self.counted_at)
        return self.job.clock.active_seconds + uncounted


Stepped = tuple[MasterState, tuple[Effect, ...]]


def step(state: MasterState, event: Event, spec: TrainingJobSpec) -> Stepped:
    """Returns the state after an event, and the effects to carry out once that state is durable.

    Raises UnknownMemberError, SupersededMemberError and InvalidReportError for events that must be refused; the state
    is then unchanged. Raises LedgerError and TransitionError for a defect.
    """
    elapsed = event.now - state.looked_at
    seen = state.seen.counted(elapsed, _can_move(state.job))
    looked = MasterState(state.job, seen, max(event.now, state.looked_at), state.counted_at)
    after, effects = _handled(looked, event, spec)
    if isinstance(event, TakenOver):
        looked = replace(looked, job=moving.forget_barrier(looked.job))
    return _settled(looked, after, effects, event.now, spec)


def _handled(state: MasterState, event: Event, spec: TrainingJobSpec) -> Stepped:
    job, seen, now = state.job, state.seen, state.clock(event.now)
    match event:
        case TakenOver():
            return _taken_over(state, event, spec), ()
        case TimePassed():
            return _time_passed(state, event, spec)
        case Registered():
            return _registered(state, event, spec)
        case CallReceived(member=member):
            job.members.check(member)
            return replace(state, seen=_heard(state, member)), ()
        case HeartbeatReceived():
            return _heartbeat_received(state, event, spec)
        case TaskWanted(member=member):
            return _task_wanted(state, event, member, spec)
        case TaskFinished(member=member, token=token, finding=finding):
            finished = tasks.finish(job, spec, member, token, finding)
            if finished is not job and member.slot in seen.sightings:
                seen = seen.finished(member)
            return replace(state, job=finished, seen=seen), ()
        case GrantLost(token=token):
            return replace(state, job=lifecycle.expire_leases(job, [token])), ()
        case FailureReported(member=member, reason=reason, message=message, fatal=fatal):
            return replace(state, job=lifecycle.on_failure(job, member, reason, message, fatal)), ()
        case BadRecordsFound(distinct=distinct, fresh=fresh):
            return replace(state, job=lifecycle.on_bad_records(job, spec, distinct, fresh)), ()
        case Exited(member=member, exit_code=code, reason=reason):
            return replace(state, job=lifecycle.on_exit(job, spec, member, code, reason)), ()
        case Rescaled(before=before, waits=waits, wall=wall):
            edited = scaling.follow_manifest(job, spec, before, now, wall, waits)
            return replace(state, job=replace(edited, plan_version=edited.plan_version + 1)), ()
        case DrainWanted(index=index, incarnation=incarnation, why=why, replaced=replaced):
            return replace(state, job=draining.begin(job, index, incarnation, why, now, replaced=replaced)), ()
        case SuspensionWanted():
            return replace(state, job=progress.begin_suspension(job, now)), ()
        case Advised(advice=advice, wall=wall):
            return replace(state, job=scaling.follow(job, spec, advice, now, wall)), ()
        case PlanMissed(why=why):
            return replace(state, job=scaling.stop_waiting(job, spec, why)), ()
        case IntervalAdvised(seconds=seconds, strategy=strategy):
            if spec.fault_tolerance.strategy is FaultToleranceStrategy.FULL_RECOVERY:
                return state, ()  # checkpoints keep the default interval
            return replace(state, job=replace(job, advised_interval=seconds, advised_strategy=strategy)), ()
        case FailuresExpected(between_failures=seconds):
            known = job.between_failures
            if known is not None and known / _ABOUT <= seconds <= known * _ABOUT:
                return state, ()
            return replace(state, job=replace(job, between_failures=seconds)), ()
        case CallAnswer():
            job, effects = dispatch.on_answer(job, event, spec, now)
            return replace(state, job=job), effects


def _taken_over(state: MasterState, event: TakenOver, spec: TrainingJobSpec) -> MasterState:
    state.job.ledger.check()  # from here on, each step checks what it changes
    job = takeover.on_takeover(state.job, spec, event.wall, event.alone)
    job = replace(job, flash=replace(job.flash, available=event.has_flash_store))
    if event.awaits_plan:
        job = scaling.await_plan(job, spec)
    resumed = event.alone or (state.job.outcome is not None and job.outcome is None)
    clock = job.clock.active_seconds
    job = scaling.follow_manifest(job, spec, sizes_of(job, spec), clock, event.wall, "", resumed)
    job = dispatch.on_takeover(job, spec)
    seen = Observations().watching(job.members, job.ledger).taking_over(job.members)
    return MasterState(job, seen, event.now, event.now)


def _time_passed(state: MasterState, event: TimePassed, spec: TrainingJobSpec) -> Stepped:
    if state.job.over:
        return state, ()
    elapsed = max(0.0, event.now - state.counted_at)
    # The deadline is checked separately, as a job with short phases never has COUNTED_SECONDS left to count.
    if elapsed >= COUNTED_SECONDS or state.clock(event.now) > lifecycle.active_limit(spec):
        job = lifecycle.on_time_passed(state.job, spec, elapsed)
        state = replace(state, job=job, counted_at=event.now)
    job, seen, now = state.job, state.seen, state.clock(event.now)
    timeout = spec.sharding.lease_timeout
    silent = seen.silent(job.members, timeout)
    lapsed: list[int] = []
    stuck: list[MemberId] = []
    if job.stage not in PREPARATION:  # heartbeats omit leases of preparation: only silence ends them
        forgotten = min(timeout, max(2.0, 5 * spec.sharding.heartbeat_interval))
        lapsed = seen.lapsed(job.ledger, timeout, forgotten)
        least = SILENT_STUCK_SECONDS if job.stage is Stage.EVALUATE else STUCK_SECONDS
        stuck = [member for member in seen.stuck(job.members, job.ledger, least) if member not in silent]
    job = lifecycle.give_up_silent(job, spec, silent)
    job = lifecycle.expel_stuck(job, spec, stuck)
    job = lifecycle.expire_leases(job, lapsed)
    job, seen, told = _slow_found(job, seen, spec, event.now, now)
    job = scaling.on_time_passed(job, spec, now)
    job = dispatch.on_time_passed(job, spec, now)
    notes = (
        *(LogEvent("member_is_silent", {"member": one.slot, "incarnation": one.incarnation}) for one in silent),
        *(LogEvent("member_is_stuck", {"member": one.slot, "incarnation": one.incarnation}) for one in stuck),
        *(LogEvent("lease_lapsed", {"fencing_token": token}) for token in lapsed),
        *told,
    )
    return replace(state, job=job, seen=replace(seen, lapses=seen.lapses + len(lapsed))), notes


def _slow_found(
    job: JobState, seen: Observations, spec: TrainingJobSpec, now: float, clock: float
) -> tuple[JobState, Observations, tuple[LogEvent, ...]]:
    """Compares members with their peers, revokes the leases of workers that became slow, and replaces some members."""
    if job.stage is not Stage.TRAIN or job.reload is not None:
        return job, seen, ()
    before, seen = seen, seen.compared(job.members, now)
    slow = stragglers.newly_slow(before, seen)
    taken = [token for token, lease in job.ledger.leases.items() if lease.holder.slot in slow]
    seen = stragglers.resting(job, seen, spec, now)
    replaced = stragglers.replaceable(job, seen, spec, now)
    job = lifecycle.expel_stuck(lifecycle.expire_leases(job, taken), spec, replaced)
    job, seen, lost, relieved = relief.relieve(job, seen, now, clock)
    job = lifecycle.expel_stuck(job, spec, lost)
    notes = (
        *(LogEvent("member_is_slow", {"member": name, "factor": seen.slow[name].reported}) for name in slow),
        *(
            LogEvent("slow_member_is_replaced", {"member": one.slot, "incarnation": one.incarnation})
            for one in replaced
        ),
        *relieved,
    )
    return job, stragglers.replaced(seen, replaced, now), notes


def _registered(state: MasterState, event: Registered, spec: TrainingJobSpec) -> Stepped:
    job, member = state.job, event.member
    is_new = not job.members.slot(member.role, member.index).registrations
    joined = lifecycle.register(job, spec, member, event.process, event.generation, event.version)
    asked_at = joined.scaling.changed_at
    effects: tuple[Effect, ...] = ()
    if is_new and asked_at is not None and member.role is Role.WORKER:
        effects = (StartedUp(Role.WORKER, max(0.0, state.clock(event.now) - asked_at), 0.0),)
    return replace(state, job=joined, seen=_heard(state, member)), effects


def _heard(state: MasterState, member: MemberId) -> Observations:
    return state.seen if _came_too_late(state, member) else state.seen.heard(member)


def _came_too_late(state: MasterState, member: MemberId) -> bool:
    """Whether the operator replaced a member before it heard that the job is over.

    Such a process has no rows. What its predecessor reported last stands.
    """
    known = state.seen.sightings.get(member.slot)
    return state.job.over and known is not None and known.incarnation != member.incarnation


def _heartbeat_received(state: MasterState, event: HeartbeatReceived, spec: TrainingJobSpec) -> Stepped:
    member, work = event.member, event.work
    job = lifecycle.on_call(state.job, spec, member, event.generation, event.version)
    job = takeover.surpass_numbers(job, event.generation, event.next_token, event.next_barrier)
    job = takeover.surpass_checkpoints(job, event.next_checkpoint)
    job, dropped = tasks.report_progress(job, spec, member, dict(event.leases))
    if _came_too_late(state, member):
        return replace(state, job=job), (LeasesVoid(tuple(dropped)),)
    seen = state.seen.heard(member).beat(member, event.vitals, event.leases)
    if work is not None and member.role is Role.WORKER:
        if work.truncated_records and seen.is_news(member, event.sequence):
            job = lifecycle.count_truncated(job, work.truncated_records)
        seen = seen.worked(member, event.sequence, work, event.now, training=job.stage is Stage.TRAIN)
    if event.served is not None and member.role is Role.PS:
        job = rebuilding.note_rows(job, member, event.generation, event.version, event.served)
        is_due = due_parity(job, spec) > 0
        if is_due and seen.has_heard_servers(job.members):  # an earlier master may have lost one
            trouble = rebuilding.trouble_of(job, member, event.generation, event.served)
            seen = seen.troubled(member, trouble)
            job = rebuilding.note_parity(
                job, spec, member, event.generation, event.served, seen.troubled_seconds(member)
            )
        seen = seen.served(member, event.served, event.now, training=job.stage is Stage.TRAIN)
    return replace(state, job=job, seen=seen), (LeasesVoid(tuple(dropped)),)


def _task_wanted(state: MasterState, event: TaskWanted, member: MemberId, spec: TrainingJobSpec) -> Stepped:
    job, seen = lifecycle.on_call(state.job, spec, member), state.seen.heard(member)
    leases, batches = stragglers.leases_for(job, seen, spec, member, event.now)
    job, task = tasks.acquire(job, spec, member, batches, leases)
    if task is None:
        return replace(state, job=job, seen=seen), ()
    return replace(state, job=job, seen=stragglers.leased(seen, member, batches, event.now)), (Granted(task),)


def _can_move(job: JobState) -> bool:
    """Whether the leases of workers can move: not before the servers are ready, nor while a barrier may hold pushes."""
    held = any(taking.phase is CheckpointPhase.BARRIER for taking in job.checkpointings)
    held = held or (job.move is not None and job.move.holds) or job.rebuilding is not None
    return job.routing.ready and job.stage in (Stage.TRAIN, Stage.EVALUATE) and not held


def _settled(
    before: MasterState, after: MasterState, effects: Iterable[Effect], now: float, spec: TrainingJobSpec
) -> Stepped:
    """Applies all automatic transitions, and returns their effects."""
    job, clock = after.job, after.clock(now)
    while True:
        if job is not before.job:
            job = progress.advance(before.job, job, spec)
        begun = restoring.begin_if_due(job, spec, clock)
        if after.seen.has_heard_servers(begun.members):  # a new barrier would end one held for a switch
            begun = reloading.advance_if_due(begun, spec, clock)
            begun = due_checkpoints.begin_if_due(begun, spec, clock)
            begun = moving.begin_if_due(begun, spec, clock)
        if begun is job:
            break
        job = begun
    job = draining.advance(reshaping.note_members(job, spec, clock), spec, clock)
    counted_at = after.counted_at
    if job is not before.job and not before.job.over:
        phase = phase_of(before.job, spec)
        if phase is not phase_of(job, spec):  # count the exact time of each phase
            elapsed, counted_at = max(0.0, now - counted_at), max(now, counted_at)
            job = replace(job, clock=lifecycle.count_time(job.clock, elapsed, training=phase is JobPhase.TRAINING))
    seen = after.seen
    if job.routing.table.generation != before.job.routing.table.generation:
        seen = seen.rolled_back()
    if job.ledger is not before.job.ledger:
        job.ledger.check_since(before.job.ledger)
    if job is not before.job:
        transitions.check(before.job.operations, job.operations)
    if job.members is not before.job.members or job.ledger is not before.job.ledger:
        seen = seen.watching(job.members, job.ledger)
    effects = [*effects, *dispatch.effects_between(before.job, job, spec)]
    return MasterState(job, seen, after.looked_at, counted_at), tuple(effects)
