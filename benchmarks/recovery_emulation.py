"""Partial recovery emulated in one process, as in section 5.1 of CPR: failures return rows to their last save.

Plain PyTorch trains a model. Its rows belong to emulated servers at random. Rows are saved at a fixed interval of
batches; a failure loads the saved rows of the servers that it takes. Dense parameters are never lost: in the paper,
each trainer has a copy of them.

With a priority, saves are 1 / SHARE times as frequent, but each has only the SHARE of the rows with the highest
priority (section 4.2): the bytes written stay about the same, and saves of often trained rows are rarely old. As in the
paper (section 5.1), this is for the largest tables, which have 99% of the rows; each save has all rows of the others.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray

from drawn_labels import DrawnLabels
from emberscale_api.job import TrainingJob
from plain_torch import NumberedData, PlainTraining, predictions

SHARE = 0.125
"""r of the paper: the part of the rows in a prioritised save, and the part of the interval between two of them."""

PRIORITISED = 0.99
"""The largest tables with this part of all rows have a priority. In the paper these are 7 of 26."""

SAMPLED_EVERY = 2
"""SSU looks at one sample in this many."""


class Priority(StrEnum):
    """The rows that a save takes first."""

    NONE = "None"
    MFU = "MFU"
    """The rows with the most accesses since their last save, by one counter per row."""
    SSU = "SSU"
    """The rows that some of the samples accessed, in a list of as many rows as a save takes."""
    SCAR = "SCAR"
    """The rows with the largest change since their last save, by the L2 norm: the reference, which needs a copy."""


@dataclass(frozen=True)
class Failure:
    """The loss of emulated servers, by index, before a batch."""

    batch: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A run: the number of servers, the batches between saves (T_save), the failures, and the priority."""

    servers: int
    interval: float
    failures: tuple[Failure, ...] = ()
    priority: Priority = Priority.NONE


@dataclass(frozen=True)
class Outcome:
    """The expected held-out AUC of a run, its portion of lost samples, and the mean number of saves of a row.

    `printed_pls` is that of equation 3 as the paper prints it.
    """

    auc: float
    pls: float
    printed_pls: float
    saves: float


def lost_samples(plan: Plan, batches: int, *, as_printed: bool = False) -> float:
    """Returns the PLS of a run: the progress of lost rows since the last save or their last loss, whichever is later.

    A job counts in the same way, since a server cannot lose the same progress twice. Equation 3 as printed counts from
    the last save alone, and so counts the progress again at each loss between two saves (`as_printed`). A priority
    changes neither.
    """
    gone_back = [0] * plan.servers
    lost = 0
    for failure in sorted(plan.failures, key=lambda one: one.batch):
        saved = math.ceil(failure.batch // plan.interval * plan.interval - 1e-9)  # a save comes before a batch
        for server in failure.servers:
            lost += failure.batch - (saved if as_printed else max(saved, gone_back[server]))
            gone_back[server] = failure.batch
    return lost / (batches * plan.servers)


def prioritised_columns(firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the columns of the fewest tables with PRIORITISED of all rows; `firsts` as in NumberedData."""
    sizes = np.diff(firsts)
    largest = np.argsort(-sizes, kind="stable")
    needed = np.searchsorted(np.cumsum(sizes[largest]), PRIORITISED * firsts[-1]) + 1
    return np.sort(largest[:needed])


class SavedRows:
    """The last save of each row, and the choice of rows for the next save."""

    def __init__(self, plan: Plan, data: NumberedData, training: PlainTraining, seed: int) -> None:
        rows = int(data.firsts[-1])
        self._plan = plan
        self._training = training
        self._random = np.random.default_rng(seed)
        self._server_of = torch.from_numpy(self._random.integers(0, plan.servers, rows))
        self._columns = prioritised_columns(data.firsts)
        of_columns = [np.arange(*data.firsts[column : column + 2]) for column in range(len(data.firsts) - 1)]
        self._ranked = np.concatenate([of_columns[column] for column in self._columns])
        self._always = np.setdiff1d(np.arange(rows), self._ranked)
        self._taken = int(SHARE * len(self._ranked))
        self._counters = np.zeros(rows, np.uint32)
        self._sampled = np.empty(0, np.int64)
        self._saved = [part.detach().clone() for part in self._parts()]
        self._next_save = self._between_saves
        self.rows_saved = 0

    @property
    def _between_saves(self) -> float:
        return self._plan.interval * (1.0 if self._plan.priority is Priority.NONE else SHARE)

    def _parts(self) -> list[torch.Tensor]:
        """Returns weights and optimizer state, with rows along the first dimension."""
        return [*self._training.tables.weights, *self._training.tables.accumulators]

    def trained(self, rows: NDArray[np.int64]) -> None:
        """Records the rows, int64 [B, columns], of the last trained batch."""
        match self._plan.priority:
            case Priority.MFU:
                distinct, counts = np.unique(rows, return_counts=True)
                self._counters[distinct] += counts.astype(np.uint32)
            case Priority.SSU:
                listed = np.union1d(self._sampled, rows[::SAMPLED_EVERY, self._columns])
                kept = min(len(listed), self._taken)
                self._sampled = self._random.choice(listed, kept, replace=False) if kept < len(listed) else listed

    @torch.no_grad()
    def save_if_due(self, batch: int) -> None:
        """Saves rows before this batch if a save is due."""
        if batch < self._next_save:
            return
        self._next_save += self._between_saves
        rows = torch.from_numpy(self._next_rows())
        for saved, part in zip(self._saved, self._parts(), strict=True):
            saved[rows] = part[rows]
        self.rows_saved += len(rows)

    def _next_rows(self) -> NDArray[np.int64]:
        """Returns the rows of this save, and resets their priority for the next."""
        if self._plan.priority is Priority.NONE:
            return np.arange(len(self._counters))
        if self._plan.priority is Priority.SSU:
            first, self._sampled = self._sampled, np.empty(0, np.int64)
        else:
            order = (self._counters if self._plan.priority is Priority.MFU else self._changes())[self._ranked]
            first = self._ranked[np.argpartition(order, -self._taken)[-self._taken :]]
            self._counters[first] = 0
        return np.concatenate([first, self._always])

    def _changes(self) -> NDArray[np.float32]:
        """Returns the distance of each row's weights from the saved ones, as L2 norms."""
        weights = self._training.tables.weights
        squares = sum((now - saved).square().sum(1) for now, saved in zip(weights, self._saved, strict=False))
        assert isinstance(squares, torch.Tensor), "a model has a table"
        changes: NDArray[np.float32] = squares.detach().sqrt().numpy()
        return changes

    @torch.no_grad()
    def lose(self, servers: Iterable[int]) -> None:
        """Returns the rows of these servers to their last save."""
        lost = torch.isin(self._server_of, torch.tensor(sorted(servers)))
        for saved, part in zip(self._saved, self._parts(), strict=True):
            part[lost] = saved[lost]


def emulate(job: TrainingJob, data: NumberedData, plan: Plan, drawn: DrawnLabels) -> Outcome:
    """Trains a model with servers that fail as planned."""
    found: list[SavedRows] = []

    def before(number: int, training: PlainTraining) -> None:
        if not found:
            found.append(SavedRows(plan, data, training, job.spec.training.seed))
        [rows] = found
        if number:
            rows.trained(data.training[number - 1].rows.numpy())
            rows.save_if_due(number)
        for failure in plan.failures:
            if failure.batch == number:
                rows.lose(failure.servers)

    auc = drawn.auc(predictions(job, data, before))
    batches, saves = len(data.training), found[0].rows_saved / int(data.firsts[-1])
    return Outcome(auc, lost_samples(plan, batches), lost_samples(plan, batches, as_printed=True), saves)
