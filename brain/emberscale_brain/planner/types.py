"""The inputs and outputs of a planner.

Everything is frozen and plain: times are seconds since the epoch, CPU is in cores, memory in bytes, throughput in
samples per second, prices per hour. A planner sees one `ClusterView` and answers with a `PlannedShape` for each job.
Custom planners plug in through the entry-point group `PLANNER_ENTRY_POINTS`: the entry point names a callable that
takes `PlannerSettings` and returns a `Planner`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from types import MappingProxyType
from typing import NewType, Protocol, Self, runtime_checkable

from emberscale_api.job import MOST_PARITY
from emberscale_api.shape import DIMENSIONS, GIB, JobProfile, JobShape
from emberscale_brain.fault_tolerance import FaultToleranceAdvice

JobId = NewType("JobId", str)

PLANNER_ENTRY_POINTS = "emberscale.planners"
MEMORY_UNIT = 1 << 26
"""Memory is planned in steps of so many bytes."""

# Order of the coefficients of `ThroughputFit`: DLRover-RM equations 2, 3, 4 and 5, the sum of the four betas, and the
# work of a PS for each batch, however few of the batch's rows it holds.
COEFFICIENTS = ("gradient", "update", "synchronize", "embedding", "constant", "request")


@dataclass(frozen=True, slots=True)
class ShapeBounds:
    """The owner's bounds, inclusive; `cpu_step` is the grid on which cores are chosen."""

    workers: tuple[int, int] = (1, 32)
    ps: tuple[int, int] = (1, 16)
    worker_cpu: tuple[float, float] = (1.0, 16.0)
    ps_cpu: tuple[float, float] = (1.0, 16.0)
    worker_memory: tuple[int, int] = (1 * GIB, 64 * GIB)
    ps_memory: tuple[int, int] = (1 * GIB, 256 * GIB)
    cpu_step: float = 1.0

    def __post_init__(self) -> None:
        for name in DIMENSIONS:
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name}: the lower bound {low} is above the upper bound {high}")
            if low <= 0:
                raise ValueError(f"{name}: the lower bound {low} must be above 0")
        if self.cpu_step <= 0:
            raise ValueError(f"cpu_step ({self.cpu_step}) must be above 0")

    def contains(self, shape: JobShape) -> bool:
        """Whether every dimension of `shape` is within the bounds."""
        bounds = ((getattr(shape, name), *getattr(self, name)) for name in DIMENSIONS)
        return all(low <= value <= high for value, low, high in bounds)


@dataclass(frozen=True, slots=True)
class JobMetadata:
    """The facts about a job at its submission: the features of the warm start and the constants of the model.

    `total_samples` counts all `epochs`; rows appear in the first. `dense_bytes` is DLRover-RM's M (the dense
    parameters), `embedding_dimension` its D (the sum over tables of the embedding's width, in floats per sample),
    `batch_size` its m (samples per worker and iteration). `target_pls` is the portion of samples that partial
    recoveries may lose, 0 for none; with `saves_priority_rows`, some rows are saved between checkpoints for these.
    `parity` is the parity that the manifest allows, 0 if none; with `async_parity`, pushes do not wait for it.
    `most_rows` is the number of rows that eviction leaves in all tables together, 0 unless it bounds each of them.
    """

    architecture: str
    batch_size: int
    dense_bytes: int
    embedding_dimension: int
    tables: int
    total_samples: int
    name: str = ""
    optimizer: str = ""
    data_bytes: int = 0
    epochs: int = 1
    most_rows: int = 0
    target_pls: float = 0.0
    saves_priority_rows: bool = False
    parity: int = 0
    async_parity: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "dense_bytes", "embedding_dimension", "total_samples", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.parity <= MOST_PARITY:
            raise ValueError(f"parity must be 0 to {MOST_PARITY}, not {self.parity}")

    @property
    def epoch_samples(self) -> float:
        """Samples of one epoch."""
        return self.total_samples / self.epochs


@dataclass(frozen=True, slots=True)
class ThroughputFit:
    """A fitted throughput model (DLRover-RM equations 1-6) and its uncertainty.

    `coefficients` and the rows of `covariance` (6 x 6) are in the order of `COEFFICIENTS`. The terms of an iteration,
    each a coefficient times its feature, take (sum of term^overlap)^(1/overlap) seconds together. At an `overlap` of 1
    they follow one another, as in DLRover-RM; the higher it is, the more the longest term alone counts. `noise` is the
    relative standard deviation of one measured iteration time about the model, `rmsle` the fit's own error on its
    inliers. `distinct_shapes` counts the shapes that the profiles cover. `prior_share`, 0 to 1, is the share of the
    knowledge of the coefficients that comes from the prior (similar jobs) and not from the job's measurements.
    `outliers` of the `profiles` in the window were set aside.
    """

    coefficients: tuple[float, float, float, float, float, float]
    covariance: tuple[tuple[float, ...], ...]
    noise: float
    rmsle: float
    profiles: int
    distinct_shapes: int
    outliers: int = 0
    prior_share: float = 0.0
    overlap: float = 1.0


@dataclass(frozen=True, slots=True)
class JobView:
    """A job as the planner sees it; `current` is None while none of its processes run.

    `profiles` are the latest, oldest first. `fit` is made from them, if there is one (a planner may refit).
    `remaining_samples` counts over all epochs left. `priority` scales the job's weight. `last_scaled_at` is the time
    at which the current shape came into force. A `fixed` job counts against the capacity and keeps its shape.
    """

    id: JobId
    owner: str
    metadata: JobMetadata
    remaining_samples: int
    current: JobShape | None
    bounds: ShapeBounds = ShapeBounds()
    profiles: tuple[JobProfile, ...] = ()
    fit: ThroughputFit | None = None
    submitted_at: float = 0.0
    last_scaled_at: float = 0.0
    priority: float = 1.0
    fixed: bool = False


@dataclass(frozen=True, slots=True)
class PastJob:
    """A finished job of the configuration database: the shape that served it well in the end, and its model."""

    id: JobId
    owner: str
    metadata: JobMetadata
    final_shape: JobShape
    fit: ThroughputFit | None = None
    finished_at: float = 0.0
    rows: int = 0


@dataclass(frozen=True, slots=True)
class ClusterCapacity:
    """The capacity for all jobs together; no process is planned larger than the largest node."""

    cpu: float
    memory: int
    largest_node_cpu: float = float("inf")
    largest_node_memory: float = float("inf")


@dataclass(frozen=True, slots=True)
class Prices:
    """Money(a) of DLRover-RM equation 7: what a core and a GiB cost per hour."""

    cpu_core_hour: float = 0.04
    memory_gib_hour: float = 0.005

    def per_hour(self, shape: JobShape) -> float:
        """Cost of a shape per hour."""
        return shape.cpu * self.cpu_core_hour + shape.memory / GIB * self.memory_gib_hour


@dataclass(frozen=True, slots=True)
class Quota:
    """The quota of all jobs of one owner together."""

    cpu: float = float("inf")
    memory: float = float("inf")


@dataclass(frozen=True, slots=True)
class ScalingOverheads:
    """Learned from the start-ups of past processes: seconds until a new process serves, and seconds of standstill.

    A job continues while new processes start, and pauses only while a change takes effect (DLRover-RM section 5.2).
    Running processes get other cores and memory after `resize_seconds`; None: new processes replace them.
    """

    worker_start_seconds: float = 30.0
    ps_start_seconds: float = 45.0
    worker_pause_seconds: float = 1.0
    ps_pause_seconds: float = 15.0
    resize_seconds: float | None = 10.0

    @classmethod
    def learned(cls, starts: Mapping[str, Sequence[float]], pauses: Mapping[str, Sequence[float]]) -> Self:
        """Returns the medians of start-ups and standstills by role, and the defaults for unknown ones."""
        taken = {f"{role}_start_seconds": seconds for role, seconds in starts.items()}
        taken |= {f"{role}_pause_seconds": seconds for role, seconds in pauses.items()}
        return cls(**{name: median(seconds) for name, seconds in taken.items() if seconds})


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Everything a planner may look at."""

    jobs: tuple[JobView, ...]
    capacity: ClusterCapacity
    prices: Prices = Prices()
    quotas: Mapping[str, Quota] = field(default_factory=lambda: MappingProxyType({}))
    overheads: ScalingOverheads = ScalingOverheads()
    history: tuple[PastJob, ...] = ()
    network_bytes_per_second: float = 1.25e9


class PlanAction(StrEnum):
    """The effect of a planned shape on the job."""

    KEEP = "Keep"  # as it is
    START = "Start"  # first shape
    SCALE = "Scale"  # a better shape
    EXPLORE = "Explore"  # a small change that is expected to teach more than it costs
    GROW_MEMORY = "GrowMemory"  # the PS would run out of memory
    SHRINK = "Shrink"  # gives up resources that other jobs need or that gain nothing
    WAIT = "Wait"  # no room now; the shape is None
    REFUSE = "Refuse"  # no plan is possible, and waiting does not help; the shape is None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point of a job's Pareto front: cost per hour, predicted throughput, and its relative standard deviation.

    The front is over cost and `net`: samples/s over the rest of the job, including the change to the shape.
    """

    shape: JobShape
    cost_per_hour: float
    throughput: float
    net: float
    uncertainty: float


@dataclass(frozen=True, slots=True)
class SimilarJob:
    """A past job that a decision relies on; `features` is the similarity of each feature, 0 to 1.

    `id` is None if the past job belonged to another owner, so that readers do not learn what other owners run.
    """

    id: JobId | None
    similarity: float
    features: Mapping[str, float]
    shape: JobShape


@dataclass(frozen=True, slots=True)
class MemoryForecast:
    """PS memory at the end of the job, in bytes of the largest PS at the planned number of PS.

    `law` names the growth that fitted best. `oom_at_samples` (and its 95% band) is the number of samples at which the
    memory reaches the present limit; None if it does not before the end of the job.
    """

    law: str
    expected: float
    lower: float
    upper: float
    oom_at_samples: float | None = None
    oom_band: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The numbers behind a decision; fields that do not apply are None or empty.

    `expected_gain` is samples/s net of the standstill, `expected_cost` the added cost per hour, `saved_seconds` the
    expected change of the remaining time (positive: sooner).
    """

    fit: ThroughputFit | None = None
    front: tuple[Candidate, ...] = ()
    chosen: Candidate | None = None
    present: Candidate | None = None
    expected_gain: float = 0.0
    expected_cost: float = 0.0
    overhead_seconds: float = 0.0
    saved_seconds: float = 0.0
    weight: float = 0.0
    similar: tuple[SimilarJob, ...] = ()
    memory: MemoryForecast | None = None
    fault_tolerance: FaultToleranceAdvice | None = None
    numbers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """The plan for one job. `reason` says why in words; `explanation` holds the numbers."""

    shape: JobShape | None
    action: PlanAction
    reason: str
    explanation: Explanation = Explanation()


@dataclass(frozen=True, slots=True)
class PlannerSettings:
    """The operator's preferences.

    `rho` and `epsilon` are those of DLRover-RM equation 14, `smoothing` (mu) and `neighbours` (k) those of Algorithm 1.
    `time_value_per_hour`, in the prices' currency, is the value of finishing a job an hour sooner: high values make
    jobs fast while there is room, low values make them cheap. A running job keeps its shape unless its expected bill
    (resources and time) falls by `minimum_gain`, a fraction. `exploration` scales the value of what a change teaches; 0
    never explores. PS memory grows `memory_lead_seconds` before it may run out; None: early enough for a change to be
    done in time (`running.lead_seconds`). Plans are made every `planning_seconds`.
    """

    rho: float = 2.5
    epsilon: float = 1.0
    smoothing: float = 0.5
    neighbours: int = 5
    time_value_per_hour: float = 5.0
    minimum_gain: float = 0.01
    exploration: float = 1.0
    memory_lead_seconds: float | None = None
    planning_seconds: float = 60.0
    seed: int = 0


@runtime_checkable
class Planner(Protocol):
    """A planning algorithm. It may keep knowledge between calls, but does no I/O and reads no clock."""

    def plan(self, cluster: ClusterView, now: float) -> Mapping[JobId, PlannedShape]:
        """Returns shapes for the jobs of `cluster` at `now` (seconds since the epoch); a job left out keeps its shape.

        In total, the shapes stay within the capacity and the owners' quotas.
        """
        ...
