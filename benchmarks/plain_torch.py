"""The reference: the same model, trained on the same rows by PyTorch alone, in one process."""

from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from emberscale_api.job import InitializerType, TrainingJob, resolve_model
from emberscale_api.rpc.master_pb2 import EVALUATION_DATA, TRAINING_DATA, Block, DataFile, Dataset
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.formats import record_format
from emberscale_trainer.data.source import BatchSource
from emberscale_trainer.models import build_model
from reference_dlrm import RowWiseAdagrad


@dataclass(frozen=True)
class HeldOut:
    """Quality on the evaluation data."""

    auc: float
    logloss: float


class PlainModel(nn.Module):
    """The job's dense model, of any architecture, over columns of one id a record.

    Tables of one dimension lie end to end in one `nn.Embedding`, `rows` rows together: one call instead of one a table.
    """

    def __init__(self, job: TrainingJob, firsts: NDArray[np.int64]) -> None:
        """Of column i the rows are [firsts[i], firsts[i + 1])."""
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
        """Logits float32 [B] from dense features and row numbers int64 [B, columns]."""
        vectors = [
            embedding(rows[:, columns]).flatten(1)
            for columns, embedding in zip(self._columns, self.embeddings, strict=True)
        ]
        logits: torch.Tensor = self.dense_model(dense, torch.cat(vectors, dim=1))
        return logits


def train(job: TrainingJob) -> HeldOut:
    """Trains on the job's rows in the job's order, and evaluates."""
    spec = job.spec
    source = indexed(job)
    training = _batches(source, TRAINING_DATA, spec.training.epochs)
    evaluation = _batches(source, EVALUATION_DATA, 1)
    numbers, firsts = number_rows(np.concatenate([ids for _, _, ids in training + evaluation]))
    rows = torch.split(torch.from_numpy(numbers), [len(ids) for _, _, ids in training + evaluation])
    torch.manual_seed(spec.training.seed)
    model = PlainModel(job, firsts)
    sparse, dense = spec.optimizers.sparse, spec.optimizers.dense
    tables = RowWiseAdagrad(
        [embedding.weight for embedding in model.embeddings],  # type: ignore[misc]  # an Embedding's weight
        sparse.learning_rate,
        sparse.epsilon,
    )
    mlps = torch.optim.Adagrad(model.dense_model.parameters(), lr=dense.learning_rate, eps=dense.epsilon)
    for (labels, features, _), numbered in zip(training, rows[: len(training)], strict=True):
        logits = model(torch.from_numpy(features), numbered)
        nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for optimizer in (tables, mlps):
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        predictions = [
            torch.sigmoid(model(torch.from_numpy(features), numbered))
            for (_, features, _), numbered in zip(evaluation, rows[len(training) :], strict=True)
        ]
    labels = np.concatenate([labels for labels, _, _ in evaluation])
    probabilities = torch.cat(predictions).numpy().astype(np.float64)
    return HeldOut(roc_auc_score(labels, probabilities), log_loss(labels, probabilities))


Batches = list[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]]


def indexed(job: TrainingJob) -> BatchSource:
    """The job's data, indexed as its workers would."""
    data, training = job.spec.data, job.spec.training
    reader = record_format(data)

    def of(paths: tuple[str, ...]) -> tuple[list[DataFile], list[Block]]:
        files = expand(paths)
        blocks = [
            block
            for number, file in enumerate(files)
            for block in reader.index_file(file, number, data.shuffling.block_records)
        ]
        return files, blocks

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
    """Row numbers, of the shape of `ids`, int64 [records, columns], in one table of all columns end to end.

    And int64 [columns + 1]: where the rows of each column begin, and how many there are in all.
    """
    numbers, firsts = np.empty_like(ids), np.zeros(ids.shape[1] + 1, np.int64)
    for column in range(ids.shape[1]):
        distinct, row_of = np.unique(ids[:, column], return_inverse=True)
        numbers[:, column] = firsts[column] + row_of
        firsts[column + 1] = firsts[column] + len(distinct)
    return numbers, firsts


def _batches(source: BatchSource, split: int, epochs: int) -> Batches:
    return [
        (batch.labels, batch.dense, batch.ids)
        for epoch in range(epochs)
        for batch in source.batches(split, epoch, 0, source.records(split))  # type: ignore[arg-type]  # a proto enum
    ]
