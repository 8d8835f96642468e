"""Follows the brain's plans and edits of the manifest: turns the state and either into the job's desired shape.

A change of the number of workers, or of the resources of any process, takes effect at once: workers join and leave
between batches, limits change under running processes. Another number of parameter servers takes three steps: the
missing ones start; rows move to their new owners (`moving`); servers that no longer own anything stop. Training
continues throughout (DLRover-RM section 5.2).
"""

from dataclasses import dataclass

from emberscale_api.frozen import replace
from emberscale_api.job import ScalingMode, TrainingJobSpec
from emberscale_api.readable import duration_text
from emberscale_jobmaster import reshaping
from emberscale_jobmaster.figures import missing_servers, sizes_of, switching
from emberscale_jobmaster.operations import Move
from emberscale_jobmaster.sizes import RoleShapes, Scaling, describe_change, manifest_sizes, within_manifest
from emberscale_jobmaster.state import JobState, Stage, with_scaling

FIRST_PLAN_SECONDS = 30.0
"""The time that a job without sizes waits for its first plan."""
_NO_ROOM, _REFUSED = "WaitingForRoom", "Refuse"
URGENT = frozenset({"GrowMemory"})
"""Actions that do not wait for the cooldown."""


@dataclass(frozen=True)
class Advice:
    """A plan of the brain, in the master's terms; `sizes` is None if the cluster has no room, now or ever."""

    version: int
    action: str
    sizes: RoleShapes | None
    message: str
    expected_throughput: float = 0.0

    @property
    def waits_for_room(self) -> bool:
        """Whether there is no room now."""
        return self.sizes is None and self.action != _REFUSED


def await_plan(state: JobState, spec: TrainingJobSpec) -> JobState:
    """Keeps a new job without sizes from starting members before it has a plan."""
    begun = state.scaling.sizes is not None or state.stage is not Stage.DISCOVER or bool(state.members.slots)
    if begun or state.over or not spec.leaves_sizes_open:
        return state
    waiting = replace(
        state.scaling, waits_for_plan=True, reason="WaitingForPlan", message="waiting for the brain's first plan"
    )
    return with_scaling(state, waiting)


def stop_waiting(state: JobState, spec: TrainingJobSpec, why: str) -> JobState:
    """Starts the job as the manifest says, because no first plan has come."""
    if not state.scaling.waits_for_plan:
        return state
    message = f"{describe_sizes(manifest_sizes(spec))}, as the manifest says: {why}"
    return with_scaling(state, replace(state.scaling, waits_for_plan=False, reason="NoPlan", message=message))


def follow(state: JobState, spec: TrainingJobSpec, advice: Advice, now: float, wall: float = 0.0) -> JobState:
    """Follows a plan as far as it may now; call it again with the same plan until nothing changes.

    `now` is on the job's clock, `wall` in seconds since 1970. The manifest takes precedence over the plan; changes keep
    the cooldown.
    """
    if state.over or spec.scaling.mode is ScalingMode.MANUAL or not spec.leaves_sizes_open:
        return state
    if advice.sizes is None:
        return _await_room(state, spec, advice, now, wall)
    scaling, present = state.scaling, sizes_of(state, spec)
    wanted = _without_refused(within_manifest(advice.sizes, spec), scaling, present.ps.replicas)
    if scaling.waits_for_plan:
        started = replace(scaling, sizes=wanted, waits_for_plan=False, changed_at=now, since=wall)
        return with_scaling(
            state, _with_advice(started, advice, f"starts with {describe_sizes(wanted)}: {advice.message}")
        )
    if wanted in (present, scaling.target):
        kept = scaling if wanted == scaling.target or scaling.target is None else replace(scaling, target=None)
        if advice.version == scaling.plan_version and kept == scaling:
            return state
        confirmed = replace(kept, sizes=present)
        return with_scaling(
            state, _with_advice(confirmed, advice, f"stays at {describe_sizes(wanted)}: {advice.message}")
        )
    if not _may_change(state, advice, spec, now):
        return state
    change = describe_change(scaling.target or present, wanted)
    changed = replace(scaling, changed_at=now, since=wall, scalings=scaling.scalings + 1)
    changed = reshaping.begin(changed, scaling.target or present, wanted, advice.message, now)
    if wanted.ps.replicas == present.ps.replicas:
        changed = replace(changed, sizes=wanted, target=None)
    else:
        changed = replace(changed, sizes=RoleShapes(present.ps, wanted.worker), target=wanted)
        changed = replace(changed, target_since=now, missing_since=now)
    return with_scaling(state, _with_advice(changed, advice, f"{change}: {advice.message}"))


def _await_room(state: JobState, spec: TrainingJobSpec, advice: Advice, now: float, wall: float) -> JobState:
    """Keeps a job that does not run yet waiting for room.

    Starts it as the manifest says after the timeout, or at once if there will never be room.
    """
    scaling, limit = state.scaling, spec.scaling.timeout
    if not scaling.waits_for_plan:
        return state
    if not advice.waits_for_room:
        return stop_waiting(state, spec, advice.message)
    if now >= limit:
        return stop_waiting(state, spec, f"the brain found no room within {duration_text(limit)} ({advice.message})")
    since = scaling.since if scaling.reason == _NO_ROOM else wall
    message = f"waits at most {duration_text(limit)} for room: {advice.message}"
    return with_scaling(state, replace(scaling, reason=_NO_ROOM, message=message, since=since))


def follow_manifest(
    state: JobState,
    spec: TrainingJobSpec,
    before: RoleShapes,
    now: float,
    wall: float = 0.0,
    waits: str | None = None,
    resumed: bool = False,
) -> JobState:
    """Follows the numbers in the manifest, which may have been edited.

    If servers have rows, another number of them becomes the target of a move. So does a larger number while rows are
    lost, unless the job is `resumed`: the job recovers on its previous number of servers, whether others start or not.

    * `before`: the shape in force by the previous manifest.
    * `now`: on the job's clock. `wall`: in seconds since 1970.
    * `waits`: what keeps new servers from starting; None: as before.
    """
    scaling = state.scaling
    servers = min(len(state.routing.table.servers), (scaling.sizes or before).ps.replicas)  # without a stand-in
    scaling = replace(scaling, waits=scaling.waits if waits is None else waits)
    if state.over or scaling.waits_for_plan:
        return with_scaling(state, scaling)
    operation, in_force = switching(state), scaling.sizes or before
    move = operation if isinstance(operation, Move) else None
    heading, leaving = in_force, replace(before.ps, replicas=servers or before.ps.replicas)
    if move is not None:  # a switch is finished, whatever the manifest says meanwhile
        heading, leaving = RoleShapes(move.sizes.ps, in_force.worker), move.sizes.ps
    wanted = within_manifest(scaling.target or heading, spec)
    if scaling.refused_ps and scaling.refused_ps != spec.ps.replicas:
        scaling = replace(scaling, refused_ps=0)
    wanted = present = _without_refused(wanted, scaling, servers or in_force.ps.replicas)
    if not servers and not resumed and state.stage is Stage.READY and state.recoveries:
        servers = min(in_force.ps.replicas, wanted.ps.replicas)
    if servers:  # they keep their resources until their rows have moved
        present = RoleShapes(replace(within_manifest(in_force, spec).ps, replicas=servers), wanted.worker)
        wanted = present if wanted.ps.replicas == servers else wanted
    target = wanted if wanted != present or move is not None else None
    if scaling.sizes is None and target is None and wanted == before == manifest_sizes(spec):
        return with_scaling(state, scaling)
    begins = target is not None and (scaling.target is None or target.ps.replicas != scaling.target.ps.replicas)
    following = replace(scaling, sizes=present, target=target)
    if begins:
        following = replace(following, target_since=now, missing_since=now)
    came_from = scaling.target or RoleShapes(leaving, before.worker)
    if change := describe_change(came_from, wanted):
        told = replace(
            following,
            changed_at=now,
            since=wall,
            scalings=scaling.scalings + 1,
            reason="ManifestEdited",
            message=f"{change}: the manifest was edited",
        )
        following = reshaping.begin(told, came_from, wanted, "the manifest was edited", now)
    return with_scaling(state, following)


def on_time_passed(state: JobState, spec: TrainingJobSpec, now: float) -> JobState:
    """Gives up a new number of parameter servers if any has been missing for too long; `now` is on the job's clock."""
    scaling = state.scaling
    if scaling.target is None or state.over:
        return state
    missing = missing_servers(state, scaling.target)
    since = now if scaling.missing_since is None else scaling.missing_since
    if not missing or now - since < spec.scaling.timeout:
        noted = replace(scaling, missing_since=since if missing else None)
        return state if noted == scaling else replace(state, scaling=noted)
    why = f": {scaling.waits}" if scaling.waits else ""
    problem = f"{', '.join(missing)} did not join within {duration_text(spec.scaling.timeout)}{why}"
    return give_up(state, spec, problem, now)


def give_up(state: JobState, spec: TrainingJobSpec, why: str, now: float) -> JobState:
    """Gives up the target: the job keeps its number of parameter servers."""
    message = f"stays at {describe_sizes(sizes_of(state, spec))}: {why}"
    scaling = state.scaling
    refused = scaling.refused_ps
    if scaling.target is not None and scaling.target.ps.replicas == spec.ps.replicas:
        refused = spec.ps.replicas
        message += f"; edit spec.ps.replicas, which is {refused}, to try again"
    scaling = replace(scaling, target=None, reason="GaveUpScaling", message=message, changed_at=now, refused_ps=refused)
    return with_scaling(state, reshaping.give_up(scaling, message, now))


def move_due(state: JobState) -> bool:
    """Whether rows can move to another number of parameter servers: all of them are registered, and the job trains."""
    target = state.scaling.target
    return target is not None and may_move(state) and not missing_servers(state, target)


def may_move(state: JobState) -> bool:
    """Returns whether rows can move: while the job trains, or while it evaluates and a server is being drained.

    The time left to a drained server may end before the evaluation does.
    """
    trains = state.stage is Stage.TRAIN or (state.stage is Stage.EVALUATE and bool(state.drains))
    return trains and not state.over and not state.suspending and state.routing.ready


def is_urgent(state: JobState) -> bool:
    """Whether rows must move soon: a server is being drained, is slow, or may run out of memory."""
    return state.scaling.target is None or bool(state.drains) or state.scaling.reason in URGENT


def complete_move(state: JobState, sizes: RoleShapes) -> JobState:
    """Records that the rows are on this shape's servers. Keeps the workers planned last, and a later target."""
    scaling, target = state.scaling, state.scaling.target
    if target is not None and target.ps.replicas == sizes.ps.replicas:
        return with_scaling(state, replace(scaling, sizes=target, target=None))
    workers = sizes.worker if scaling.sizes is None else scaling.sizes.worker
    return with_scaling(state, replace(scaling, sizes=RoleShapes(sizes.ps, workers)))


def describe_sizes(sizes: RoleShapes) -> str:
    """Describes a shape."""
    return f"workers {sizes.worker.describe()}, PS {sizes.ps.describe()}"


def _without_refused(wanted: RoleShapes, scaling: Scaling, servers: int) -> RoleShapes:
    """Returns the wanted shape, with the present number of servers if the wanted number was refused."""
    if wanted.ps.replicas != scaling.refused_ps:
        return wanted
    return replace(wanted, ps=replace(wanted.ps, replicas=servers))


def _may_change(state: JobState, advice: Advice, spec: TrainingJobSpec, now: float) -> bool:
    changed_at = state.scaling.changed_at
    rested = changed_at is None or now - changed_at >= spec.scaling.cooldown or advice.action in URGENT
    return rested and state.stage is Stage.TRAIN and state.routing.ready and not state.suspending


def _with_advice(scaling: Scaling, advice: Advice, message: str) -> Scaling:
    return replace(
        scaling,
        reason=advice.action,
        message=message,
        plan_version=advice.version,
        expected_throughput=advice.expected_throughput,
    )
