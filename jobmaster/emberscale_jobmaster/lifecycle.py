"""Members that come, fall silent, fail and go; limits that end the job; time that passes."""

from collections.abc import Iterable
from dataclasses import replace

from emberscale_api.job import TrainingJobSpec
from emberscale_jobmaster.membership import MemberId, Process, Role, slot_name
from emberscale_jobmaster.progress import epoch_surpassed, failed, server_lost
from emberscale_jobmaster.state import BadRecord, Clock, JobState, Phase, phase_of, sizes_of

SHOWN_BAD_RECORDS = 10
OWN_ERROR = "Error"
"""The reason of an exit that is the job's own doing, unlike OOMKilled, Killed and NodeLost."""


def registered(
    state: JobState, spec: TrainingJobSpec, member: MemberId, process: Process, routing_epoch: int = 0
) -> JobState:
    """A process joins, in the place of the one before it. Raises SupersededError.

    `routing_epoch` is that of the rows that a parameter server holds already.
    """
    before = state.members.slot(member.role, member.index).process
    state = replace(state, members=state.members.register(member.role, member.index, process))
    state = epoch_surpassed(state, member, routing_epoch, spec)
    if before is None or before.incarnation == process.incarnation:
        return state
    return _gone(state, spec, replace(member, incarnation=before.incarnation))


def heard(state: JobState, spec: TrainingJobSpec, member: MemberId, routing_epoch: int = 0) -> JobState:
    """A member speaks; `routing_epoch` as in `registered`. Raises UnknownMemberError or SupersededError."""
    state = replace(state, members=state.members.set_alive(member, alive=True))
    return epoch_surpassed(state, member, routing_epoch, spec)


def silent(state: JobState, spec: TrainingJobSpec, members: Iterable[MemberId]) -> JobState:
    """These members have not been heard of for too long."""
    for member in members:
        state = _gone(replace(state, members=state.members.set_alive(member, alive=False)), spec, member)
    return state


def exited(state: JobState, spec: TrainingJobSpec, member: MemberId, exit_code: int, reason: str) -> JobState:
    """The operator saw a process end. Too many ends by the job's own doing fail the job."""
    members = state.members.exited(member)
    if members is state.members:
        return state
    state = _gone(replace(state, members=members), spec, member)
    if exit_code == 0 or reason != OWN_ERROR or state.over:
        return state
    state = replace(state, own_errors=state.own_errors + 1)
    limit = spec.run_policy.backoff_limit
    if state.own_errors <= limit:
        return state
    return failed(
        state,
        "BackoffLimitExceeded",
        f"{state.own_errors} processes ended by errors of their own, the last {member.slot} with exit code "
        f"{exit_code}; spec.runPolicy.backoffLimit allows {limit}",
    )


def failure_reported(state: JobState, member: MemberId, reason: str, message: str, fatal: bool) -> JobState:
    """A member cannot go on; fatal if trying again would fail the same way."""
    return failed(state, reason, f"{member.slot}: {message}") if fatal else state


def bad_records_found(state: JobState, spec: TrainingJobSpec, distinct: int, fresh: tuple[BadRecord, ...]) -> JobState:
    """`distinct` malformed records are known by now, `fresh` among them for the first time."""
    if distinct <= state.bad_records:
        return state
    samples = (*state.bad_record_samples, *fresh)[:SHOWN_BAD_RECORDS]
    state = replace(state, bad_records=distinct, bad_record_samples=samples)
    limit = spec.data.max_bad_records
    if distinct <= limit or not samples:
        return state
    first = samples[0]
    return failed(
        state,
        "BadRecords",
        f"{first.file}:{first.line}: {first.problem} ({distinct} malformed so far; "
        f"spec.data.maxBadRecords allows {limit})",
    )


def lists_truncated(state: JobState, lists: int) -> JobState:
    """So many more lists of ids were longer than their columns allow, and were cut."""
    return replace(state, truncated_lists=state.truncated_lists + lists)


def checkpoint_refused(state: JobState, problem: str) -> JobState:
    """A checkpoint is damaged; an older one will be used."""
    if problem in state.refused_checkpoints:
        return state
    return replace(state, refused_checkpoints=(*state.refused_checkpoints, problem))


def time_passed(state: JobState, spec: TrainingJobSpec, wall: float) -> JobState:
    """Counts time, unless the job is over; `wall` is in seconds since 1970. A job past its deadline fails."""
    if state.over:
        return state
    clock = clock_at(state.clock, wall, training=phase_of(state, spec) is Phase.TRAINING)
    state = replace(state, clock=clock)
    deadline = spec.run_policy.active_deadline
    if deadline is None or clock.active_seconds <= deadline:
        return state
    return failed(
        state, "DeadlineExceeded", f"the job was active for longer than spec.runPolicy.activeDeadline ({deadline:g}s)"
    )


def clock_at(clock: Clock, wall: float, training: bool) -> Clock:
    """The clock at `wall`, in seconds since 1970; `training` is what the job did since it was last counted."""
    elapsed = max(0.0, wall - clock.wall)
    return Clock(
        wall=wall,
        active_seconds=clock.active_seconds + elapsed,
        training_seconds=clock.training_seconds + (elapsed if training else 0.0),
    )


def leases_expired(state: JobState, tokens: Iterable[int]) -> JobState:
    """These leases were not mentioned for too long; their rest goes to others."""
    return replace(state, ledger=state.ledger.revoke(frozenset(tokens)))


def _gone(state: JobState, spec: TrainingJobSpec, member: MemberId) -> JobState:
    if member.role is Role.PS:
        return server_lost(state, member, spec)
    return leases_expired(state, (lease.token for lease in state.ledger.held_by(member)))


def waiting_for(state: JobState, spec: TrainingJobSpec) -> str:
    """Which wanted parameter servers are not there, for people; empty when all are."""
    missing = [
        slot_name(Role.PS, index)
        for index in range(sizes_of(state, spec).ps.replicas)
        if state.members.process(Role.PS, index) is None
    ]
    return f"waiting for {', '.join(missing)}" if missing else ""
