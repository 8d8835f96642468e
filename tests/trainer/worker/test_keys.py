"""From ids to the keys asked of each server, and from the answers back to the ids."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, Pooling, TableSpec
from emberscale_api.routing import PsAddress, RoutingTable, bucket_of, buckets_of, spread_evenly
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.worker import keys
from emberscale_trainer.worker.keys import KeyPlanner
from emberscale_trainer.worker.rows import EmbeddingLayout

any_id = st.one_of(st.integers(-1, 5), st.integers(-(2**63), 2**63 - 1))
few_ids = st.integers(0, 12).flatmap(lambda batch: arrays(np.int64, (batch, 2), elements=any_id))


def table(number: int, column: int, dimension: int, pooling: Pooling | None = None) -> TableSpec:
    return TableSpec(number, f"t{number}", column, dimension, OptimizerSpec(), InitializerSpec(), 0, pooling)


# two columns of one id, one of lists, and the same once more with dimension 1, as a wide part has them
TABLES = (
    table(0, 0, 1),
    table(1, 1, 4),
    table(2, 2, 3, Pooling.MEAN),
    table(3, 0, 1),
    table(4, 1, 1),
    table(5, 2, 1, Pooling.SUM),
)


def routing(servers: int) -> RoutingTable:
    return RoutingTable(
        1, tuple(PsAddress(index, f"i{index}", "", "") for index in range(servers)), spread_evenly(servers)
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[NDArray[np.int64], IdLists]:
    ids = draw(few_ids)
    lists = draw(st.lists(st.lists(any_id, max_size=4), min_size=len(ids), max_size=len(ids)))
    values = np.array([key for one in lists for key in one], dtype=np.int64)
    return ids, IdLists(values, np.cumsum([0, *(len(one) for one in lists)], dtype=np.int64))


@given(batches(), st.integers(1, 4))
def test_each_key_is_asked_once_of_its_owner_and_every_id_finds_its_row(
    batch: tuple[NDArray[np.int64], IdLists], servers: int
) -> None:
    ids, lists = batch
    where = routing(servers)
    plan = KeyPlanner(where, TABLES).plan(ids, [lists])

    asked: dict[tuple[int, int], int] = {}
    position = 0
    for server in range(servers):
        assert position == plan.value_edges[server]
        edge = 0
        for number, count in enumerate(plan.counts[server].tolist()):
            for key in plan.keys[server][edge : edge + count].tolist():
                assert where.owners[bucket_of(key)] == server
                assert (number, key) not in asked
                asked[number, key] = position
                position += TABLES[number].dimension
            edge += count
        assert edge == len(plan.keys[server])
    assert position == plan.values

    columns = [*ids.T.tolist(), lists.values.tolist()]
    assert set(asked) == {(spec.number, key) for spec in TABLES for key in columns[spec.column]}
    singles = [spec for spec in TABLES if spec.pooling is None]
    for place, spec in enumerate(singles):
        assert plan.offsets[:, place].tolist() == [asked[spec.number, key] for key in columns[spec.column]]
    pooled = [spec for spec in TABLES if spec.pooling is not None]
    for spec, of_table in zip(pooled, plan.lists, strict=True):
        assert of_table.rows.tolist() == [asked[spec.number, key] for key in columns[spec.column]]
        assert of_table.edges is lists.offsets


@given(batches(), st.integers(1, 3))
def test_gather_and_scatter_are_each_others_transpose(batch: tuple[NDArray[np.int64], IdLists], servers: int) -> None:
    ids, lists = batch
    plan = KeyPlanner(routing(servers), TABLES).plan(ids, [lists])
    layout = EmbeddingLayout(TABLES)
    generator = np.random.default_rng(0)
    rows = generator.normal(size=plan.values).astype(np.float32)
    gradients = generator.normal(size=(len(ids), layout.width)).astype(np.float32)
    embeddings = layout.gather(rows, plan)
    scattered = layout.scatter(gradients, plan)
    np.testing.assert_allclose(np.vdot(embeddings, gradients), np.vdot(rows, scattered), rtol=1e-3, atol=1e-3)
    for record in range(len(ids)):
        start = int(plan.offsets[record, 1])
        np.testing.assert_array_equal(embeddings[record, 1:5], rows[start : start + 4])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50))
def test_buckets_of_many_keys_are_those_of_each(some: list[int]) -> None:
    assert buckets_of(np.array(some, dtype=np.int64)).tolist() == [bucket_of(key) for key in some]


def test_a_batch_too_large_to_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_MAX_VALUES", 7)
    with pytest.raises(ValueError, match=r"8 floats.*batchSize"):
        KeyPlanner(routing(1), [table(0, 0, 4)]).plan(np.array([[1], [2]]))
