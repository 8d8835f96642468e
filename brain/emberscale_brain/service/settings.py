"""The brain's settings: one YAML file, and `path=value` overrides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from emberscale_api.errors import InvalidError, read_text
from emberscale_api.job.manifest import ManifestError, apply_overrides
from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Quantity, Seconds, cpu_cores, memory_bytes
from emberscale_api.shape import GIB
from emberscale_brain.history.database import DatabaseUnusableError, read_url
from emberscale_brain.history.store import Positive, Retention
from emberscale_brain.planner.types import ClusterCapacity, Quota, ShapeBounds
from emberscale_brain.preferences import PAST_JOBS_SHOWN, PROFILES_SHOWN, PlannerPreferences, planner_names
from emberscale_brain.service.state import Conditions


def _with_a_port(address: str) -> str:
    if int(address.rpartition(":")[2]) > _LARGEST_PORT:
        raise ValueError(f"the port must be 0 to {_LARGEST_PORT}")
    return address


def _of_a_database(url: str) -> str:
    try:
        read_url(url)
    except DatabaseUnusableError as error:
        raise ValueError(str(error)) from error
    return url


_LARGEST_PORT = 65_535
Address = Annotated[str, Field(pattern=r"^[^:]+:\d+$|^\[.*\]:\d+$"), AfterValidator(_with_a_port)]


class CapacitySettings(ManifestPart):
    """The capacity for all jobs together; no process is planned larger than the largest node."""

    cpu: Quantity = "64"
    memory: Quantity = "256Gi"
    largest_node_cpu: Quantity | None = None
    largest_node_memory: Quantity | None = None
    network_bytes_per_second: Quantity = "1250M"

    def capacity(self) -> ClusterCapacity:
        """As planners take it."""
        node_cpu, node_memory = self.largest_node_cpu, self.largest_node_memory
        return ClusterCapacity(
            cpu=cpu_cores(self.cpu),
            memory=memory_bytes(self.memory),
            largest_node_cpu=float("inf") if node_cpu is None else cpu_cores(node_cpu),
            largest_node_memory=float("inf") if node_memory is None else memory_bytes(node_memory),
        )

    def bandwidth(self) -> float:
        """Bytes per second of one process's link."""
        return float(memory_bytes(self.network_bytes_per_second))


class QuotaSettings(ManifestPart):
    """The quota of one owner's jobs together."""

    cpu: Quantity | None = None
    memory: Quantity | None = None

    def quota(self) -> Quota:
        """As planners take it."""
        return Quota(
            cpu=float("inf") if self.cpu is None else cpu_cores(self.cpu),
            memory=float("inf") if self.memory is None else memory_bytes(self.memory),
        )


class BoundsSettings(ManifestPart):
    """Bounds of jobs that set none of their own."""

    max_workers: int = Field(default=32, ge=1)
    max_ps: int = Field(default=16, ge=1)
    max_worker_cpu: Positive = 16.0
    max_ps_cpu: Positive = 16.0
    max_worker_memory: Quantity = "64Gi"
    max_ps_memory: Quantity = "256Gi"
    cpu_step: Positive = 1.0

    @model_validator(mode="after")
    def _above_the_least(self) -> Self:
        if min(self.max_worker_cpu, self.max_ps_cpu) < self.cpu_step:
            raise ValueError(f"maxWorkerCpu and maxPsCpu must not be below cpuStep ({self.cpu_step:g})")
        return self

    def bounds(self) -> ShapeBounds:
        """As planners take them."""
        return ShapeBounds(
            workers=(1, self.max_workers),
            ps=(1, self.max_ps),
            worker_cpu=(self.cpu_step, self.max_worker_cpu),
            ps_cpu=(self.cpu_step, self.max_ps_cpu),
            worker_memory=(min(GIB, memory_bytes(self.max_worker_memory)), memory_bytes(self.max_worker_memory)),
            ps_memory=(min(GIB, memory_bytes(self.max_ps_memory)), memory_bytes(self.max_ps_memory)),
            cpu_step=self.cpu_step,
        )


class PlanningSettings(ManifestPart):
    """The planning interval and timeout, and how long a job may take to adopt a new shape."""

    interval: Seconds = Field(default=60.0, gt=0)
    timeout: Seconds = Field(default=120.0, gt=0)
    adoption: Seconds = Field(default=300.0, ge=0, description="Time for a job to adopt a shape before the next plan")
    silence: Seconds = Field(
        default=1800.0, gt=0, description="A job of which nothing is heard for this long has ended"
    )
    take_over: bool = Field(
        default=True,
        description="A brain takes over the running jobs of its database; the latest such brain is the only writer",
    )
    profiles_per_job: int = Field(
        default=PROFILES_SHOWN, ge=1, le=10_000, description="Latest profiles that a planner sees"
    )
    past_jobs: int = Field(default=PAST_JOBS_SHOWN, ge=1, le=10_000, description="Ended jobs that a planner sees")


class BrainSettings(ManifestPart):
    """All settings of a brain."""

    listen: Address = "127.0.0.1:50061"
    metrics: Address | None = "127.0.0.1:9461"
    database: Annotated[str, AfterValidator(_of_a_database)] = "sqlite:///emberscale-brain.db"
    database_file: Path | None = Field(
        default=None, description="File with the database's URL, instead of `database`, if the URL contains a password"
    )
    token_file: Path | None = Field(default=None, description="Default: the value of EMBERSCALE_TOKEN_FILE")
    clock_skew: Seconds = Field(default=30.0, ge=0, description="Tolerated clock skew of reporters")
    cluster: CapacitySettings = CapacitySettings()
    quotas: dict[str, QuotaSettings] = Field(default_factory=dict, description="By owner; * is each that is not named")
    bounds: BoundsSettings = BoundsSettings()
    planner: PlannerPreferences = PlannerPreferences()
    planning: PlanningSettings = PlanningSettings()
    retention: Retention = Retention()

    def conditions(self) -> Conditions:
        """Returns the conditions of planning other than the jobs."""
        return Conditions(
            capacity=self.cluster.capacity(),
            prices=self.planner.prices(),
            quotas={owner: quota.quota() for owner, quota in self.quotas.items()},
            network_bytes_per_second=self.cluster.bandwidth(),
            adoption_seconds=self.planning.adoption,
        )


def load_settings(path: Path | None, overrides: Sequence[str] = ()) -> BrainSettings:
    """Reads settings; without a file all defaults, `overrides` on top. The planner must be installed.

    Raises InvalidError.
    """
    document: Mapping[str, Any] = {}
    source = "settings"
    if path is not None:
        source = str(path)
        try:
            loaded = yaml.safe_load(read_text(path))
        except yaml.YAMLError as error:
            raise InvalidError(f"{path}: is not valid YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise InvalidError(f"{path}: expected a mapping of settings")
        document = loaded or {}
    try:
        settings = BrainSettings.model_validate(apply_overrides(document, overrides))
    except ManifestError as error:
        raise InvalidError(str(error)) from error
    except ValidationError as error:
        raise InvalidError(
            "\n".join(
                f"{source}: {'.'.join(map(str, problem['loc'])) or 'settings'}: "
                f"{'unknown setting' if problem['type'] == 'extra_forbidden' else problem['msg']}"
                for problem in error.errors()
            )
        ) from error
    names = planner_names()
    if settings.planner.name not in names:
        raise InvalidError(
            f"{source}: planner.name: there is no planner {settings.planner.name!r}; installed are {', '.join(names)}"
        )
    return settings
