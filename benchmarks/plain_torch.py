"""The reference: PyTorch alone trains the same model on the same rows, in one process."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from emberscale_api.dataset import Block, DataFile, Dataset, Split
from emberscale_api.job import InitializerType, TrainingJob, resolve_model
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.formats import record_format
from emberscale_trainer.data.source import BatchSource
from emberscale_trainer.models.architectures import build_model
from reference_dlrm import RowWiseAdagrad


@dataclass(frozen=True)
class HeldOut:
    """Quality on the evaluation data."""

    auc: float
    logloss: float


class PlainModel(nn.Module):
    """The job's dense model, of any architecture, over columns of single ids.

    Tables of one dimension are end to end in one `nn.Embedding`, so that one call serves them all.
    """

    def __init__(self, job: TrainingJob, firsts: NDArray[np.int64]) -> None:
        """Builds the model; the rows of column i are [firsts[i], firsts[i + 1])."""
        super().__init__()
        resolved = resolve_model(job.spec)
        self.dense_model = build_model(job.spec.model, resolved, job.spec.training.seed)
        self.embeddings = nn.ModuleList()
        self._columns: list[list[int]] = []
        for dimension, tables in groupby(resolved.tables, key=attrgetter("dimension")):
            group = list(tables)
            embedding = nn.Embedding(int(firsts[-1]), dimension, sparse=True)
            for table in group:
                scale = 0.0 if table.initializer.type is InitializerType.ZEROS else table.initializer.scale
                nn.init.uniform_(embedding.weight[firsts[table.column] : firsts[table.column + 1]], -scale, scale)
            self.embeddings.append(embedding)
            self._columns.append([table.column for table in group])

    def forward(self, dense: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Returns logits float32 [B] from dense features and row numbers int64 [B, columns]."""
        vectors = [
            embedding(rows[:, columns]).flatten(1)
            for columns, embedding in zip(self._columns, self.embeddings, strict=True)
        ]
        logits: torch.Tensor = self.dense_model(dense, torch.cat(vectors, dim=1))
        return logits


@dataclass(frozen=True)
class NumberedBatch:
    """Labels float32 [B], dense features float32 [B, features], and row numbers int64 [B, columns]."""

    labels: torch.Tensor
    dense: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class NumberedData:
    """A job's batches of all epochs, in its order, and the rows of its tables.

    `firsts` is int64 [columns + 1]: the first row of each column, and the number of all rows.
    """

    training: list[NumberedBatch]
    evaluation: list[NumberedBatch]
    firsts: NDArray[np.int64]

    @property
    def held_out_labels(self) -> NDArray[np.float32]:
        """The labels of all batches of the evaluation."""
        labels: NDArray[np.float32] = torch.cat([batch.labels for batch in self.evaluation]).numpy()
        return labels


def numbered(job: TrainingJob, most_rows: int = 0) -> NumberedData:
    """Reads a job's data. With `most_rows`, a table's ids share that many rows, as with DLRM's `--max-ind-range`."""
    source = indexed(job)
    training = _batches(source, Split.TRAINING, job.spec.training.epochs)
    evaluation = _batches(source, Split.EVALUATION, 1)
    ids = np.concatenate([ids for _, _, ids in training + evaluation])
    numbers, firsts = number_rows(ids % most_rows if most_rows else ids)
    rows = torch.split(torch.from_numpy(numbers), [len(ids) for _, _, ids in training + evaluation])
    batches = [
        NumberedBatch(torch.from_numpy(labels), torch.from_numpy(dense), of_batch)
        for (labels, dense, _), of_batch in zip(training + evaluation, rows, strict=True)
    ]
    return NumberedData(batches[: len(training)], batches[len(training) :], firsts)


class PlainTraining:
    """A model under training. Its rows are `tables.weights` and `tables.accumulators`, one pair per dimension."""

    def __init__(self, job: TrainingJob, firsts: NDArray[np.int64]) -> None:
        torch.manual_seed(job.spec.training.seed)
        self.model = PlainModel(job, firsts)
        sparse, dense = job.spec.optimizers.sparse, job.spec.optimizers.dense
        self.tables = RowWiseAdagrad(
            [embedding.weight for embedding in self.model.embeddings],  # type: ignore[misc]  # an Embedding's weight
            sparse.learning_rate,
            sparse.epsilon,
        )
        self._mlps = torch.optim.Adagrad(self.model.dense_model.parameters(), lr=dense.learning_rate, eps=dense.epsilon)

    def step(self, batch: NumberedBatch) -> None:
        """Trains on a batch."""
        logits = self.model(batch.dense, batch.rows)
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for optimizer in (self.tables, self._mlps):
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def predict(self, batches: Iterable[NumberedBatch]) -> NDArray[np.float32]:
        """Returns the probability of label 1 of each record of these batches."""
        probabilities = [torch.sigmoid(self.model(batch.dense, batch.rows)) for batch in batches]
        return torch.cat(probabilities).numpy()


def train(job: TrainingJob) -> HeldOut:
    """Trains on the job's rows in the job's order, and evaluates."""
    data = numbered(job)
    probabilities = predictions(job, data).astype(np.float64)
    labels = data.held_out_labels
    return HeldOut(roc_auc_score(labels, probabilities), log_loss(labels, probabilities))


def predictions(
    job: TrainingJob, data: NumberedData, before: Callable[[int, PlainTraining], None] = lambda number, training: None
) -> NDArray[np.float32]:
    """Trains on the job's rows in the job's order; returns the probability of label 1 of each held-out record.

    `before` is called before each batch, with its number.
    """
    training = PlainTraining(job, data.firsts)
    for number, batch in enumerate(data.training):
        before(number, training)
        training.step(batch)
    return training.predict(data.evaluation)


Batches = list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]]


def indexed(job: TrainingJob) -> BatchSource:
    """Returns the job's data, indexed as by its workers."""
    data, training = job.spec.data, job.spec.training
    reader = record_format(data)

    def of(paths: tuple[str, ...]) -> tuple[tuple[DataFile, ...], tuple[Block, ...]]:
        files = expand(paths)
        blocks = tuple(
            block
            for number, file in enumerate(files)
            for block in reader.index_file(file, number, data.shuffling.block_records)
        )
        return tuple(files), blocks

    training_files, training_blocks = of(data.train)
    evaluation_files, evaluation_blocks = of(data.evaluation)
    dataset = Dataset(
        training_files=training_files,
        training_blocks=training_blocks,
        evaluation_files=evaluation_files,
        evaluation_blocks=evaluation_blocks,
    )
    return BatchSource(dataset, reader, training.batch_size, training.seed, data.shuffling.enabled)


def number_rows(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Numbers the rows of `ids`, int64 [records, columns], in one table of all columns end to end.

    Returns the numbers in the shape of `ids`, and int64 [columns + 1]: the first row of each column, and the number of
    all rows.
    """
    numbers, firsts = np.empty_like(ids), np.zeros(ids.shape[1] + 1, np.int64)
    for column in range(ids.shape[1]):
        distinct, row_of = np.unique(ids[:, column], return_inverse=True)
        numbers[:, column] = firsts[column] + row_of
        firsts[column + 1] = firsts[column] + len(distinct)
    return numbers, firsts


def _batches(source: BatchSource, split: Split, epochs: int) -> Batches:
    return [
        (batch.labels, batch.dense, batch.ids)
        for epoch in range(epochs)
        for batch in source.batches(split, epoch, 0, source.records(split))
    ]
