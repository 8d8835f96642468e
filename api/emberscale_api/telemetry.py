"""The telemetry of every process: structured logs, and Prometheus metrics of its CPU and memory."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from emberscale_api import metrics

_Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily)
_Labels = TypeVar("_Labels", bound=str | tuple[str, ...])


def configure_logging(job: str, role: str, index: int, level: int = logging.INFO) -> None:
    """Sends every event of this process to stderr as one JSON object a line."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _Identity(job, role, index),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


class _Identity:
    """Adds the process's identity. It is a processor because threads do not inherit context variables."""

    def __init__(self, job: str, role: str, index: int) -> None:
        self._fields = {"job": job, "role": role, "index": index}

    def __call__(self, logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**self._fields, **event}


def labelled(
    family: type[_Family], name: str, text: str, labels: Sequence[str], values: Mapping[_Labels, float]
) -> _Family:
    """Returns a family of metrics with a sample for each key of `values`: its label, or all `labels`."""
    metric = family(name, text, labels=labels)
    for of, value in values.items():
        metric.add_metric([of] if isinstance(of, str) else of, value)
    return metric


_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 has no word for "no limit": it is the largest multiple of a page."""


class ProcessMetrics(Collector):
    """Read when scraped, since a container may be resized while it runs. Limits are those of its cgroup, v2 or v1."""

    def __init__(self, cgroups: Path = _CGROUPS) -> None:
        self._process = psutil.Process()
        self._cgroups = cgroups

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields the present figures; a limit that does not exist is left out."""
        times = self._process.cpu_times()
        yield GaugeMetricFamily(metrics.MEMORY_BYTES, "Resident memory", self._process.memory_info().rss)
        yield CounterMetricFamily(metrics.CPU_SECONDS_TOTAL, "CPU time", times.user + times.system)
        memory, cores = memory_limit(self._cgroups), cpu_limit(self._cgroups)
        if memory is not None:
            yield GaugeMetricFamily(metrics.MEMORY_LIMIT_BYTES, "Memory above which the process is killed", memory)
        if cores is not None:
            yield GaugeMetricFamily(metrics.CPU_LIMIT_CORES, "Cores that the process may use", cores)


def memory_limit(cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that this container may use; None where there is no limit."""
    text = _text(cgroups / "memory.max") or _text(cgroups / "memory" / "memory.limit_in_bytes")
    limit = int(text) if text.isdigit() else _UNLIMITED_BYTES
    return limit if limit < _UNLIMITED_BYTES else None


class MemoryGauge:
    """The memory of this process, and the limit above which it is killed: its container's, or else what it was given.

    A process without a container starts with `granted` bytes, None: without a limit, and may be given more later.
    """

    def __init__(self, granted: int | None = None, cgroups: Path = _CGROUPS) -> None:
        self._process = psutil.Process()
        self._granted = granted
        self._cgroups = cgroups

    def grant(self, limit: int) -> None:
        """Sets the limit that the process was given while it runs; 0: none."""
        if self._granted is not None:
            self._granted = max(self._granted, limit)

    def limit(self) -> int | None:
        """Bytes above which the process is killed; None where there is no limit."""
        own = memory_limit(self._cgroups)
        return self._granted if own is None else own

    def used(self) -> int:
        """Bytes that count against the limit."""
        if memory_limit(self._cgroups) is not None and (used := memory_in_use(self._cgroups)) is not None:
            return used
        return int(self._process.memory_info().rss)


def memory_in_use(cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that count against the limit of this container, without the files that the kernel can drop; None without
    a container.
    """
    for usage, statistics, prefix in (
        (cgroups / "memory.current", cgroups / "memory.stat", ""),
        (cgroups / "memory" / "memory.usage_in_bytes", cgroups / "memory" / "memory.stat", "total_"),
    ):
        if (text := _text(usage)).isdigit():
            parts = dict(line.split() for line in _text(statistics).splitlines() if line.count(" ") == 1)
            files = sum(int(parts.get(f"{prefix}{kind}_file", "0")) for kind in ("active", "inactive"))
            return max(0, int(text) - files)
    return None


def cpu_limit(cgroups: Path = _CGROUPS) -> float | None:
    """Cores that this container may use; None where there is no limit."""
    quota, _, period = _text(cgroups / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(cgroups / "cpu" / "cpu.cfs_quota_us"), _text(cgroups / "cpu" / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
