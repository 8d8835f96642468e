"""How a master begins: with numbers beyond all that masters before may have given, whatever the store has lost.

Servers tell of tables, tokens, barriers and checkpoints that the ledger does not know; the job goes on beyond these.
"""

from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import MemberId
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster.losses import holders, recover
from emberscale_jobmaster.progress import unowned, unroute
from emberscale_jobmaster.recovery import Failure
from emberscale_jobmaster.state import JobState, Routing, Stage, switching

_LOST_NUMBERS = 10_000
LOST_CHECKPOINTS = _LOST_VERSIONS = 100
"""More than a master gives while the store loses what it was given last."""
MOST_NUMBER = 1 << 52
MOST_VERSION = 1 << 31
"""The largest number and the largest version of a table that a server is believed to know.

Numbers begin at the clock's microseconds, which reach 2^52 in the year 2112. Messages hold numbers twice as large, so
those that follow a believed one fit, too.
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

    A suspended job is active again: its processes were told to go, so it waits for new ones and assigns those. So does
    a job whose master is `alone`: all processes ended with the master before, and so did a suspension that it began.
    """
    state = replace(
        state,
        next_token=state.next_token + _LOST_NUMBERS,
        next_barrier=state.next_barrier + _LOST_NUMBERS,
    )
    state = with_fresh_numbers(state, wall)
    if state.members.slots:  # else no master before had any server to assign
        state = _with_fresh_generation(state, wall)
    holds_rows = state.routing.ready or state.reload is not None
    if holds_rows and not state.over:  # else a restore looks which checkpoints there are
        state = replace(
            state,
            next_checkpoint=state.next_checkpoint + LOST_CHECKPOINTS,
            next_version=state.next_version + _LOST_VERSIONS,
        )
    if state.outcome is None and alone:
        state = replace(state, suspending_since=None, troubles={})
    elif state.outcome is None or state.outcome.phase is not JobPhase.SUSPENDED:
        return state
    scaling = replace(state.scaling, target=None)
    return unroute(replace(state, outcome=None, members=state.members.silenced(), scaling=scaling), spec)


def _with_fresh_generation(state: JobState, wall: float) -> JobState:
    """Generations that no master before began: none begins one each microsecond, and what the last one wrote is lost.

    One that has no servers yet may have been assigned by it, to others than the ledger will choose now.
    """
    state = replace(state, next_generation=max(state.next_generation, int(wall * 1_000_000)))
    if state.routing.table.servers:
        return state
    following = unowned(max(state.next_generation, state.routing.table.generation + 1), state.next_version)
    return replace(state, routing=Routing(following), next_generation=following.generation + 1)


def with_fresh_numbers(state: JobState, wall: float) -> JobState:
    """Tokens, barrier numbers and scaling steps that no master before gave, even one whose last writes were lost.

    `wall` is in seconds since 1970. No master gives a token or a number each microsecond, or a step each second: where
    two take over from the same ledger, since what the first wrote is lost, the second begins beyond those of the first.
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
    """A parameter server has adopted a table of this generation and version; (0, 0): none.

    A table that this ledger does not know of means that it is old, or new: the store has lost the last of it, or
    all. What was granted under that table must not count, so the job recovers, under numbers beyond it.
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
    """A server has heard of these numbers, from a master whose ledger the store has lost.

    It fences what has a lower token, unless it is told that the lease lives, and refuses barriers with lower numbers:
    the leases begin anew, beyond them.
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
    """A server has heard of all checkpoints below this number, perhaps from a master whose ledger the store has lost.

    It begins none of them again: their files may be those of a complete checkpoint.
    """
    if state.over or not state.next_checkpoint < next_checkpoint <= MOST_NUMBER:
        return state
    return replace(state, next_checkpoint=next_checkpoint)
