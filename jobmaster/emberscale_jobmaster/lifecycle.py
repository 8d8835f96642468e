"""Transitions for members that join, go silent, fail and exit, for limits that end the job, and for time."""

import math
from collections.abc import Iterable

from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import MAX_COUNT, JobPhase
from emberscale_api.readable import duration_text
from emberscale_jobmaster.figures import missing_servers, phase_of, sizes_of
from emberscale_jobmaster.losses import on_server_lost
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.progress import fail
from emberscale_jobmaster.state import Clock, JobState
from emberscale_jobmaster.takeover import surpass_history

SHOWN_BAD_RECORDS = 10
OWN_ERROR = "Error"
"""The reason of an exit that the job itself caused, unlike OOMKilled, Killed and NodeLost."""


def register(
    state: JobState,
    spec: TrainingJobSpec,
    member: MemberId,
    process: Process,
    generation: int = 0,
    version: int = 0,
) -> JobState:
    """Registers a process, which replaces its predecessor. Raises SupersededMemberError.

    `generation` and `version` describe the rows that a parameter server already holds; 0 if it holds none.
    """
    before = state.members.slot(member.role, member.index).process
    state = replace(state, members=state.members.register(member.role, member.index, process))
    state = surpass_history(state, member, generation, version, spec)
    if before is None or before.incarnation == process.incarnation:
        return state
    return _gone(state, spec, replace(member, incarnation=before.incarnation))


def on_call(
    state: JobState, spec: TrainingJobSpec, member: MemberId, generation: int = 0, version: int = 0
) -> JobState:
    """Handles a call of a member; numbers are as in `register`. Raises UnknownMemberError, SupersededMemberError."""
    members = state.members.spoke(member)
    if members is not state.members:
        state = replace(state, members=members)
    return surpass_history(state, member, generation, version, spec)


def give_up_silent(state: JobState, spec: TrainingJobSpec, members: Iterable[MemberId]) -> JobState:
    """Gives up members that have been silent for too long."""
    for member in members:
        state = _gone(replace(state, members=state.members.silent(member)), spec, member)
    return state


def expel_stuck(state: JobState, spec: TrainingJobSpec, members: Iterable[MemberId]) -> JobState:
    """Expels members that send heartbeats but make no progress; the master refuses them from now on."""
    for member in members:
        state = _gone(replace(state, members=state.members.expelled(member)), spec, member)
    return state


def on_exit(state: JobState, spec: TrainingJobSpec, member: MemberId, exit_code: int, reason: str) -> JobState:
    """Handles the end of a process. Too many failures that the job itself caused fail the job."""
    slot = state.members.slot(member.role, member.index)
    given_up = slot.process is None and slot.given_up == member.incarnation
    members = state.members.exited(member)
    if members is state.members:
        return state
    state = _gone(replace(state, members=members), spec, member)
    if exit_code == 0 or reason != OWN_ERROR or given_up or state.over:
        return state
    state = replace(state, own_errors=state.own_errors + 1)
    limit = spec.run_policy.backoff_limit
    if state.own_errors <= limit:
        return state
    return fail(
        state,
        "BackoffLimitExceeded",
        f"{state.own_errors} processes failed, the last {member.slot} with exit code "
        f"{exit_code}; spec.runPolicy.backoffLimit allows {limit}",
    )


def on_failure(state: JobState, member: MemberId, reason: str, message: str, fatal: bool) -> JobState:
    """Handles a member that cannot continue; fatal if a retry would fail in the same way."""
    return fail(state, reason, f"{member.slot}: {message}") if fatal else state


def on_bad_records(state: JobState, spec: TrainingJobSpec, distinct: int, fresh: tuple[BadRecord, ...]) -> JobState:
    """Counts malformed records: `distinct` are known, and `fresh` are the new ones among them."""
    if distinct <= state.bad_records:
        return state
    # workers find them in the order of the epoch, and may report one again
    known = {(record.file, record.line): record for record in (*fresh, *state.bad_record_samples)}
    samples = tuple(known[place] for place in sorted(known)[:SHOWN_BAD_RECORDS])
    state = replace(state, bad_records=distinct, bad_record_samples=samples)
    limit = spec.data.max_bad_records
    if distinct <= limit or not samples:
        return state
    first = samples[0]
    return fail(
        state,
        "BadRecords",
        f"{first.file}:{first.line}: {first.problem} (at least {distinct} malformed; "
        f"spec.data.maxBadRecords allows {limit})",
    )


def count_truncated(state: JobState, records: int) -> JobState:
    """Counts records in which a list of ids was cut to its column's maximum length."""
    return replace(state, truncated_records=min(state.truncated_records + records, MAX_COUNT))


def count_time(clock: Clock, elapsed: float, training: bool) -> Clock:
    """Returns the job's clock `elapsed` seconds later; `training` says whether the job trained meanwhile."""
    return Clock(clock.active_seconds + elapsed, clock.training_seconds + (elapsed if training else 0.0))


def on_time_passed(state: JobState, spec: TrainingJobSpec, elapsed: float) -> JobState:
    """Advances the job's clock by `elapsed` seconds, unless the job has ended. A job past its deadline fails."""
    if state.over:
        return state
    clock = count_time(state.clock, elapsed, training=phase_of(state, spec) is JobPhase.TRAINING)
    state = replace(state, clock=clock)
    limit = active_limit(spec)
    if clock.active_seconds <= limit:
        return state
    deadline = f"spec.runPolicy.activeDeadline ({duration_text(limit)})"
    return fail(state, "DeadlineExceeded", f"the job was active for longer than {deadline}")


def active_limit(spec: TrainingJobSpec) -> float:
    """Returns for how many seconds a job may be active: infinity without a deadline."""
    deadline = spec.run_policy.active_deadline
    return math.inf if deadline is None else deadline


def expire_leases(state: JobState, tokens: Iterable[int]) -> JobState:
    """Revokes leases that no heartbeat has mentioned for too long; other workers get their remaining batches."""
    return replace(state, ledger=state.ledger.revoke(frozenset(tokens)))


def _gone(state: JobState, spec: TrainingJobSpec, member: MemberId) -> JobState:
    if member.role is Role.PS:
        return on_server_lost(state, member, spec)
    return expire_leases(state, (lease.token for lease in state.ledger.held_by(member)))


def waiting_for(state: JobState, spec: TrainingJobSpec) -> str:
    """Returns a sentence that names the missing parameter servers; empty if none is missing."""
    missing = missing_servers(state, sizes_of(state, spec))
    return f"waiting for {', '.join(missing)}" if missing else ""
