"""The comparison as one JSON object, for programs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from emberscale_simulator.results import Estimate, SchedulerSummary


def as_json(scenario: str, seeds: Sequence[int], summaries: Sequence[SchedulerSummary]) -> dict[str, Any]:
    """`schedulers` by name; see `scheduler_json`."""
    return {
        "scenario": scenario,
        "seeds": list(seeds),
        "schedulers": {summary.scheduler: scheduler_json(summary) for summary in summaries},
    }


def scheduler_json(summary: SchedulerSummary) -> Mapping[str, Any]:
    """The figures of one scheduler: each a mean with `ci95`, [lower, upper], null where one seed gives none."""
    return {
        "jct_seconds": {
            **_estimate(summary.jct),
            "p50": _number(summary.jct_p50.mean),
            "p90": _number(summary.jct_p90.mean),
        },
        "wait_seconds": _estimate(summary.wait),
        "worker_cpu_utilization": _estimate(summary.worker_cpu_utilization),
        "ps_cpu_utilization": _estimate(summary.ps_cpu_utilization),
        "memory_utilization": _estimate(summary.memory_utilization),
        "completion_rate": _estimate(summary.completion_rate),
        "scalings": _estimate(summary.scalings),
        "core_hours": _estimate(summary.core_hours),
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    bounded = math.isfinite(estimate.half_width)
    return {"mean": _number(estimate.mean), "ci95": list(estimate.interval) if bounded else None}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
