"""Computes a profile from two readings of a job and one measurement of its model.

A reading is the Prometheus counters of a job's processes, and the kernel's account of their time.
"""

import time
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from emberscale_api import metrics
from emberscale_api.job.roles import Role
from emberscale_api.metrics import SAMPLES_TOTAL
from emberscale_operator.local.snapshot import RunView

_TIMEOUT_SECONDS = 5.0

Counters = Mapping[str, float]
"""Totals by the name of the metric and its labels' values: `emberscale_stage_seconds_total read`."""


@dataclass(frozen=True)
class Reading:
    """`at` is in seconds of a clock that never goes back; counters and CPU seconds are by process, `worker-0`."""

    at: float
    counters: Mapping[str, Counters]
    cpu_seconds: Mapping[str, float]

    @property
    def samples(self) -> int:
        """Samples that the workers have trained; the master knows of as many a heartbeat later."""
        return int(sum(counters.get(SAMPLES_TOTAL, 0) for counters in self.counters.values()))


def take_reading(snapshot: RunView) -> Reading:
    """Asks the workers and servers of a running job. Raises OSError if one cannot be asked."""
    counters = {}
    for member in snapshot.status.members if snapshot.status is not None else ():
        if member.member.role in (Role.PS, Role.WORKER) and member.metrics_address:
            counters[member.member.slot] = _scrape(member.metrics_address)
    return Reading(time.monotonic(), counters, _cpu_seconds(snapshot))


def _scrape(address: str) -> Counters:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        if family.type == "counter"
        for sample in family.samples
    }


def _cpu_seconds(snapshot: RunView) -> dict[str, float]:
    seconds = {}
    for process in snapshot.processes:
        try:
            times = psutil.Process(process.pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds[process.name] = times.user + times.system
    return seconds


def difference(before: Reading, after: Reading) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Returns the growth of the counters, summed by role, and of the CPU seconds, by process."""
    grown: dict[str, dict[str, float]] = {"worker": {}, "ps": {}}
    for name, counters in after.counters.items():
        totals = grown[name.rpartition("-")[0]]
        for counter, value in counters.items():
            totals[counter] = totals.get(counter, 0.0) + value - before.counters.get(name, {}).get(counter, 0.0)
    used = {name: seconds - before.cpu_seconds.get(name, 0.0) for name, seconds in after.cpu_seconds.items()}
    return grown, used


WORKER_THREADS: Mapping[str, tuple[str, ...]] = {
    "read": ("read", "plan"),
    "pull": ("pull",),
    "compute": ("compute", *metrics.WAITS),
    "push": ("push",),
}
"""The threads of a worker, and the stages in which each works; the rest of its time it waits for other threads."""

SERVER_STAGES = {"gather": "pull", "update": "push"}
"""A parameter server's work under its lock, and the stage of its metrics that counts it."""


@dataclass(frozen=True)
class Roof:
    """The speed of the workers' own code on batches that are already pulled, with as many threads as the job's workers.

    `cpu_seconds_per_sample` is over all threads.
    """

    samples_per_second: float
    cpu_seconds_per_sample: float
    threads: int


@dataclass(frozen=True)
class TimeBreakdown:
    """The use of a job's time in a window of `seconds`.

    `worker_stages` and `server_stages` are shares of the time of one process, on average over those of the role; stages
    of different threads of a worker overlap. A server's stages and its `idle` add up to 1; `hold` is the time that
    requests waited for the staleness bound, over all of them. `cpu_seconds` is by process.
    """

    name: str
    samples: int
    batches: int
    seconds: float
    workers: int
    servers: int
    worker_stages: Mapping[str, float]
    server_stages: Mapping[str, float]
    hold_seconds: float
    received_bytes_per_sample: float
    sent_bytes_per_sample: float
    ids_per_key: float
    cpu_seconds: Mapping[str, float]
    roof: Roof

    @property
    def samples_per_second(self) -> float:
        """The speed of all workers together."""
        return self.samples / self.seconds

    @property
    def share_of_roof(self) -> float:
        """1.0 means that parameter servers cost nothing."""
        return self.samples_per_second / self.roof.samples_per_second

    @property
    def cpu_seconds_per_sample(self) -> float:
        """Over all processes of the job."""
        return sum(self.cpu_seconds.values()) / self.samples

    @property
    def bottleneck(self) -> str:
        """The thread of the workers that has the least time left."""
        busy = {
            thread: sum(self.worker_stages[stage] for stage in stages if stage not in metrics.WAITS)
            for thread, stages in WORKER_THREADS.items()
        }
        return max(busy, key=lambda thread: busy[thread])

    def as_document(self) -> dict[str, Any]:
        """Plain types, for JSON."""
        return {
            **asdict(self),
            "samples_per_second": self.samples_per_second,
            "cpu_seconds_per_sample": self.cpu_seconds_per_sample,
            "share_of_roof": self.share_of_roof,
            "bottleneck": self.bottleneck,
        }


def profile_of(name: str, before: Reading, after: Reading, roof: Roof) -> TimeBreakdown:
    """Raises ValueError for a window in which nothing was trained."""
    grown, cpu_seconds = difference(before, after)
    worker, server = grown["worker"], grown["ps"]
    seconds = after.at - before.at
    workers, servers = (sum(one.startswith(f"{role}-") for one in after.counters) for role in ("worker", "ps"))
    samples = int(worker.get(metrics.SAMPLES_TOTAL, 0))
    if not samples:
        raise ValueError("no sample was trained")
    stages = {
        stage: worker[f"{metrics.STAGE_SECONDS_TOTAL} {stage}"] / (seconds * workers)
        for stages in WORKER_THREADS.values()
        for stage in stages
    }
    served = {
        name: server[f"{metrics.STAGE_SECONDS_TOTAL} {stage}"] / (seconds * servers)
        for name, stage in SERVER_STAGES.items()
    }
    return TimeBreakdown(
        name=name,
        samples=samples,
        batches=int(worker[metrics.BATCHES_TOTAL]),
        seconds=seconds,
        workers=workers,
        servers=servers,
        worker_stages=stages,
        server_stages={**served, "idle": max(0.0, 1.0 - sum(served.values()))},
        hold_seconds=server[f"{metrics.STAGE_SECONDS_TOTAL} hold"],
        received_bytes_per_sample=worker[f"{metrics.WIRE_BYTES_TOTAL} received"] / samples,
        sent_bytes_per_sample=worker[f"{metrics.WIRE_BYTES_TOTAL} sent"] / samples,
        ids_per_key=worker[metrics.IDS_TOTAL] / max(1.0, worker[metrics.KEYS_TOTAL]),
        cpu_seconds=cpu_seconds,
        roof=roof,
    )
