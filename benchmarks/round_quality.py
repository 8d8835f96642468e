"""What rounds of several workers cost or gain in AUC, emulated in one process: without waiting, and without chance.

Workers take leases from one order in turn. Rows and dense parameters are in the product's own store; workers compute
and step them by its own code, and its `StalenessBound` admits their pulls and pushes. Only time is emulated: a batch
takes one unit of it, and pulls and pushes take none. A worker that may not go on is asked again whenever others have
done something. Each worker begins a part of a unit after the one before.

* one by one: a worker pulls a batch before it computes the one before (`training.pullAhead: 1`).
* rounds: a worker pulls a round when the one before is pushed; it has as many batches as there is room for.

Both are compared with training batch by batch in order, where nothing is stale. The records are those of the synthetic
generator: how far AUCs are apart on other data is not known.
"""

import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from emberscale_api.dataset import Split
from emberscale_api.job import TrainingJob, parse_manifest, resolve_model
from emberscale_trainer.data.source import Batch
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.server.staleness import StalenessBound, Ticket
from emberscale_trainer.table import DensePieces, TableStore
from emberscale_trainer.worker.compute import ModelReplica
from emberscale_trainer.worker.keys import KeyPlan, KeyPlanner
from emberscale_trainer.worker.local_rows import LocalRows
from emberscale_trainer.worker.rounds import Round
from emberscale_trainer.worker.servers import Pulled
from master_stand_in import even_table
from plain_torch import indexed
from reporting import Ratio, arguments, report, say
from whole_run import manifest, synthesise

EVALUATION_ROWS = 100_000
LEASE = 64
ALLOWED_AUC = 0.0002
WARMUPS = (96, 1, 0)


def job(data: Path, batch: int, seed: int) -> dict[str, Any]:
    """Returns a job with the example model."""
    paths = {"train": [str(data / "train-*.tsv")], "evaluation": [str(data / "evaluation.tsv")]}
    return manifest("round-quality", {"data": paths, "training": {"batchSize": batch, "seed": seed}})


@dataclass(frozen=True)
class Outcome:
    """Held-out AUC, mean batches of a round, and bytes of rounds relative to those of their batches."""

    auc: float
    length: float = 1.0
    bytes: float = 1.0


class Servers:
    """All rows and dense pieces in one store, pulled and pushed as workers do."""

    def __init__(self, job: TrainingJob, replica: ModelReplica) -> None:
        initial = flat_copy(build_model(job.spec.model, resolve_model(job.spec), job.spec.training.seed)).numpy()
        dense = job.spec.optimizers.dense
        self._store = TableStore(replica.tables, DensePieces.of(initial, dense))
        self.singles = KeyPlanner(even_table(1), replica.tables, len(initial))
        self.rounds = KeyPlanner(even_table(1), replica.tables, len(initial), dense.type)

    def pull(self, plan: KeyPlan, *, state: bool = False) -> Pulled:
        """Returns rows and dense pieces, on request with their state."""
        answer = np.empty(self._store.values_per_request(plan.counts[0], state=state), np.float32)
        self._store.pull(plan.counts[0], plan.keys[0], answer, state=state)
        return Pulled(answer[: plan.values].copy(), answer[plan.values :].copy(), 1)

    def push(self, plan: KeyPlan, rows: NDArray[np.float32], dense: NDArray[np.float32], changes_of: int = 0) -> None:
        """Pushes gradients, or the changes of `changes_of` batches."""
        self._store.push(plan.counts[0], plan.keys[0], np.concatenate([rows, dense]), changes_of=changes_of)


class Emulation:
    """A job of several workers."""

    def __init__(self, job: TrainingJob, batches: list[Batch], warmup: int) -> None:
        self._job = job
        self._batches = batches
        self._replica = ModelReplica(job)
        self._servers = Servers(job, self._replica)
        self._bound = StalenessBound(job.spec.training.max_staleness, warmup)
        self._leased = 0
        self._lengths: list[int] = []
        self._round_bytes = self._single_bytes = 0

    def in_order(self) -> None:
        """Trains batch by batch, so that nothing is stale."""
        for batch in self._batches:
            plan = self._servers.singles.plan(batch.ids, batch.lists)
            self._push_gradients(batch, plan, self._servers.pull(plan))

    def run(self, workers: int, *, rounds: bool) -> None:
        """Trains all batches. Raises RuntimeError if no worker can go on."""
        going = {index: self._rounds(index) if rounds else self._one_by_one(index) for index in range(workers)}
        clocks = {index: index / workers for index in going}
        refused: set[int] = set()
        while going:
            ready = going.keys() - refused
            if not ready:
                raise RuntimeError("the staleness bound admits nobody")
            index = min(ready, key=clocks.__getitem__)
            try:
                waits = next(going[index])
            except StopIteration:
                del going[index]
                self._bound.forget_session(index)
                waits = False
            if waits:
                refused.add(index)
                continue
            now = clocks[index]
            for other in refused & going.keys():
                clocks[other] = max(clocks[other], now)
            refused.clear()
            clocks[index] = now + 1

    def outcome(self, evaluation: list[Batch]) -> Outcome:
        """Returns the quality of the trained model."""
        predicted = []
        for batch in evaluation:
            plan = self._servers.singles.plan(batch.ids, batch.lists)
            predicted.append(self._replica.evaluate(batch, plan, self._servers.pull(plan)).probabilities)
        labels = np.concatenate([batch.labels for batch in evaluation])
        auc = float(roc_auc_score(labels, np.concatenate(predicted)))
        if not self._lengths:
            return Outcome(auc)
        return Outcome(auc, mean(self._lengths), self._round_bytes / self._single_bytes)

    def _leases(self) -> Iterator[list[Batch]]:
        while self._leased < len(self._batches):
            first, self._leased = self._leased, self._leased + LEASE
            yield self._batches[first : first + LEASE]

    def _one_by_one(self, index: int) -> Generator[bool]:
        """Runs a worker; yields False for each unit of time, and True if it has to wait for others."""
        pulled: list[tuple[Batch, Ticket, KeyPlan, Pulled]] = []
        for lease in self._leases():
            left = list(lease)
            while left or pulled:
                while left and len(pulled) < 2 and self._admits(ticket := Ticket(index, 0, left[0].number)):
                    batch = left.pop(0)
                    plan = self._servers.singles.plan(batch.ids, batch.lists)
                    pulled.append((batch, ticket, plan, self._servers.pull(plan)))
                if not pulled:
                    yield True
                    continue
                batch, ticket, plan, values = pulled.pop(0)
                yield False
                yield from self._pushing(ticket)
                self._push_gradients(batch, plan, values)
                self._bound.completed(ticket)

    def _rounds(self, index: int) -> Generator[bool]:
        """Runs a worker that trains in rounds; yields as `_one_by_one` does."""
        local = LocalRows(self._replica.tables, self._job.spec.optimizers.dense, self._replica.parameters)
        for lease in self._leases():
            place = 0
            while place < len(lease):
                length = 1 << (self._bound.round_limit(index).bit_length() - 1)
                batches = lease[place : place + length - lease[place].number % length]
                place += len(batches)
                ticket = Ticket(index, 0, batches[0].number, len(batches), is_round=True)
                while not self._admits(ticket):
                    yield True
                one = Round.of(batches)
                plan = self._servers.rounds.plan(one.ids, one.lists)
                values = self._servers.pull(plan, state=True)
                local.begin(plan, values.rows, values.dense)
                for batch, (first, stop) in zip(batches, pairwise(one.edges), strict=True):
                    yield False
                    self._replica.train_locally(batch, plan.of_records(first, stop), local)
                changes = local.changes()
                self._lengths.append(len(batches))
                self._round_bytes += plan.exchange_bytes
                self._single_bytes += local.single_bytes
                yield from self._pushing(ticket)
                self._servers.push(plan, changes.rows, changes.dense, len(batches))
                self._bound.completed(ticket)

    def _admits(self, ticket: Ticket) -> bool:
        """Whether the bound admits a pull; records the pull, or that the worker waits for it."""
        if not self._bound.may_pull(ticket):
            self._bound.waits(ticket, 0)
            return False
        self._bound.pulled(ticket, 0)
        return True

    def _pushing(self, ticket: Ticket) -> Generator[bool]:
        while not self._bound.may_push(ticket):
            yield True
        self._bound.pushed(ticket, 0)

    def _push_gradients(self, batch: Batch, plan: KeyPlan, values: Pulled) -> None:
        gradients, _ = self._replica.train(batch, plan, values)
        self._servers.push(plan, gradients.rows, gradients.dense)


def main() -> None:
    """Emulates and reports."""
    parser = arguments(__doc__, plot=False)
    parser.add_argument("--samples", type=int, default=600_000)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--warmups", type=int, nargs="+", default=WARMUPS, help="stalenessWarmup of either side")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = EVALUATION_ROWS + (options.samples // 4 if options.quick else options.samples)
    lost: dict[int, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        synthesise(data, rows, "--evaluation-fraction", str(EVALUATION_ROWS / rows))
        for seed in range(options.seeds):
            parsed = parse_manifest(job(data, options.batch_size, seed))
            source = indexed(parsed)
            training = list(source.batches(Split.TRAINING, 0, 0, source.records(Split.TRAINING)))
            evaluation = list(source.batches(Split.EVALUATION, 0, 0, source.records(Split.EVALUATION)))
            emulation = Emulation(parsed, training, 0)
            emulation.in_order()
            say(f"seed {seed}: in order, AUC {emulation.outcome(evaluation).auc:.5f}")
            for warmup in options.warmups:
                found = []
                for rounds in (False, True):
                    emulation = Emulation(parsed, training, warmup)
                    emulation.run(options.workers, rounds=rounds)
                    found.append(emulation.outcome(evaluation))
                single, ours = found
                lost.setdefault(warmup, []).append(single.auc - ours.auc)
                say(
                    f"seed {seed}, stalenessWarmup {warmup}: one by one {single.auc:.5f}, in rounds {ours.auc:.5f}, "
                    f"of {ours.length:.1f} batches, {ours.bytes:.2f}x of the bytes"
                )
    ratios = {
        f"AUC lost / {ALLOWED_AUC:g}: {options.workers} workers, stalenessWarmup {warmup}": Ratio(
            [(mean(differences), ALLOWED_AUC)], 1.0, "max"
        )
        for warmup, differences in lost.items()
    }
    report("round_quality", ratios, options.output)


if __name__ == "__main__":
    main()
