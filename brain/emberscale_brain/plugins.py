"""Planners by name: those that are installed under the entry-point group `emberscale.planners`, ours among them."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from emberscale_brain.planner.types import PLANNER_ENTRY_POINTS, Planner, PlannerSettings


class PlannerNotUsableError(Exception):
    """A planner that does not exist, cannot be imported, or is none."""


def planner_names() -> list[str]:
    """Names of the planners that are installed."""
    return sorted(entry_points(group=PLANNER_ENTRY_POINTS).names)


def load_planner(name: str, settings: PlannerSettings) -> Planner:
    """A new planner; of several with one name, the one that is found first.

    Raises PlannerNotUsableError, which says what is wrong with it or which there are.
    """
    found = list(entry_points(group=PLANNER_ENTRY_POINTS, name=name))
    if not found:
        raise PlannerNotUsableError(
            f"there is no planner {name!r}; installed are {', '.join(planner_names()) or 'none'}"
        )
    point = found[0]
    planner = _factory(point)(settings)
    if not isinstance(planner, Planner):
        raise PlannerNotUsableError(f"planner {name!r} ({point.value}) has no method plan(cluster, now)")
    return planner


def _factory(point: EntryPoint) -> Callable[[PlannerSettings], object]:
    try:
        factory: Callable[[PlannerSettings], object] = point.load()
    except (ImportError, AttributeError) as error:
        raise PlannerNotUsableError(f"planner {point.name!r} ({point.value}) cannot be imported: {error}") from error
    if not callable(factory):
        raise PlannerNotUsableError(f"planner {point.name!r} ({point.value}) is not callable with PlannerSettings")
    return factory
