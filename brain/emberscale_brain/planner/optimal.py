"""The exact choice of one candidate a job by mixed-integer programming: judges the greedy, in small clusters."""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from emberscale_brain.planner.selection import Options, SelectionTable
from emberscale_brain.planner.types import ClusterCapacity, Quota


def select_optimally(
    jobs: Sequence[Options], capacity: ClusterCapacity, quotas: Mapping[str, Quota], seconds: float = 60.0
) -> list[int | None]:
    """As `selection.select`, with the largest total value there is; raises RuntimeError if `seconds` do not suffice."""
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
        raise RuntimeError(f"the optimum was not found within {seconds} s: {result.message}")
    chosen: list[int | None] = [None] * len(jobs)
    for variable in np.flatnonzero(result.x > 0.5):
        index = int(index_of[variable])
        chosen[int(job_of[variable])] = index - 1 if index else None
    return chosen
