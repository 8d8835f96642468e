"""The shape of a job, and the measurements of the job in that shape.

Times are seconds, CPU is in cores, memory in bytes, throughput in samples per second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from emberscale_api.readable import bytes_text, count_text

GIB = 1 << 30
_LEAST_RESERVE, _MOST_RESERVE = 32 << 20, 256 << 20


def memory_reserve(limit: int) -> int:
    """Bytes below its limit that a parameter server keeps for moves and checkpoints, if it can."""
    return min(max(limit // 16, _LEAST_RESERVE), _MOST_RESERVE)


@dataclass(frozen=True)
class RoleShape:
    """Processes of one role, with the cores and bytes of memory of each; None if unspecified or unlimited."""

    replicas: int
    cpu_cores: float | None = None
    memory_bytes: int | None = None

    def describe(self) -> str:
        """Such as `2 x 1.5 cores 2 GiB`."""
        cpu = "" if self.cpu_cores is None else f" x {self.cpu_cores:g} cores"
        memory = "" if self.memory_bytes is None else f" {bytes_text(self.memory_bytes)}"
        return f"{self.replicas}{cpu}{memory}"


@dataclass(frozen=True, slots=True)
class JobShape:
    """Resources of a job: `workers` x (`worker_cpu`, `worker_memory`) and `ps` x (`ps_cpu`, `ps_memory`)."""

    workers: int
    ps: int
    worker_cpu: float
    ps_cpu: float
    worker_memory: int
    ps_memory: int

    def __post_init__(self) -> None:
        if self.workers < 1 or self.ps < 1:
            raise ValueError(f"a job needs at least one worker and one PS, not {self.workers} and {self.ps}")
        if not (self.worker_cpu > 0 and self.ps_cpu > 0):
            raise ValueError(f"worker_cpu ({self.worker_cpu}) and ps_cpu ({self.ps_cpu}) must be above 0")
        if self.worker_memory < 0 or self.ps_memory < 0:
            raise ValueError(f"memory must not be negative: {self.worker_memory}, {self.ps_memory}")

    @property
    def cpu(self) -> float:
        """Cores of all processes together."""
        return self.workers * self.worker_cpu + self.ps * self.ps_cpu

    @property
    def memory(self) -> int:
        """Bytes of all processes together."""
        return self.workers * self.worker_memory + self.ps * self.ps_memory

    def with_memory(self, worker_memory: int, ps_memory: int) -> "JobShape":
        """The same processes and cores with other memory."""
        return replace(self, worker_memory=worker_memory, ps_memory=ps_memory)

    def describe(self) -> str:
        """Describes the shape for reasons and tables."""
        return (
            f"{count_text(self.workers, 'worker')} x {self.worker_cpu:g} cores {bytes_text(self.worker_memory)}, "
            f"{self.ps} PS x {self.ps_cpu:g} cores {bytes_text(self.ps_memory)}"
        )


DIMENSIONS = tuple(dimension.name for dimension in fields(JobShape))


@dataclass(frozen=True, slots=True)
class JobProfile:
    """One measurement of a job in steady state, over some seconds up to `time`.

    * `time`: when the window ended, in seconds since the epoch; 0 until that is known.
    * `shape`: what the job ran with. A role without limits counts as what it used.
    * `batch_size`: samples per worker and iteration.
    * `iteration_seconds`: a worker's time for one batch.
    * `throughput`: samples per second of all workers together.
    * `samples`: what the job had trained by then, also in shards that were not finished.
    * `rows`: rows of all tables; 0: not known, as a move was completed in the window.
    * `ps_memory`: bytes of the largest parameter server, 0 likewise; `worker_memory` of the largest worker.
    * `worker_cpu_utilization`: 0 to 1 of the cores that the role has; so `ps_cpu_utilization`.
    * `stage_fractions`: shares of `iteration_seconds`: read, pull, compute, push, wait.
    * `restarted`: a start, a failure or a scaling falls into the window, or it holds something else than training: it
      says nothing about the shape and enters no throughput fit.
    * `total_samples`: over all epochs, once the job knows; 0 before.
    * `failures`: how many parameter servers the job has lost.
    * `checkpoint_cost`: seconds of training that a checkpoint costs on average; 0 before the first.
    """

    time: float
    shape: JobShape
    batch_size: int
    iteration_seconds: float
    throughput: float
    samples: int = 0
    rows: int = 0
    ps_memory: int = 0
    worker_memory: int = 0
    worker_cpu_utilization: float = 0.0
    ps_cpu_utilization: float = 0.0
    stage_fractions: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    restarted: bool = False
    total_samples: int = 0
    failures: int = 0
    checkpoint_cost: float = 0.0
