"""Measures the skew of a data set and the savings of hot rows: the calibrator from the sample to bytes on the wire."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from emberscale_api.job.data import BadRecord
from emberscale_api.job.resolved import ResolvedModel
from emberscale_trainer.hot.access import Accesses, AccessLog, log_accesses
from emberscale_trainer.hot.classifier import HotSet, InputProcessor, classify_rows
from emberscale_trainer.hot.optimizer import Calibration, calibrate_threshold
from emberscale_trainer.hot.profiler import TableProfile
from emberscale_trainer.hot.sampler import IndexedData, Progress, Sample, take_sample
from emberscale_trainer.hot.traffic import RowCosts, RowTraffic, step_bytes, traffic_with

INITIAL_RATE = 50
"""R(50): hot and cold batches change twice an epoch (FAE, section 4.3)."""

_HELD_OUT_BATCHES = 16
_CURVE_POINTS = 200


@dataclass(frozen=True, slots=True)
class SkewRequest:
    """The parameters of a skew measurement.

    `budgets` are bytes of hot rows, ascending. Batches have `batch_size` records, of `workers` workers. A ratio `rate`
    of the records is profiled.
    """

    budgets: tuple[int, ...]
    batch_size: int
    workers: int
    rate: float
    seed: int
    exact: bool


@dataclass(frozen=True, slots=True)
class TableSkew:
    """A column of ids, as sampled.

    `rows` were seen, and at least `estimated_rows` exist. `rows_for_half` of them take half of the accesses, and
    `rows_for_most` 90%. `curve` is (rank, accesses) of rows by falling accesses, scaled to the whole data set.
    """

    name: str
    accesses: int
    rows: int
    estimated_rows: int
    row_bytes: int
    rows_for_half: int
    rows_for_most: int
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ExactBudget:
    """The results of a full pass for a budget.

    `rows_at_threshold` is the rows with at least t of all accesses, of the tables that are not hot as a whole: what the
    estimate is of. `access_share` and `hot_share` are those of the sample's hot set over all records; `best_...` those
    of the hot set that the counts of all records choose for the same budget.
    """

    rows_at_threshold: int
    access_share: float
    hot_share: float
    best_rows: int
    best_access_share: float
    best_hot_share: float


@dataclass(frozen=True, slots=True)
class BudgetSkew:
    """The benefit of a budget of bytes for hot rows.

    `estimated_rows` (with `estimated_half_width`) is the profiler's estimate of the rows at the threshold, in tables
    that are not hot as a whole; `rows` and `bytes` are those of the hot set that was then made. `access_share` and
    `hot_share` are ratios of held-out accesses and records.
    """

    budget: int
    threshold: float
    whole_tables: int
    estimated_rows: float
    estimated_half_width: float
    rows: int
    bytes: int
    access_share: float
    hot_share: float
    traffic: RowTraffic
    exact: ExactBudget | None


@dataclass(frozen=True, slots=True)
class SkewReport:
    """The skew of a data set by a sample. `row_bytes_per_sample` is rows on the wire without hot rows.

    `apart`: whether the held-out records are separate from the profiled ones.
    """

    records: int
    profiled: int
    held_out: int
    apart: bool
    share: float
    bad_records: tuple[BadRecord, ...]
    batch_size: int
    workers: int
    row_bytes_per_sample: float
    tables: tuple[TableSkew, ...]
    budgets: tuple[BudgetSkew, ...]


@dataclass(frozen=True, slots=True)
class _HotSetChoice:
    calibration: Calibration
    hot: HotSet
    estimated_rows: float
    half_width: float


def measure_skew(
    data: IndexedData,
    model: ResolvedModel,
    request: SkewRequest,
    progress: Progress = lambda stage, done, total: None,
) -> SkewReport:
    """Profiles a sample of the data, and chooses a hot set for each budget.

    With `request.exact`, two passes over all records measure the quality of the sample. Raises DataUnavailableError.
    """
    held_out = min(
        _HELD_OUT_BATCHES * request.batch_size, max(round(request.rate * data.records), 2 * request.batch_size)
    )
    sample = take_sample(data, request.rate, held_out, request.seed, progress)
    logs = [log.entries() for log in sample.logs]
    costs = RowCosts.of(model.tables, len(logs))
    choices = _choose(logs, costs, request, lambda done: progress("calibrating", done, len(request.budgets)))
    exact = _exact(data, logs, choices, costs, request, progress) if request.exact else [None] * len(choices)
    everything = np.ones(len(sample.held_out), np.bool_)
    return SkewReport(
        records=data.records,
        profiled=sample.profiled,
        held_out=len(sample.held_out),
        apart=sample.apart,
        share=sample.share,
        bad_records=tuple(sample.bad_records),
        batch_size=request.batch_size,
        workers=request.workers,
        row_bytes_per_sample=2 * step_bytes(sample.held_out, everything, request.batch_size, costs, request.seed),
        tables=tuple(
            _table(name, log, cost.memory, sample.share)
            for name, log, cost in zip(model.columns.id_columns, logs, costs, strict=True)
        ),
        budgets=tuple(
            _budget(choice, sample, data.records, costs, request, found)
            for choice, found in zip(choices, exact, strict=True)
        ),
    )


def _choose(
    logs: Sequence[Accesses],
    costs: Sequence[RowCosts],
    request: SkewRequest,
    progress: Callable[[int], None] = lambda done: None,
) -> list[_HotSetChoice]:
    random = np.random.default_rng(request.seed)
    profiles = [TableProfile.of(log, cost.memory, random) for log, cost in zip(logs, costs, strict=True)]
    choices = []
    for done, budget in enumerate(request.budgets):
        progress(done)
        calibration = calibrate_threshold(profiles, budget)
        counted = [
            table.hot_rows(calibration.threshold)
            for number, table in enumerate(profiles)
            if number not in calibration.whole
        ]
        choices.append(
            _HotSetChoice(
                calibration,
                classify_rows(logs, [cost.memory for cost in costs], calibration),
                sum(rows.mean for rows in counted),
                sum(rows.half_width**2 for rows in counted) ** 0.5,
            )
        )
    return choices


def _table(name: str, log: Accesses, row_bytes: int, share: float) -> TableSkew:
    falling = np.sort(log.counts)[::-1]
    ranks = np.unique(np.geomspace(1, max(falling.size, 1), _CURVE_POINTS).astype(np.int64))[: falling.size]
    return TableSkew(
        name,
        log.total,
        log.keys.size,
        round(log.estimated_rows),
        row_bytes,
        log.rows_covering(0.5),
        log.rows_covering(0.9),
        tuple((int(rank), float(falling[rank - 1] / share)) for rank in ranks),
    )


def _budget(
    choice: _HotSetChoice,
    sample: Sample,
    records: int,
    costs: Sequence[RowCosts],
    request: SkewRequest,
    exact: ExactBudget | None,
) -> BudgetSkew:
    held_out = sample.held_out
    tags = InputProcessor(choice.hot, held_out.ids.shape[1]).tag(held_out)
    hot_share = float(tags.mean())
    hit = total = 0
    for table, ids in zip(choice.hot.tables, held_out.column_ids, strict=True):
        total += ids.size
        hit += ids.size if table.whole else int(np.isin(ids, table.keys).sum())
    hot_steps, cold_steps = (
        step_bytes(held_out, chosen, request.batch_size, costs, request.seed) for chosen in (tags, ~tags)
    )
    return BudgetSkew(
        budget=choice.calibration.budget,
        threshold=choice.hot.threshold,
        whole_tables=len(choice.calibration.whole),
        estimated_rows=choice.estimated_rows,
        estimated_half_width=choice.half_width,
        rows=choice.hot.rows,
        bytes=choice.hot.bytes,
        access_share=hit / max(total, 1),
        hot_share=hot_share,
        traffic=traffic_with(
            hot_share, hot_steps, cold_steps, choice.hot.bytes, request.workers, records, INITIAL_RATE
        ),
        exact=exact,
    )


def _exact(
    data: IndexedData,
    sampled: Sequence[Accesses],
    choices: Sequence[_HotSetChoice],
    costs: Sequence[RowCosts],
    request: SkewRequest,
    progress: Progress,
) -> list[ExactBudget]:
    """Counts all records, and tags them with the hot sets of the sample and of the full counts."""
    logs = [AccessLog() for _ in sampled]
    for done, records in enumerate(data.read(data.blocks, [])):
        progress("counting all records", done, len(data.blocks))
        log_accesses(records, logs)
    full = [log.entries() for log in logs]
    best = _choose(full, costs, request)
    columns = len(data.reader.columns.categorical)
    processors = [InputProcessor(choice.hot, columns) for choice in (*choices, *best)]
    hot = np.zeros(len(processors), dtype=np.int64)
    good = 0
    for done, records in enumerate(data.read(data.blocks, [])):
        progress("tagging all records", done, len(data.blocks))
        good += len(records)
        hot += [int(processor.tag(records).sum()) for processor in processors]
    shares = (hot / good).tolist()
    return [
        ExactBudget(
            rows_at_threshold=sum(
                int((log.counts >= choice.calibration.threshold * log.total).sum())
                for number, log in enumerate(full)
                if number not in choice.calibration.whole
            ),
            access_share=_coverage(choice.hot, full),
            hot_share=shares[number],
            best_rows=other.hot.rows,
            best_access_share=_coverage(other.hot, full),
            best_hot_share=shares[len(choices) + number],
        )
        for number, (choice, other) in enumerate(zip(choices, best, strict=True))
    ]


def _coverage(hot: HotSet, full: Sequence[Accesses]) -> float:
    """The ratio of all accesses that go to hot rows."""
    hit = sum(
        log.total if table.whole else int(log.counts[np.isin(log.keys, table.keys)].sum())
        for table, log in zip(hot.tables, full, strict=True)
    )
    return hit / max(sum(log.total for log in full), 1)
