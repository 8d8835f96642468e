"""Partial recovery emulated in one process, as in section 5.1 of CPR: failures take rows back to what was saved last.

A model is trained by plain PyTorch. Its rows belong to emulated servers at random. Every so many batches the rows are
saved; a failure loads what was saved for the rows of the servers that it takes. Dense parameters are never lost: in the
paper, trainers hold them, each a copy.

With a priority, rows are saved 1 / SHARE times as often, but at each save only the SHARE of them that comes first
(section 4.2): the bytes written stay about the same, and what many samples have changed is rarely old. As in the paper
(section 5.1), this is for the largest tables, which have 99% of the rows; each save has all rows of the others.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray

from emberscale_api.job import TrainingJob
from plain_torch import NumberedData, PlainTraining, train

SHARE = 0.125
"""r of the paper: the part of the rows in a prioritised save, and of the interval between two of them."""

PRIORITISED = 0.99
"""The largest tables that have so many of the rows together get a priority. In the paper these are 7 of 26."""

SAMPLED_EVERY = 2
"""Of so many samples, SSU looks at one."""


class Priority(StrEnum):
    """Which rows a save takes first."""

    NONE = "None"
    MFU = "MFU"
    """Those accessed most since they were saved last, by a counter a row."""
    SSU = "SSU"
    """Those that a sample of the samples accessed, of which a list keeps as many as a save takes."""
    SCAR = "SCAR"
    """Those that changed most since they were saved last, by the L2 norm: the reference, which needs a second copy."""


@dataclass(frozen=True)
class Failure:
    """The loss of emulated servers, by index, ahead of a batch."""

    batch: int
    servers: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One run: how many servers there are, the batches between saves (T_save), the priority, and what fails."""

    servers: int
    interval: float
    failures: tuple[Failure, ...] = ()
    priority: Priority = Priority.NONE


@dataclass(frozen=True)
class Outcome:
    """The held-out AUC of a run, its portion of lost samples, and how often each row was saved, on average.

    `printed_pls` is that of equation 3 as the paper prints it.
    """

    auc: float
    pls: float
    printed_pls: float
    saves: float


def lost_samples(plan: Plan, batches: int, *, as_printed: bool = False) -> float:
    """The PLS of a run: the progress of lost rows since the last save or their last loss, whichever is later.

    So it is counted in a job, too: what a server has lost already it does not lose again. Equation 3 as printed counts
    from the last save alone, and so what is lost between two saves as often as the server is (`as_printed`). A priority
    changes neither.
    """
    gone_back = [0] * plan.servers
    lost = 0
    for failure in sorted(plan.failures, key=lambda one: one.batch):
        saved = math.ceil(failure.batch // plan.interval * plan.interval - 1e-9)  # a save is ahead of a batch
        for server in failure.servers:
            lost += failure.batch - (saved if as_printed else max(saved, gone_back[server]))
            gone_back[server] = failure.batch
    return lost / (batches * plan.servers)


def prioritised_columns(firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The fewest tables that have PRIORITISED of all rows, by column; `firsts` as in NumberedData."""
    sizes = np.diff(firsts)
    largest = np.argsort(-sizes, kind="stable")
    needed = np.searchsorted(np.cumsum(sizes[largest]), PRIORITISED * firsts[-1]) + 1
    return np.sort(largest[:needed])


class SavedRows:
    """What was saved of each row, and which rows the next save takes."""

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
        """Weights and optimizer state, whose first dimension counts rows."""
        return [*self._training.tables.weights, *self._training.tables.accumulators]

    def trained(self, rows: NDArray[np.int64]) -> None:
        """Notes the rows, int64 [B, columns], of a batch that was just trained."""
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
        """Saves ahead of a batch."""
        if batch < self._next_save:
            return
        self._next_save += self._between_saves
        rows = torch.from_numpy(self._next_rows())
        for saved, part in zip(self._saved, self._parts(), strict=True):
            saved[rows] = part[rows]
        self.rows_saved += len(rows)

    def _next_rows(self) -> NDArray[np.int64]:
        """The rows of this save, which begin anew with what decides about the next."""
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
        """How far the weights of each row are from those that were saved, as L2 norms."""
        weights = self._training.tables.weights
        squares = sum((now - saved).square().sum(1) for now, saved in zip(weights, self._saved, strict=False))
        assert isinstance(squares, torch.Tensor), "a model has a table"
        changes: NDArray[np.float32] = squares.detach().sqrt().numpy()
        return changes

    @torch.no_grad()
    def lose(self, servers: Iterable[int]) -> None:
        """The rows of these servers go back to what was saved."""
        lost = torch.isin(self._server_of, torch.tensor(sorted(servers)))
        for saved, part in zip(self._saved, self._parts(), strict=True):
            part[lost] = saved[lost]


def emulate(job: TrainingJob, data: NumberedData, plan: Plan) -> Outcome:
    """Trains a model whose servers fail as planned."""
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

    auc = train(job, data, before).auc
    batches, saves = len(data.training), found[0].rows_saved / int(data.firsts[-1])
    return Outcome(auc, lost_samples(plan, batches), lost_samples(plan, batches, as_printed=True), saves)
