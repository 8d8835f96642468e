"""Starts a master with numbers greater than any that earlier masters may have given, whatever the store has lost.

Servers report tables, tokens, barriers and checkpoints that the ledger does not know; the job continues beyond these.
"""

from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import MemberId
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster.figures import switching
from emberscale_jobmaster.losses import holders, recover
from emberscale_jobmaster.progress import unowned, unroute
from emberscale_jobmaster.recovery import Failure
from emberscale_jobmaster.state import JobEnd, JobState, Routing, Stage

_LOST_NUMBERS = 10_000
LOST_CHECKPOINTS = _LOST_VERSIONS = 100
"""More numbers than a master gives within the writes that the store may lose."""
MOST_NUMBER = 1 << 52
MOST_VERSION = 1 << 31
"""The largest number and the largest table version that the master accepts from a server's report.

Numbers begin at the clock's microseconds, which reach 2^52 in the year 2112. Messages hold numbers twice as large, so
the numbers after an accepted one fit, too.
"""


def initial(wall: float) -> JobState:
    """Returns a job with nothing done; `wall` is the present, in seconds since 1970."""
    fresh = with_fresh_numbers(JobState(), wall)
    generation = max(1, int(wall * 1_000_000))  # servers may be left over from a job whose store was lost
    return replace(
        fresh, routing=Routing(unowned(generation, fresh.routing.table.version)), next_generation=generation + 1
    )


def on_takeover(state: JobState, spec: TrainingJobSpec, wall: float, alone: bool = False) -> JobState:
    """Continues a job under a new master; `wall` is the present, in seconds since 1970.

    A suspended job becomes active again: its processes were told to exit, so it waits for new ones and assigns those.
    So does a job whose master is `alone`: all processes ended with the previous master, and so did its suspension. If
    it was Complete, it becomes active only for epochs that its manifest has got since. If it had Failed, what may have
    been its reason, such as a deadline, counts anew; only its checkpoints stay.
    """
    if alone and state.outcome is not None and state.outcome.phase is JobPhase.FAILED:
        state = initial(wall)
    state = replace(
        state,
        next_token=state.next_token + _LOST_NUMBERS,
        next_barrier=state.next_barrier + _LOST_NUMBERS,
    )
    state = with_fresh_numbers(state, wall)
    if state.members.slots:  # else no earlier master had a server to assign
        state = _with_fresh_generation(state, wall)
    holds_rows = state.routing.ready or state.reload is not None
    if holds_rows and not state.over:  # else a restore finds the existing checkpoints
        state = replace(
            state,
            next_checkpoint=state.next_checkpoint + LOST_CHECKPOINTS,
            next_version=state.next_version + _LOST_VERSIONS,
        )
    if not _begins_anew(state, spec, alone):
        return state
    state = replace(state, outcome=None, suspending_since=None, troubles={})
    scaling = replace(state.scaling, target=None)
    return unroute(replace(state, members=state.members.silenced(), scaling=scaling), spec)


def _begins_anew(state: JobState, spec: TrainingJobSpec, alone: bool) -> bool:
    """Whether a job waits for new processes."""
    match state.outcome:
        case None:
            return alone
        case JobEnd(phase=JobPhase.COMPLETE):  # its run ended before it had noted that
            return alone and spec.training.epochs > state.epoch + 1
        case JobEnd(phase=phase):
            return phase is JobPhase.SUSPENDED


def _with_fresh_generation(state: JobState, wall: float) -> JobState:
    """Returns the state with a next generation that no earlier master began, even one whose last writes were lost.

    No master begins a generation each microsecond. Also replaces a generation without servers: the previous master may
    have assigned it to servers that this ledger does not know.
    """
    state = replace(state, next_generation=max(state.next_generation, int(wall * 1_000_000)))
    if state.routing.table.servers:
        return state
    following = unowned(max(state.next_generation, state.routing.table.generation + 1), state.next_version)
    return replace(state, routing=Routing(following), next_generation=following.generation + 1)


def with_fresh_numbers(state: JobState, wall: float) -> JobState:
    """Returns the state with tokens, barrier numbers and scaling steps that no earlier master gave.

    `wall` is in seconds since 1970. No master gives a token or a number each microsecond, or a step each second. So if
    two masters take over from the same ledger, since the writes of the first were lost, the second begins beyond the
    first.
    """
    first = int(wall * 1_000_000)
    scaling = replace(state.scaling, next_step=max(state.scaling.next_step, int(wall)))
    return replace(
        state,
        next_token=max(state.next_token, first),
        next_barrier=max(state.next_barrier, first),
        scaling=scaling,
    )


def surpass_history(
    state: JobState, server: MemberId, generation: int, version: int, spec: TrainingJobSpec
) -> JobState:
    """Handles a parameter server that has adopted a table of this generation and version; (0, 0): none.

    If the ledger does not know the table, the store has lost the ledger's last writes, or all of it. Grants under that
    table must not count, so the job recovers under greater numbers.
    """
    table = state.routing.table
    following = switching(state)
    newest = table.version if following is None or following.table is None else following.table.version
    left = {(one.index, one.incarnation) for one in state.routing.left}
    known = (server.index, server.incarnation) in holders(state) | left
    surpassed = (generation, version) > (table.generation, newest)
    foreign = not known and generation == table.generation
    possible = generation <= MOST_NUMBER and version <= MOST_VERSION
    if state.over or generation == 0 or not possible or not (surpassed or foreign):
        return state
    reason = f"{server.slot} holds rows that the ledger does not know"
    state = recover(state, spec, Failure((server.index,), reason))
    beyond = state.routing.table
    table = unowned(max(beyond.generation, generation + 1), max(beyond.version, version + 1))
    return replace(state, routing=Routing(table), next_version=table.version + 1)


def surpass_numbers(state: JobState, generation: int, next_token: int, next_barrier: int) -> JobState:
    """Handles a server that knows larger numbers, from a master whose writes the store has lost.

    The server fences leases with lower tokens unless told that they live, and refuses barriers with lower numbers. So
    all leases end, and new ones get greater tokens.
    """
    if state.over or generation != state.routing.table.generation:
        return state
    if state.next_token < next_token <= MOST_NUMBER:
        ledger = state.ledger.revoke_all() if state.stage is Stage.TRAIN else state.ledger
        state = replace(state, next_token=next_token + _LOST_NUMBERS, ledger=ledger)
    if state.next_barrier < next_barrier <= MOST_NUMBER:
        state = replace(state, next_barrier=next_barrier + _LOST_NUMBERS)
    return state


def surpass_checkpoints(state: JobState, next_checkpoint: int) -> JobState:
    """Handles a server that may know all checkpoints below this number, from a master whose writes the store lost.

    The job does not reuse their numbers: their files may belong to a complete checkpoint.
    """
    if state.over or not state.next_checkpoint < next_checkpoint <= MOST_NUMBER:
        return state
    return replace(state, next_checkpoint=next_checkpoint)
