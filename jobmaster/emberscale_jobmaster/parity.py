"""Decides whether servers keep parity of the rows that they load, and how many partings end that.

Every load of all servers decides anew: with `ErasureCoding` servers keep parity; under `Auto` they keep it if the brain
advises it and all of them can. After too many partings the job forgoes parity, and continues to train without it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from emberscale_api.frozen import replace
from emberscale_api.job import Durability, FaultToleranceStrategy, TrainingJobSpec, can_keep_parity
from emberscale_api.job.roles import Role, slot_name
from emberscale_api.job.status import PARITY_STEP
from emberscale_api.routing import RoutingTable
from emberscale_jobmaster import reshaping
from emberscale_jobmaster.figures import newest_checkpoint, wanted_parity
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.recovery import Parting
from emberscale_jobmaster.state import JobState

MOST_PARTINGS = 3
"""After this many roll-backs because servers do not reach each other, the job keeps no parity.

Once fewer of these roll-backs count, servers that load rows keep parity again.
"""
PARTINGS_SECONDS = 1800.0
"""Partings count together within this time of the job's clock, and for any time without a checkpoint in between."""


@dataclass(frozen=True)
class ParityOrder:
    """What the servers of a routing table are told of parity.

    * `parity`: the number of servers that may be lost at a time; 0: as the manifest's strategy says.
    * `is_forgone`: keep none, whatever the manifest says.
    * `is_async`: answer pushes before other servers hold their deltas.
    """

    parity: int = 0
    is_forgone: bool = False
    is_async: bool = False


BY_MANIFEST = ParityOrder()


@dataclass(frozen=True)
class _ParityChoice:
    """The parity that servers are to keep, and why, for people.

    `is_hindered`: parity is advised, but servers of another version prevent it.
    """

    parity: int
    why: str
    is_hindered: bool = False


def decide(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Decides whether the servers keep parity of the rows that they load; reports a change as a step."""
    was_forgone = bool(state.forgone)
    if was_forgone and (len(recent_partings(state)) < MOST_PARTINGS or not heeds_that_none_is_kept(state)):
        state = replace(state, forgone="")
    before, choice = state.chosen_parity, _choose(state, spec)
    state = replace(state, chosen_parity=choice.parity, chosen_durability=spec.fault_tolerance.durability)
    if choice.parity:
        lost = "one parameter server" if choice.parity == 1 else f"{choice.parity} parameter servers at a time"
        message = f"with parity of rows from now on, to rebuild {lost}: {choice.why}"
    else:
        message = f"without parity of rows from now on: {choice.why}"
    late = ""
    if choice.parity and spec.fault_tolerance.durability is Durability.ASYNC:
        late = _owners_without(state.routing.table, state, _knows_async)
    if late:
        message += f"; pushes wait for it as with durability Sync, since {late} did not say that they know Async"
    may_change = was_forgone or spec.fault_tolerance.strategy is FaultToleranceStrategy.AUTO
    is_news = may_change and choice.parity != before
    if choice.is_hindered or late:
        is_news |= [step.message for step in state.scaling.steps if step.reason == PARITY_STEP][-1:] != [message]
    return reshaping.note_step(state, PARITY_STEP, message, 0.0) if is_news else state


def ordered(state: JobState, table: RoutingTable) -> ParityOrder:
    """Returns what the servers of a table are told: Async only if all of them know how."""
    is_async = state.chosen_durability is Durability.ASYNC and not _owners_without(table, state, _knows_async)
    return ParityOrder(state.chosen_parity, bool(state.forgone), is_async)


def _knows_async(process: Process) -> bool:
    return process.knows_async_parity


def _choose(state: JobState, spec: TrainingJobSpec) -> _ParityChoice:
    if state.forgone:
        return _ParityChoice(0, state.forgone)
    wanted, servers = wanted_parity(state, spec), len(state.routing.table.owners)
    if spec.fault_tolerance.strategy is not FaultToleranceStrategy.AUTO:
        return _ParityChoice(wanted, "no servers have parted for a while")
    if not wanted:
        return _ParityChoice(0, "other ways cost less")
    if not can_keep_parity(servers, wanted):
        return _ParityChoice(0, f"it takes {1 + wanted} parameter servers")
    if unable := _owners_without(state.routing.table, state, lambda process: process.most_parity >= wanted):
        why = f"it is expected to cost least, but {unable} did not say that they keep it: they run another version"
        return _ParityChoice(0, why, is_hindered=True)
    return _ParityChoice(wanted, "that is expected to cost least")


def _owners_without(table: RoutingTable, state: JobState, ability: Callable[[Process], bool]) -> str:
    """Names the servers with rows, by this table, that did not register with an ability; empty if all did."""
    processes = {one.index: state.members.process(Role.PS, one.index) for one in table.owners}
    return ", ".join(
        slot_name(Role.PS, index)
        for index, process in sorted(processes.items())
        if process is None or not ability(process)
    )


def note_parting(state: JobState, told: str) -> JobState:
    """Notes that live servers do not reach each other; `told` says which. Forgoes parity after too many partings."""
    newest = Parting(state.clock.active_seconds, newest_checkpoint(state))
    state = replace(state, partings=(*recent_partings(state), newest)[-MOST_PARTINGS:])
    if len(state.partings) < MOST_PARTINGS or not heeds_that_none_is_kept(state):
        return state
    return replace(state, forgone=f"servers did not get together {MOST_PARTINGS} times, the last time {told}")


def recent_partings(state: JobState) -> tuple[Parting, ...]:
    """Returns the partings that count together with one that happens now.

    These are the partings of the last PARTINGS_SECONDS and those since the newest checkpoint, since which the job has
    secured no progress.
    """
    since, checkpoint = state.clock.active_seconds - PARTINGS_SECONDS, newest_checkpoint(state)
    return tuple(one for one in state.partings if one.at > since or one.checkpoint == checkpoint)


def heeds_that_none_is_kept(state: JobState) -> bool:
    """Whether any server with rows obeys an order to keep no parity; older versions follow the manifest instead.

    One such server is enough: the others never meet it, and train on without parity. If all servers ignore the order,
    they meet and part again, and only another roll-back ends the waiting of their pushes.
    """
    processes = [state.members.process(Role.PS, one.index) for one in state.routing.table.owners]
    return any(process is not None and process.most_parity > 0 for process in processes)
