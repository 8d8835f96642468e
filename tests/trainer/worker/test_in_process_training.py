"""Batch after batch, worker and servers learn what PyTorch alone learns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emberscale_api.job import TrainingJob
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.data.source import Batch
from in_process import InProcessTraining, PlainTraining
from training_jobs import training_job

IDS = 40
ADAGRAD = {"type": "Adagrad", "learningRate": 0.1}
COLUMNS = {
    "label": "clicked",
    "dense": ["price", "age"],
    "categorical": ["user", "item"],
    "lists": [{"name": "history"}, {"name": "tags"}],
}
TABLES = {
    "item": {"dimension": 3, "optimizer": {"type": "SGD", "learningRate": 0.5}, "initializer": {"type": "Zeros"}},
    "tags": {"dimension": 6, "pooling": "Mean", "initializer": {"type": "Normal", "scale": 0.3}},
}
ONE_DIMENSION = {name: {key: table[key] for key in table if key != "dimension"} for name, table in TABLES.items()}
OWN_MODEL = """
import torch
from torch import nn

class Pairs(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.dense = nn.Linear(len(features.dense), features.embeddings["user"])
        self.tags = nn.Linear(features.embeddings["tags"], 1)

    def forward(self, dense, embeddings):
        user = self.dense(dense) + embeddings["user"]
        return (user * embeddings["history"]).sum(dim=1) + self.tags(embeddings["tags"])[:, 0]
"""


def job(columns: dict[str, Any] = COLUMNS, **model: Any) -> TrainingJob:
    return training_job(
        data={"train": ["x"], "format": "Parquet", "columns": columns},
        model=model,
        optimizers={"sparse": ADAGRAD, "dense": ADAGRAD, "wide": {"type": "SGD", "learningRate": 0.3}},
    )


def batch(number: int, records: int) -> Batch:
    """Makes records whose label depends on the first id."""
    generator = np.random.default_rng(number)
    lists = []
    for _ in range(2):
        edges = np.concatenate([[0], np.cumsum(generator.integers(0, 5, records))])
        lists.append(IdLists(generator.integers(0, IDS, edges[-1]), edges))
    ids = generator.integers(0, IDS, (records, 2))
    return Batch(
        number=number,
        start=0,
        stop=records,
        labels=(ids[:, 0] % 3 == 0).astype(np.float32),
        dense=generator.normal(size=(records, 2)).astype(np.float32),
        ids=ids,
        lists=tuple(lists),
        bad_records=(),
        truncated_records=0,
    )


@pytest.mark.parametrize(
    "model",
    [
        {"architecture": "DLRM", "embeddings": {"dimension": 8, "tables": ONE_DIMENSION}},
        {"architecture": "WideAndDeep", "embeddings": {"dimension": 4, "tables": TABLES}},
        {"architecture": "XDeepFM", "embeddings": {"dimension": 5, "tables": ONE_DIMENSION}, "cinLayers": [4, 3]},
        {"architecture": "DCNv2", "embeddings": {"dimension": 4, "tables": TABLES}, "crossRank": 4},
        {"entrypoint": "pairs_of_mine:Pairs", "embeddings": {"dimension": 4, "tables": TABLES}},
    ],
    ids=lambda model: model.get("architecture", "entrypoint"),
)
def test_every_model_learns_what_plain_pytorch_learns(
    model: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pairs_of_mine.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    expect_the_same_of_both(job(**model), [batch(number, 64) for number in range(30)], batch(1000, 50))


def test_a_dlrm_without_lists_learns_what_plain_pytorch_learns() -> None:
    columns = {key: value for key, value in COLUMNS.items() if key != "lists"}
    without_lists = job(columns, embeddings={"dimension": 8})
    batches = [replace(batch(number, 60 + number), lists=()) for number in range(30)]
    expect_the_same_of_both(without_lists, batches, replace(batch(1000, 50), lists=()))


def expect_the_same_of_both(job: TrainingJob, batches: list[Batch], held_out: Batch) -> None:
    ours, plain = InProcessTraining(job), PlainTraining(job, IDS)
    losses = np.array([(ours.train(one), plain.train(one)) for one in batches])
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=2e-3, atol=1e-4)
    assert losses[-5:].mean() < losses[:5].mean()
    np.testing.assert_allclose(ours.predict(held_out), plain.predict(held_out), rtol=5e-3, atol=2e-3)


def test_a_batch_without_records_changes_nothing() -> None:
    training = InProcessTraining(job(architecture="DCNv2"))
    before = training.predict(batch(0, 9))
    training.train(batch(1, 0))
    np.testing.assert_array_equal(training.predict(batch(0, 9)), before)
