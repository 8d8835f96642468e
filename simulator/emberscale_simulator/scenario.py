"""The scenario: a cluster, its troubles, a workload and the schedulers to compare, as one YAML file.

Field names are camelCase in the file. Every number here is a claim about the world: the files in
`deploy/examples/scenarios` say beside each where it comes from.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Quantity, Seconds
from emberscale_brain.preferences import PlannerPreferences
from emberscale_simulator.mechanics import Mechanics

Probability = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class CapacityStep(ManifestPart):
    """From `at` on, this fraction of the cluster may be used."""

    at: Seconds = Field(ge=0)
    fraction: Fraction


class DailyDip(ManifestPart):
    """Between two hours of each day, other services take a fraction of the cluster back."""

    start_hour: float = Field(ge=0, lt=24)
    end_hour: float = Field(gt=0, le=24)
    fraction: float = Field(ge=0, lt=1)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.start_hour >= self.end_hour:
            raise ValueError(f"startHour ({self.start_hour:g}) must be before endHour ({self.end_hour:g})")
        return self


class ClusterSpec(ManifestPart):
    """Identical nodes; a pod is never larger than one of them. `*_bandwidth` is what one pod's link really carries."""

    nodes: int = Field(ge=1, le=1_000_000)
    node_cpu: Positive
    node_memory: Quantity
    worker_bandwidth: Quantity
    ps_bandwidth: Quantity
    capacity_steps: tuple[CapacityStep, ...] = ()
    daily_dip: DailyDip | None = None

    @model_validator(mode="after")
    def _steps_in_order(self) -> Self:
        times = [step.at for step in self.capacity_steps]
        if times != sorted(set(times)):
            raise ValueError("capacitySteps must be in ascending order of `at`, each at another time")
        return self


class FailureSpec(ManifestPart):
    """The gamma law of CPR section 3.1; see `emberscale_simulator.mechanics`. 0 daily failures: none."""

    daily_pod_failures: Probability = 0.0
    median_over_mean: float = Field(default=0.569, gt=0.05, lt=0.98)
    silent: Probability = Field(
        default=1.0, description="Share of failures in which no process ends, as where a node is gone"
    )


class StragglerSpec(ManifestPart):
    """The chance that a new pod lands on a slow machine, and the bounds of its (uniform) speed; a healthy one has 1."""

    worker_probability: Probability = 0.0
    ps_probability: Probability = 0.0
    slowest: Fraction = 0.3
    fastest: Fraction = 0.8

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.slowest > self.fastest:
            raise ValueError(f"slowest ({self.slowest:g}) must not be above fastest ({self.fastest:g})")
        return self


class StartUpSpec(ManifestPart):
    """Seconds from asking for a pod until it serves: log-normal, each pod for itself."""

    median: Seconds = Field(default=30.0, gt=0)
    spread: float = Field(default=0.3, ge=0, le=3, description="Standard deviation of the logarithm")


class ProfilingSpec(ManifestPart):
    """The measurements of a running job, every `interval`, with log-normal noise."""

    noise: float = Field(default=0.05, ge=0, le=1, description="Standard deviation of the logarithm")
    interval: Seconds = Field(default=30.0, gt=0)


class SimulatedModel(ManifestPart):
    """One model's cost on this hardware, and its metadata. See `ground_truth.Physics` and `TableGrowth`."""

    architecture: str = Field(min_length=1)
    batch_size: int = Field(ge=1)
    worker_work: Positive
    worker_parallel: Fraction
    ps_work: Positive
    ps_parallel: Fraction
    batch_bytes: Positive
    request_seconds: float = Field(ge=0)
    fixed_seconds: float = Field(ge=0)
    dense_bytes: int = Field(ge=1)
    embedding_dimension: int = Field(ge=1)
    tables: int = Field(ge=1)
    row_bytes: int = Field(ge=1)
    worker_memory: Quantity
    ps_base: Quantity = Field(description="Memory of each PS apart from its tables")
    table_base: Quantity
    table_limit: Quantity
    table_scale_samples: Positive
    table_exponent: Fraction


class Range(ManifestPart):
    """Drawn uniformly, both ends included."""

    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) must not be above high ({self.high:g})")
        return self


class LogNormal(ManifestPart):
    """Drawn from a log-normal law: `spread` is the standard deviation of the logarithm."""

    median: Positive
    spread: float = Field(ge=0, le=3)


class Bounds(ManifestPart):
    """The most that any job of the workload may have; the least is 1 of each."""

    max_workers: int = Field(default=32, ge=1)
    max_ps: int = Field(default=16, ge=1)
    max_cpu: float = Field(default=16.0, ge=1)
    max_worker_memory: Quantity = "64Gi"
    max_ps_memory: Quantity = "256Gi"


class RequestRange(ManifestPart):
    """The requests of owners, if no law determines them: each is drawn within bounds."""

    workers: Range
    ps: Range
    worker_cpu: tuple[Positive, ...] = Field(min_length=1, description="One of these")
    ps_cpu: tuple[Positive, ...] = Field(min_length=1, description="One of these")
    worker_memory: Quantity
    ps_memory: Quantity


class RoundsWorkload(ManifestPart):
    """One job of each model, `spacing` apart, in rounds; all but the last round are history and are not measured."""

    kind: Literal["Rounds"]
    models: tuple[str, ...] = Field(min_length=1)
    steps: int = Field(ge=1, description="Batches a job")
    history_rounds: int = Field(default=0, ge=0, le=100)
    round_interval: Seconds = Field(default=86_400.0, gt=0)
    spacing: Seconds = Field(default=0.0, ge=0)
    request: RequestRange
    bounds: Bounds = Bounds()


class ModelShare(ManifestPart):
    """The share of one model in the workload."""

    model: str
    weight: Positive = 1.0


class Shortage(ManifestPart):
    """The chance that an owner asks for too little, and the fraction of the right amount that he then asks for."""

    probability: Probability
    factor: Range


class MisSizing(ManifestPart):
    """The error of owners' requests: factors on the reference shape, drawn once per family."""

    workers: LogNormal
    worker_cpu: LogNormal
    ps: LogNormal
    ps_cpu: LogNormal
    memory: LogNormal
    memory_shortage: Shortage


class GeneratedWorkload(ManifestPart):
    """Recurring jobs of many families, as an advertising platform runs them.

    A family is one owner's model: its costs are the model's times `family_spread`, which its metadata shows, and times
    `hidden_spread`, which they do not. Its reference shape has `reference_workers` of `reference_cpu` cores and enough
    PS of as many cores to be `reference_ps_load` busy; its data takes `duration` at that shape. Runs vary by
    `run_spread`. Arrivals are a Poisson process whose rate swings by `daily_swing` about its mean.
    """

    kind: Literal["Generated"]
    jobs: int = Field(ge=1, le=1_000_000)
    period: Seconds = Field(gt=0)
    families: int = Field(ge=1)
    owners: int = Field(ge=1)
    popularity: float = Field(default=0.8, ge=0, le=3, description="Zipf exponent of the families' shares")
    peak_hour: float = Field(default=14.0, ge=0, lt=24)
    daily_swing: float = Field(default=0.4, ge=0, lt=1)
    models: tuple[ModelShare, ...] = Field(min_length=1)
    family_spread: float = Field(default=0.35, ge=0, le=2)
    hidden_spread: float = Field(default=0.1, ge=0, le=2)
    run_spread: float = Field(default=0.1, ge=0, le=2)
    table_spread: float = Field(default=0.6, ge=0, le=2)
    duration: LogNormal
    reference_workers: LogNormal
    reference_cpu: Positive = 4.0
    reference_ps_load: Fraction = 0.6
    sizing: MisSizing
    bounds: Bounds = Bounds()


class TraceWorkload(ManifestPart):
    """Jobs from a CSV file, beside the scenario unless its path is absolute. `trace.py` says what the columns are."""

    kind: Literal["Trace"]
    path: Path
    variation: float | None = Field(
        default=None,
        ge=0,
        le=2,
        description="Each seed draws as many jobs from the trace, with replacement, and the gaps between them; sizes "
        "and gaps vary by this spread. Absent: every seed has the trace as it is",
    )
    bounds: Bounds = Bounds()


Workload = Annotated[RoundsWorkload | GeneratedWorkload | TraceWorkload, Field(discriminator="kind")]


class SchedulerKind(StrEnum):
    """The algorithms."""

    STATIC = "Static"
    WELL_TUNED = "WellTuned"
    OPTIMUS = "Optimus"
    ELASTIC = "ElasticScheduler"
    PLANNER = "Planner"


class SchedulerSpec(ManifestPart):
    """One scheduler to compare. It looks at the cluster every `interval`, and at a job when it arrives."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    kind: SchedulerKind
    interval: Seconds = Field(default=180.0, gt=0)
    mechanics: str = Field(description="One of the scenario's `mechanics`")
    step: int = Field(default=1, ge=1, description="Workers that ElasticScheduler adds at a look; others take no steps")
    min_gain: float = Field(
        default=0.01, ge=0, lt=1, description="Relative gain below which Optimus and ElasticScheduler change nothing"
    )
    planner: PlannerPreferences = PlannerPreferences()
    use_history: bool = Field(default=True, description="Whether jobs that have ended help new ones")


class SeedRange(ManifestPart):
    """`count` seeds from `first` on."""

    first: int = Field(ge=0)
    count: int = Field(ge=1)

    @property
    def numbers(self) -> range:
        """The seeds."""
        return range(self.first, self.first + self.count)


class Seeds(ManifestPart):
    """Whoever tunes a planner, or this file, looks at `tuning` seeds only; figures are of the `judging` ones."""

    tuning: SeedRange = Field(default_factory=lambda: SeedRange(first=0, count=1000))
    judging: SeedRange = Field(default_factory=lambda: SeedRange(first=1000, count=1000))

    @model_validator(mode="after")
    def _apart(self) -> Self:
        tuning, judging = self.tuning.numbers, self.judging.numbers
        if tuning.start < judging.stop and judging.start < tuning.stop:
            raise ValueError("tuning and judging seeds must not overlap")
        return self


class Surroundings(ManifestPart):
    """What all jobs of a scenario share besides the cluster: failures, slow pods, start-ups, profiles, skew."""

    failures: FailureSpec = FailureSpec()
    stragglers: StragglerSpec = StragglerSpec()
    start_up: StartUpSpec = StartUpSpec()
    profiling: ProfilingSpec = ProfilingSpec()
    ps_memory_skew: float = Field(default=1.1, ge=1, description="Memory of the largest PS over the mean")


class Scenario(Surroundings):
    """Everything that a simulation needs but the seed."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    description: str = ""
    horizon: Seconds = Field(gt=0, description="Latest end of the simulation; jobs that still run count as incomplete")
    cluster: ClusterSpec
    models: dict[str, SimulatedModel] = Field(min_length=1)
    workload: Workload
    mechanics: dict[str, Mechanics] = Field(min_length=1)
    schedulers: tuple[SchedulerSpec, ...] = Field(min_length=1)
    seeds: Seeds = Seeds()

    @model_validator(mode="after")
    def _names_resolve(self) -> Self:
        names = [scheduler.name for scheduler in self.schedulers]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"schedulers: the name {twice[0]} is given twice")
        for scheduler in self.schedulers:
            if scheduler.mechanics not in self.mechanics:
                raise ValueError(
                    f"schedulers.{scheduler.name}.mechanics: there are no mechanics {scheduler.mechanics!r}; "
                    f"there are {', '.join(sorted(self.mechanics))}"
                )
        used: tuple[str, ...] = ()
        if isinstance(self.workload, RoundsWorkload):
            used = self.workload.models
        elif isinstance(self.workload, GeneratedWorkload):
            used = tuple(share.model for share in self.workload.models)
        for model in used:
            if model not in self.models:
                raise ValueError(f"workload.models: no model {model}; there are {', '.join(sorted(self.models))}")
        return self
