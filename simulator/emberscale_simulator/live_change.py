"""How a job that goes on training gets pods of another shape: beside its own where there is room, else one by one."""

from dataclasses import dataclass

from emberscale_api.shape import JobShape
from emberscale_simulator.pods import Pods
from emberscale_simulator.resources import Amounts, RoleResources, overlap_of


@dataclass(frozen=True, slots=True)
class LiveChange:
    """A change that is under way: what the cluster keeps for it until it is ready, and the training that it costs."""

    target: JobShape
    ready_at: float
    reserved: RoleResources
    lost_seconds: float


def begin_live_change(
    present: JobShape, target: JobShape, now: float, room: Amounts, resize: float | None, pods: Pods
) -> LiveChange | None:
    """The fastest way that there is room for; None if there is none.

    `room` is all that the job may have, its own included; `resize` is how long pods take to be resized in place, None
    where they cannot. Pods that go before others come cost their share of the time.
    """
    overlap = overlap_of(present, target, resize is not None)
    starting = [(role, count) for role, count in (("worker", overlap.new_workers), ("ps", overlap.new_ps)) if count]
    if overlap.at_once.total.fits(room):
        seconds = max((pods.start_seconds(role, count) for role, count in starting), default=resize or 0.0)
        return LiveChange(target, now + seconds, overlap.at_once, 0.0)
    if not overlap.in_place.total.fits(room):
        return None
    each = {role: [pods.start_seconds(role, 1) for _ in range(count)] for role, count in starting}
    ready_at = now + sum(map(sum, each.values()))
    if overlap.one_by_one.total.fits(room):
        return LiveChange(target, ready_at, overlap.one_by_one, 0.0)
    lost = sum(sum(starts) / len(starts) for starts in each.values())
    return LiveChange(target, ready_at, overlap.in_place, lost)
