"""Planners by name: ours, and those that others install under the entry-point group `emberscale.planners`."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from emberscale_brain.planner.types import PLANNER_ENTRY_POINTS, Planner, PlannerSettings

_OURS = (EntryPoint("default", "emberscale_brain.planner.default:DefaultPlanner", PLANNER_ENTRY_POINTS),)


class PlannerNotUsableError(Exception):
    """A planner that does not exist, cannot be imported, or is none."""


def planner_names() -> list[str]:
    """Names of the planners that are installed."""
    return sorted({point.name for point in _all()})


def load_planner(name: str, settings: PlannerSettings) -> Planner:
    """A new planner; ours go before others of the same name.

    Raises PlannerNotUsableError, which says what is wrong with it or which there are.
    """
    found = [point for point in _all() if point.name == name]
    if not found:
        raise PlannerNotUsableError(
            f"there is no planner {name!r}; installed are {', '.join(planner_names()) or 'none'}"
        )
    (point, *_) = found
    planner = _factory(point)(settings)
    if not isinstance(planner, Planner):
        raise PlannerNotUsableError(f"planner {name!r} ({point.value}) has no method plan(cluster, now)")
    return planner


def _all() -> list[EntryPoint]:
    return [*_OURS, *entry_points(group=PLANNER_ENTRY_POINTS)]


def _factory(point: EntryPoint) -> Callable[[PlannerSettings], object]:
    try:
        factory: Callable[[PlannerSettings], object] = point.load()
    except (ImportError, AttributeError) as error:
        raise PlannerNotUsableError(f"planner {point.name!r} ({point.value}) cannot be imported: {error}") from error
    if not callable(factory):
        raise PlannerNotUsableError(f"planner {point.name!r} ({point.value}) is not callable with PlannerSettings")
    return factory
