"""Drains parameter servers: a server that is to go gives its rows away first, and its successor gets a share back.

    wanted -> (rows move away) -> drained -> the process goes -> a successor joins -> (rows move to it) -> over
       the process goes too early -> the job recovers as from any lost server
       nobody can take the rows over in time -> given up

A drain makes the server's wanted share 0 (`figures.wanted_shares`); the moves follow from that, also while the job
evaluates. Nothing rolls back. To drain the job's only server, another server is started to hold the rows meanwhile
(`figures.servers_wanted`).
"""

from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import MemberId, Role, slot_name
from emberscale_api.readable import duration_text
from emberscale_jobmaster import reshaping
from emberscale_jobmaster.figures import servers_wanted, wanted_shares
from emberscale_jobmaster.losses import may_own
from emberscale_jobmaster.membership import Drain, DrainPhase
from emberscale_jobmaster.state import JobState


def begin(state: JobState, index: int, incarnation: str, why: str, now: float, *, replaced: bool = False) -> JobState:
    """Begins to drain the process of this incarnation, which then exits by itself, or is `replaced` by the master.

    Changes nothing while all other servers are leaving or have yet to start; the caller must ask again.
    """
    name, process = slot_name(Role.PS, index), state.members.slot(Role.PS, index).process
    if state.over or process is None or process.incarnation != incarnation:  # it has a successor
        return state
    before = state.drains.get(index)
    if (before is not None and before.incarnation == incarnation) or not may_own(state, index, incarnation):
        return state
    drained = replace(state, drains={**state.drains, index: Drain(incarnation, why, now, DrainPhase.LEAVES, replaced)})
    servers = len(state.routing.table.servers)
    others = [one for one in range(servers) if one != index and state.members.process(Role.PS, one) is not None]
    takers = any(share > 0.0 and one in others for one, share in enumerate(wanted_shares(drained, servers)))
    if not takers and (servers > 1 or index >= servers):  # a stand-in is started only for a job's only server
        return state
    to_whom = "" if takers else f" to its stand-in ps-{servers}"
    return reshaping.note_step(drained, "PlannedDrain", f"{name} moves its rows away{to_whom}: {why}", 0.0)


def may_go(state: JobState, index: int, incarnation: str) -> bool:
    """Whether the job would lose nothing with this process."""
    if state.over:
        return True
    writes = any(taking.awaits_files_of(index, incarnation) for taking in state.checkpointings)
    return not writes and not may_own(state, index, incarnation)


def advance(state: JobState, spec: TrainingJobSpec, now: float) -> JobState:
    """Advances drains, has drained servers replaced, and gives up drains for which no other server starts."""
    if state.over:
        return state
    for index, drain in state.drains.items():
        state = _advanced(_given_up(state, spec, index, drain, now), index, drain, now)
    return state


def _given_up(state: JobState, spec: TrainingJobSpec, index: int, drain: Drain, now: float) -> JobState:
    """Ends a drain if the server that should take its rows does not start in time."""
    last, seconds = servers_wanted(state, spec) - 1, now - drain.began_at
    waits = drain.phase is DrainPhase.LEAVES and state.members.process(Role.PS, last) is None
    if not waits or not state.routing.ready or seconds < spec.scaling.timeout:
        return state
    why = f": {state.scaling.waits}" if state.scaling.waits else ""
    message = f"{slot_name(Role.PS, index)} keeps its rows: ps-{last} did not join within {duration_text(seconds)}{why}"
    return reshaping.note_step(_over(state, index), "GaveUpDrain", message, seconds)


def _advanced(state: JobState, index: int, drain: Drain, now: float) -> JobState:
    name, slot = slot_name(Role.PS, index), state.members.slot(Role.PS, index)
    process, seconds = slot.process, now - drain.began_at
    if process is not None and process.incarnation == drain.incarnation:
        if not state.routing.ready:
            return state
        if not may_go(state, index, drain.incarnation):
            if drain.phase is DrainPhase.DRAINED:  # the job has rolled back, and gave it rows again
                return _with(state, index, replace(drain, phase=DrainPhase.LEAVES, began_at=now))
            return state
        if drain.phase is not DrainPhase.LEAVES:
            return state
        state = _with(state, index, replace(drain, phase=DrainPhase.DRAINED))
        state = reshaping.note_step(state, "DrainedServer", f"{name} has no rows left and may end", seconds)
        if not drain.replaced:
            return state
        return replace(state, members=state.members.expelled(MemberId(Role.PS, index, drain.incarnation)))
    if not state.routing.ready or drain.phase is DrainPhase.LEAVES:  # it went too early, or the job rolls back
        return _over(state, index) if process is not None or drain.phase is DrainPhase.LEAVES else state
    if process is not None and drain.phase is DrainPhase.DRAINED:
        state = _with(state, index, replace(drain, phase=DrainPhase.REPLACED))
        return reshaping.note_step(state, "JoinedServer", f"a new {name} joined", seconds)
    if process is not None and may_own(state, index, process.incarnation) and state.move is None:
        return reshaping.note_step(
            _over(state, index), "ReplacedServer", f"the new {name} has its share of the rows", seconds
        )
    return _over(state, index) if index >= len(state.routing.table.servers) else state


def _with(state: JobState, index: int, drain: Drain) -> JobState:
    return replace(state, drains={**state.drains, index: drain})


def _over(state: JobState, index: int) -> JobState:
    return replace(state, drains={one: drain for one, drain in state.drains.items() if one != index})
