"""Finds the threshold for a budget: FAE's statistical optimizer (section 4.1.3).

A bisection asks the profiler for the size of the hot set at successive thresholds, to find the smallest threshold whose
hot set fits the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from emberscale_trainer.hot.profiler import TableProfile, hot_bytes

_PRECISION = 1.001
"""The search stops at this ratio between the ends of the interval."""

_SHARE_OF_WHOLE_TABLES = 0.5
"""The share of a budget for small tables. The rest is for popular rows of large ones: else no record would be hot."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The hot rows within a budget: rows with at least `threshold` (t) of their table's accesses, and `whole` tables.

    They take at most `budget` bytes, by the upper end of their estimate.
    """

    budget: int
    threshold: float
    whole: frozenset[int]


def small_tables(tables: Sequence[TableProfile], budget: int) -> frozenset[int]:
    """Returns the tables that are hot as a whole: small ones, the smallest first, within half of the budget."""
    chosen: set[int] = set()
    room = _SHARE_OF_WHOLE_TABLES * budget
    for number in sorted(range(len(tables)), key=lambda number: tables[number].estimated_bytes):
        table = tables[number]
        if not table.small or table.estimated_bytes > room:
            break
        room -= table.estimated_bytes
        chosen.add(number)
    return frozenset(chosen)


def calibrate_threshold(tables: Sequence[TableProfile], budget: int) -> Calibration:
    """Finds the smallest threshold, to a thousandth, whose hot rows fit into `budget` bytes with CONFIDENCE.

    If the budget has no room even for the most popular rows, the threshold is above 1, and no row is hot.
    Raises ValueError for a negative budget.
    """
    if budget < 0:
        raise ValueError(f"a budget cannot be negative (got {budget})")
    whole = small_tables(tables, budget)
    # at the low end each row that was logged is hot, at the high end none
    low = 1 / (1 + max((table.accesses for table in tables), default=0))
    high = 2.0
    if hot_bytes(tables, whole, low).upper <= budget:
        return Calibration(budget, low, whole)
    while high > low * _PRECISION:
        middle = (low * high) ** 0.5
        if hot_bytes(tables, whole, middle).upper <= budget:
            high = middle
        else:
            low = middle
    return Calibration(budget, high, whole)
