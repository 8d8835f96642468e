"""The exported program computes what a worker's evaluation does, for trained and untrained ids."""

from typing import Any

import numpy as np
import pytest
import torch

from emberscale._serving.program import InitialWeights, ServingModel, exported_program
from emberscale_api.job import TrainingJob, resolve_model
from emberscale_api.job.model import InitializerType
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.data.source import Batch
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.table import TableStore
from emberscale_trainer.worker.compute import ModelReplica
from emberscale_trainer.worker.keys import KeyPlanner
from emberscale_trainer.worker.servers import Pulled
from training_jobs import training_job

ROUTING = RoutingTable(1, 1, (PsAddress(0, "a", "", ""),), (0,) * BUCKETS, (0,) * DENSE_PIECES)
SAMPLES = 40


def make_job(model: dict[str, Any], lists: bool = False) -> TrainingJob:
    columns: dict[str, Any] = {"label": "y", "dense": ["a", "b"], "categorical": ["C1", "C2", "C3"]}
    if lists:
        columns["lists"] = [{"name": "seen"}, {"name": "bought"}]
    return training_job(
        data={"format": "Parquet", "train": ["x"], "columns": columns},
        model=model,
        optimizers={"sparse": {"type": "SGD", "learningRate": 1}},
    )


def make_batch(job: TrainingJob, random: np.random.Generator) -> Batch:
    lengths = random.integers(0, 4, SAMPLES)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    lists = tuple(IdLists(random.integers(-5, 60, offsets[-1]), offsets) for _ in resolve_model(job.spec).columns.lists)
    return Batch(
        number=0,
        start=0,
        stop=SAMPLES,
        labels=random.integers(0, 2, SAMPLES).astype(np.float32),
        dense=random.random((SAMPLES, 2), dtype=np.float32),
        ids=random.integers(-5, 60, (SAMPLES, 3)),
        lists=lists,
        bad_records=(),
        truncated_records=0,
    )


@pytest.mark.parametrize(
    ("model", "lists"),
    [
        ({"embeddings": {"dimension": 6}}, False),
        ({"embeddings": {"dimension": 6, "tables": {"seen": {"pooling": "Mean"}}}}, True),
        ({"architecture": "XDeepFM", "embeddings": {"dimension": 5}}, True),
        (
            {"architecture": "DCNv2", "embeddings": {"tables": {"C2": {"dimension": 3}, "seen": {"pooling": "Mean"}}}},
            True,
        ),
    ],
    ids=["DLRM", "DLRM with lists", "XDeepFM with lists", "DCNv2 with tables that differ"],
)
def test_the_program_predicts_what_a_worker_evaluates(model: dict[str, Any], lists: bool) -> None:
    job, random = make_job(model, lists), np.random.default_rng(0)
    resolved = resolve_model(job.spec)
    store = TableStore(resolved.tables)
    tables = {}
    trained = np.sort(random.choice(60, 25, replace=False)).astype(np.int64)
    for table in resolved.tables:
        counts = np.zeros(len(resolved.tables), np.uint32)
        counts[table.number] = len(trained)
        values = np.empty((len(trained), table.dimension), np.float32)
        store.push(counts, trained, random.standard_normal(values.size, np.float32))
        store.pull(counts, trained, values.reshape(-1))
        tables[table.name] = {"keys": torch.from_numpy(trained), "weights": torch.from_numpy(values)}
    batch = make_batch(job, random)
    dense_model = build_model(job.spec.model, resolved, 0)
    dense = flat_copy(dense_model).numpy()
    plan = KeyPlanner(ROUTING, resolved.tables, len(dense)).plan(batch.ids, batch.lists)
    rows = np.empty(plan.values, np.float32)
    store.pull(plan.counts[0][:-1], plan.keys[0][: plan.distinct], rows)
    replica = ModelReplica(job)
    evaluated = replica.evaluate(batch, plan, Pulled(rows, dense)).probabilities

    program = exported_program(ServingModel(dense_model, resolved), resolved).module()
    arguments: list[Any] = [torch.from_numpy(batch.dense), torch.from_numpy(batch.ids), tables]
    if lists:
        columns = zip(resolved.columns.lists, batch.lists, strict=True)
        arguments.append({c.name: (torch.from_numpy(i.values), torch.from_numpy(i.offsets)) for c, i in columns})
    predicted = torch.sigmoid(program(*arguments)).detach().numpy()
    assert np.ptp(evaluated) > 0.001
    assert np.abs(predicted - evaluated).max() < 1e-6
    for few in (1, 0):
        some: list[Any] = [arguments[0][:few], arguments[1][:few], tables]
        if lists:
            some.append({name: (ids[: ends[few]], ends[: few + 1]) for name, (ids, ends) in arguments[3].items()})
        assert np.abs(torch.sigmoid(program(*some)).detach().numpy() - evaluated[:few]).sum() < 1e-6


@pytest.mark.parametrize("kind", list(InitializerType))
def test_ids_begin_with_the_weights_that_a_server_gives_them(kind: InitializerType) -> None:
    job = make_job(
        {"architecture": "DCNv2", "embeddings": {"dimension": 7, "initializer": {"type": kind, "scale": 0.3}}}
    )
    tables = resolve_model(job.spec).tables
    keys = np.array([-(2**63), -1, 0, 1, 2**40, 2**63 - 1], np.int64)
    served = np.empty((len(tables), len(keys), 7), np.float32)
    counts = np.full(len(tables), len(keys), np.uint32)
    TableStore(tables).pull(counts, np.tile(keys, len(tables)), served.reshape(-1))
    ids = torch.from_numpy(keys)[:, None].expand(-1, len(tables))
    computed = InitialWeights(tables)(ids).transpose(0, 1).numpy()
    assert np.allclose(computed, served, rtol=1e-6, atol=1e-8)
    if kind is InitializerType.UNIFORM:
        assert np.array_equal(computed, served)
