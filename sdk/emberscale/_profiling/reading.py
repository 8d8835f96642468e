"""What a job's processes have done so far: their Prometheus counters, and the kernel's account of their time."""

import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
from prometheus_client.parser import text_string_to_metric_families

from emberscale_api.metrics import SAMPLES_TOTAL
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local import RunView

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
        name = f"{pb.Role.Name(member.member.role).lower()}-{member.member.index}"
        if member.member.role in (pb.PS, pb.WORKER) and member.metrics_address:
            counters[name] = _scrape(member.metrics_address)
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
    """What the counters grew by, summed by role, and the CPU seconds by process."""
    grown: dict[str, dict[str, float]] = {"worker": {}, "ps": {}}
    for name, counters in after.counters.items():
        totals = grown[name.rpartition("-")[0]]
        for counter, value in counters.items():
            totals[counter] = totals.get(counter, 0.0) + value - before.counters.get(name, {}).get(counter, 0.0)
    used = {name: seconds - before.cpu_seconds.get(name, 0.0) for name, seconds in after.cpu_seconds.items()}
    return grown, used
