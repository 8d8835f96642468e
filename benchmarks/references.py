"""References for the product in benchmarks and tests: exact optima, fits from scratch, and the settings of a paper."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from emberscale_api.readable import duration_text
from emberscale_api.shape import JobProfile
from emberscale_brain.model.fit import first_prior, fit_window
from emberscale_brain.model.predict import ModelConstants
from emberscale_brain.model.prior import Prior
from emberscale_brain.model.window import ProfileWindow
from emberscale_brain.planner.front import Front, non_dominated
from emberscale_brain.planner.selection import Options, SelectionTable
from emberscale_brain.planner.types import ClusterCapacity, Quota, ThroughputFit
from emberscale_trainer.table.quantization import Quantizer

Floats = NDArray[np.float64]

PAPER_QUANTIZERS: Mapping[int, Quantizer] = {
    2: Quantizer(2, bins=25, ratio=0.5),
    3: Quantizer(3, bins=25, ratio=0.2),
    4: Quantizer(4, bins=45, ratio=0.1),
}
"""The settings of Check-N-Run, section 4.2.3, by bits. It gives no ratio for 4 bits; larger ones than this gain nothing
by `quantisation.py`."""


def select_optimally(
    jobs: Sequence[Options], capacity: ClusterCapacity, quotas: Mapping[str, Quota], seconds: float = 60.0
) -> list[int | None]:
    """Selects as `selection.select` does, with the maximal total value. Raises RuntimeError after `seconds`."""
    if not jobs:
        return []
    table = SelectionTable.of(jobs, capacity, quotas)
    job_of, index_of = np.nonzero(table.value > -np.inf)
    values = table.value[job_of, index_of]
    variables = len(values)
    once = lil_matrix((len(jobs), variables))
    once[job_of, np.arange(variables)] = 1
    limits, bounds = [], []
    for row, pool in enumerate(table.pools):
        members = np.ones(variables, dtype=bool) if row == 0 else table.pool[job_of] == row
        for resource, amounts in enumerate((table.cpu, table.memory)):
            if np.isfinite(pool[resource]):
                unit = max(float(pool[resource]), 1e-12)
                limits.append(np.where(members, amounts[job_of, index_of] / unit, 0.0))
                bounds.append(float(pool[resource]) / unit)
    constraints = [LinearConstraint(once.tocsr(), 1, 1)]
    if limits:
        constraints.append(LinearConstraint(np.array(limits), -np.inf, np.array(bounds)))
    result = milp(
        c=-values / max(float(np.abs(values).max()), 1e-300),
        constraints=constraints,
        integrality=np.ones(variables),
        bounds=Bounds(0, 1),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    if result.x is None or result.status != 0:
        raise RuntimeError(f"the optimum was not found within {duration_text(seconds)}: {result.message}")
    chosen: list[int | None] = [None] * len(jobs)
    for variable in np.flatnonzero(result.x > 0.5):
        index = int(index_of[variable])
        chosen[int(job_of[variable])] = index - 1 if index else None
    return chosen


def hypervolume(cost: Floats, throughput: Floats, reference: tuple[float, float]) -> float:
    """Returns the area that a front dominates in (cost, 1 / throughput), up to a reference point."""
    order = non_dominated(cost, throughput)
    costs, inverses = cost[order], 1 / throughput[order]
    inside = (costs < reference[0]) & (inverses < reference[1])
    costs, inverses = costs[inside], inverses[inside]
    right = np.append(costs[1:], reference[0])
    return float(((right - costs) * (reference[1] - inverses)).sum())


def hypervolume_ratio(front: Front, exact: Front) -> float:
    """Returns the hypervolume of a front over the exact one's; the reference is 10% of its extent beyond its nadir."""
    inverse = 1 / exact.throughput
    reference = (
        float(exact.cost.max() + 0.1 * np.ptp(exact.cost) + 1e-12),
        float(inverse.max() + 0.1 * np.ptp(inverse) + 1e-12),
    )
    return hypervolume(front.cost, front.throughput, reference) / hypervolume(exact.cost, exact.throughput, reference)


def fit_profiles(
    profiles: tuple[JobProfile, ...], constants: ModelConstants, now: float, prior: Prior | None = None
) -> ThroughputFit | None:
    """Fits profiles from scratch; returns None if there is neither a usable profile nor a prior."""
    window = ProfileWindow().add(profiles, now)
    prior = prior or first_prior(profiles, window, constants)
    return None if prior is None else fit_window(window, constants, prior)
