"""The choice of the planner, the operator's preferences, and what a planner sees: for the service and the simulator.

Planners are installed under the entry-point group `emberscale.planners`.
"""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

from pydantic import Field

from emberscale_api.errors import InvalidError
from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Seconds
from emberscale_brain.planner.types import PLANNER_ENTRY_POINTS, Planner, PlannerSettings, Prices

PROFILES_SHOWN = 64
"""The latest profiles of a job that a planner sees."""
PAST_JOBS_SHOWN = 500
"""The ended jobs that a planner sees."""
START_UPS_REMEMBERED = 200
"""The latest start-ups of a role from which the cost of changes is learned."""


def planner_names() -> list[str]:
    """Returns the names of the installed planners."""
    return sorted(entry_points(group=PLANNER_ENTRY_POINTS).names)


def load_planner(name: str, settings: PlannerSettings) -> Planner:
    """Returns a new planner; if several have the name, the first that is found.

    Raises InvalidError, which says what is wrong with the planner, or which planners there are.
    """
    found = list(entry_points(group=PLANNER_ENTRY_POINTS, name=name))
    if not found:
        raise InvalidError(f"there is no planner {name!r}; installed are {', '.join(planner_names()) or 'none'}")
    point = found[0]
    planner = _factory(point)(settings)
    if not isinstance(planner, Planner):
        raise InvalidError(f"planner {name!r} ({point.value}) has no method plan(cluster, now)")
    return planner


def _factory(point: EntryPoint) -> Callable[[PlannerSettings], object]:
    try:
        factory: Callable[[PlannerSettings], object] = point.load()
    except (ImportError, AttributeError) as error:
        raise InvalidError(f"planner {point.name!r} ({point.value}) cannot be imported: {error}") from error
    if not callable(factory):
        raise InvalidError(f"planner {point.name!r} ({point.value}) is not callable with PlannerSettings")
    return factory


class PlannerPreferences(ManifestPart):
    """The planner's name and its settings, which mean what `PlannerSettings` and `Prices` say."""

    name: str = Field(default="default", description="An entry point of the group emberscale.planners")
    rho: float = Field(default=2.5, allow_inf_nan=False)
    epsilon: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    smoothing: float = Field(default=0.5, gt=0, le=1)
    neighbours: int = Field(default=5, ge=1, le=1000)
    time_value_per_hour: float = Field(default=5.0, ge=0, allow_inf_nan=False)
    minimum_gain: float = Field(default=0.01, ge=0, lt=1)
    exploration: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    memory_lead: Seconds | None = Field(
        default=None, ge=0, description="Memory grows so long before it may run out; as long as a change takes if unset"
    )
    cpu_core_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.04
    memory_gib_hour: float = Field(default=0.005, ge=0, allow_inf_nan=False)

    def settings(self, seed: int, planning_seconds: float) -> PlannerSettings:
        """Returns the settings as planners take them; plans are made every `planning_seconds`."""
        same = self.model_dump(exclude={"name", "memory_lead", "cpu_core_hour", "memory_gib_hour"})
        return PlannerSettings(
            **same, memory_lead_seconds=self.memory_lead, planning_seconds=planning_seconds, seed=seed
        )

    def prices(self) -> Prices:
        """Returns the prices of resources."""
        return Prices(self.cpu_core_hour, self.memory_gib_hour)
