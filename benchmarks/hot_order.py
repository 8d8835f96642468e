"""What all-hot and all-cold batches (FAE, sections 3 and 4.2) would save rounds, in bytes of a sample, without a job.

The records of an epoch are cut into rounds twice: in the order of the epoch (`unordered`), and with all-hot records and
all others each in a line of their own (`ordered`). Hot rows are those that the calibrator finds, from 5% of the records
or from all. Bytes are those of the product's own key plans for one worker: rows and dense pieces, with the state of the
example job's optimizers, pulled and pushed once a round.

Two bounds stand beside them. Both are of a worker alone, or of workers that share one copy of the hot rows:

* `phases`: as in FAE, hot batches send nothing, and the hot rows are fetched and written back twice an epoch (rate 50).
  Cold batches are trained in rounds. The effect of a hot batch is nowhere else until the rows are written back.
* `kept`: without any order, the worker keeps the hot rows from round to round. It pulls the other rows only, and pushes
  all rows that changed.

Ids are those of the synthetic generator, whose exponents are assumptions and whose columns are independent; power laws
with one exponent; and a mixture, in which half of the records draw every id with an exponent of 1.5 and the others with
1.05, so that hot and cold records have little in common. What it does not show: time, AUC, real data.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

import numpy as np
import numpy.typing as npt

from emberscale_api.job import parse_manifest, resolve_model
from emberscale_trainer.data.order import EpochOrder
from emberscale_trainer.data.population import CATEGORICAL, Population
from emberscale_trainer.hot.access import AccessLog, IdRecords, log_accesses
from emberscale_trainer.hot.classifier import HotSet, InputProcessor, classify_rows
from emberscale_trainer.hot.optimizer import calibrate_threshold
from emberscale_trainer.hot.profiler import TableProfile
from emberscale_trainer.hot.skew import INITIAL_RATE
from emberscale_trainer.hot.traffic import RowCosts
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.worker.keys import KeyPlan, KeyPlanner, exchange_bytes
from hot_calibrator import SAMPLING_RATE
from master_stand_in import even_table
from reporting import arguments, say
from whole_run import manifest

Ids = npt.NDArray[np.int64]

BUDGETS_MIB = (4, 16)
BLOCK_RECORDS = 32_768
SAMPLED, ALL = "5%", "all"
LOOKED_AT = 4
"""The number of rounds whose rows are looked up among the hot ones."""


@dataclass(frozen=True)
class RoundBytes:
    """Bytes per sample, relative to batches one by one in the order of the epoch.

    `hot_records` is the ratio of records that are all hot, and `hot_rows` that of the distinct rows of unordered rounds
    that are hot. `ordered_hot` and `ordered_cold` are the bytes per sample of either kind of rounds.
    """

    ids: str
    counted: str
    budget_mib: int
    batch_size: int
    round: int
    hot_records: float
    hot_rows: float
    unordered: float
    ordered: float
    ordered_hot: float
    ordered_cold: float
    phases: float
    kept: float


def power_law(records: int, exponent: float, seed: int) -> Ids:
    """Draws ids int64[records, c] with the cardinalities of the synthetic columns and one exponent other than 1."""
    random = np.random.default_rng(seed)
    columns = []
    for column in CATEGORICAL:
        span = (column.cardinality + 1.0) ** (1 - exponent) - 1
        ranks = (1.0 + random.random(records) * span) ** (1 / (1 - exponent))
        columns.append(np.minimum(ranks.astype(np.int64), column.cardinality))
    return np.ascontiguousarray(np.stack(columns, axis=1))


def mixture(records: int) -> Ids:
    """Draws ids int64[records, c]; half of the records have more popular ids in every column."""
    popular = np.random.default_rng(3).random(records) < 0.5
    return np.where(popular[:, np.newaxis], power_law(records, 1.5, 1), power_law(records, 1.05, 2))


def in_epoch_order(ids: Ids) -> Ids:
    """Returns the ids in the order of an epoch."""
    sizes = [min(BLOCK_RECORDS, len(ids) - first) for first in range(0, len(ids), BLOCK_RECORDS)]
    order = EpochOrder(sizes, seed=0, epoch=0, enabled=True)
    return np.concatenate(
        [
            ids[span.block * BLOCK_RECORDS + order.permutation(span.block)[span.start : span.stop]]
            for span in order.spans(0, len(ids))
        ]
    )


class Wire:
    """The bytes of the example model on the wire."""

    def __init__(self) -> None:
        job = parse_manifest(manifest("hot-order", {"data": {"train": ["-"]}}))
        model = resolve_model(job.spec)
        parameters = len(flat_copy(build_model(job.spec.model, model, job.spec.training.seed)).numpy())
        self.costs = RowCosts.of(model.tables, len(CATEGORICAL))
        self._singles = KeyPlanner(even_table(1), model.tables, parameters)
        self._rounds = KeyPlanner(even_table(1), model.tables, parameters, job.spec.optimizers.dense.type)
        self._floats = int(self._rounds.plan(np.zeros((1, len(CATEGORICAL)), np.int64)).floats[0])

    def singles(self, ids: Ids, batch: int) -> float:
        """Returns the bytes per sample, batch by batch."""
        return _a_sample(self._singles, ids, batch)

    def rounds(self, ids: Ids, records: int) -> float:
        """Returns the bytes per sample in rounds of `records`; fewer ids make one shorter round."""
        return _a_sample(self._rounds, ids, min(records, len(ids))) if len(ids) else 0.0

    def moving(self, rows: float) -> float:
        """Returns the bytes of a pull and a push of rows with their state."""
        return rows * exchange_bytes(1, self._floats)


def _a_sample(planner: KeyPlanner, ids: Ids, size: int) -> float:
    plans: list[KeyPlan] = [planner.plan(part) for part in _parts(ids, size)]
    return sum(plan.exchange_bytes for plan in plans) / (len(plans) * size)


def _parts(ids: Ids, size: int) -> list[Ids]:
    return [ids[first : first + size] for first in range(0, len(ids) - size + 1, size)]


def hot_set(ids: Ids, costs: Sequence[RowCosts], budget: int) -> HotSet:
    """Returns the hot rows of a budget, by the accesses of these records."""
    logs = [AccessLog() for _ in costs]
    log_accesses(IdRecords(ids), logs)
    entries = [log.entries() for log in logs]
    random = np.random.default_rng(0)
    profiles = [TableProfile.of(log, cost.memory, random) for log, cost in zip(entries, costs, strict=True)]
    return classify_rows(entries, [cost.memory for cost in costs], calibrate_threshold(profiles, budget))


def distinct_rows(ids: Ids, hot: HotSet) -> tuple[int, int]:
    """Counts the distinct rows of records and the hot ones among them; all rows of a table hot as a whole are hot."""
    rows = found = 0
    for column, table in zip(ids.T, hot.tables, strict=True):
        keys = np.unique(column)
        rows += keys.size
        found += keys.size if table.whole else int(np.isin(keys, table.keys).sum())
    return rows, found


def measure(name: str, ids: Ids, batches: Sequence[int], lengths: Sequence[int]) -> Iterator[RoundBytes]:
    """Measures all hot sets, batch sizes and rounds on one data set."""
    wire = Wire()
    line = in_epoch_order(ids)
    sample = ids[np.random.default_rng(0).random(len(ids)) < SAMPLING_RATE]
    singles = {batch: wire.singles(line, batch) for batch in batches}
    unordered = {(batch, length): wire.rounds(line, batch * length) for batch in batches for length in lengths}
    for counted, records in ((SAMPLED, sample), (ALL, ids)):
        for budget in BUDGETS_MIB:
            hot = hot_set(records, wire.costs, budget << 20)
            tags = InputProcessor(hot, len(CATEGORICAL)).tag(IdRecords(line))
            share = float(tags.mean())
            hot_line, cold_line = (np.ascontiguousarray(line[chosen]) for chosen in (tags, ~tags))
            swaps = 100 / INITIAL_RATE * wire.moving(distinct_rows(ids, hot)[1]) / len(ids)
            for batch, length in unordered:
                size, one = batch * length, singles[batch]
                rows = [distinct_rows(part, hot) for part in _parts(line, size)[:LOOKED_AT]]
                hot_bytes, cold_bytes = (wire.rounds(part, size) for part in (hot_line, cold_line))
                not_pulled = wire.moving(mean(found for _, found in rows)) / 2 / size
                yield RoundBytes(
                    ids=name,
                    counted=counted,
                    budget_mib=budget,
                    batch_size=batch,
                    round=length,
                    hot_records=share,
                    hot_rows=sum(found for _, found in rows) / sum(total for total, _ in rows),
                    unordered=unordered[batch, length] / one,
                    ordered=(share * hot_bytes + (1 - share) * cold_bytes) / one,
                    ordered_hot=hot_bytes / one,
                    ordered_cold=cold_bytes / one,
                    phases=((1 - share) * cold_bytes + swaps) / one,
                    kept=(unordered[batch, length] - not_pulled) / one,
                )


def main() -> None:
    """Prints a table, or one JSON object."""
    parser = arguments(__doc__, plot=False)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, nargs="+", default=[8, 16, 32], metavar="BATCHES")
    options = parser.parse_args()
    records = options.records // 4 if options.quick else options.records
    data = {
        "synthetic": Population(7).rows(0, records).ids,
        "exponent 1.5": power_law(records, 1.5, 1),
        "mixture": mixture(records),
    }
    found: list[RoundBytes] = []
    say("ids           counted  MiB     B   n  hot: records, rows  unordered ordered (hot, cold)  gain  phases   kept")
    for name, ids in data.items():
        for one in measure(name, ids, options.batch_sizes, options.rounds):
            found.append(one)
            say(
                f"{one.ids:13} {one.counted:>7} {one.budget_mib:4} {one.batch_size:5} {one.round:3} "
                f"{one.hot_records:12.1%} {one.hot_rows:6.1%} {one.unordered:9.3f}x {one.ordered:6.3f}x "
                f"{one.ordered_hot:5.3f} {one.ordered_cold:5.3f} {one.ordered / one.unordered:5.3f}x "
                f"{one.phases:6.3f}x {one.kept:5.3f}x"
            )
    if options.output == "json":
        print(json.dumps({"name": "hot_order", "rounds": [asdict(one) for one in found]}))


if __name__ == "__main__":
    main()
