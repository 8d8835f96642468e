"""From ids to the keys asked of each server, and from the answers back to the ids."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from emberscale_api.routing import PsAddress, RoutingTable, bucket_of, buckets_of, spread_evenly
from emberscale_trainer.worker.keys import KeyPlanner
from emberscale_trainer.worker.rows import gather, scatter

few_ids = st.integers(1, 12).flatmap(
    lambda batch: arrays(np.int64, (batch, 3), elements=st.one_of(st.integers(-1, 5), st.integers(-(2**63), 2**63 - 1)))
)


def routing(servers: int) -> RoutingTable:
    return RoutingTable(
        1, tuple(PsAddress(index, f"i{index}", "", "") for index in range(servers)), spread_evenly(servers)
    )


@given(few_ids, st.integers(1, 4))
def test_each_key_is_asked_once_of_its_owner_and_every_id_finds_its_row(ids: NDArray[np.int64], servers: int) -> None:
    table = routing(servers)
    dimensions = np.array([1, 4, 2], dtype=np.int64)
    plan = KeyPlanner(table, dimensions).plan(ids)

    asked: dict[tuple[int, int], int] = {}
    position = 0
    for server in range(servers):
        assert position == plan.value_edges[server]
        edge = 0
        for column, count in enumerate(plan.counts[server].tolist()):
            for key in plan.keys[server][edge : edge + count].tolist():
                assert table.owners[bucket_of(key)] == server
                assert (column, key) not in asked
                asked[column, key] = position
                position += int(dimensions[column])
            edge += count
        assert edge == len(plan.keys[server])
    assert position == plan.values
    assert set(asked) == {(column, key) for row in ids.tolist() for column, key in enumerate(row)}
    for row, keys in enumerate(ids.tolist()):
        for column, key in enumerate(keys):
            assert plan.offsets[row, column] == asked[column, key]


@given(few_ids, st.integers(1, 3))
def test_gather_and_scatter_are_each_others_transpose(ids: NDArray[np.int64], servers: int) -> None:
    dimensions = np.array([1, 4, 2], dtype=np.int64)
    plan = KeyPlanner(routing(servers), dimensions).plan(ids)
    generator = np.random.default_rng(0)
    rows = generator.normal(size=plan.values).astype(np.float32)
    gradients = generator.normal(size=(len(ids), 7)).astype(np.float32)
    embeddings = gather(rows, plan.offsets, dimensions)
    scattered = scatter(gradients, plan.offsets, dimensions, plan.values)
    np.testing.assert_allclose(np.vdot(embeddings, gradients), np.vdot(rows, scattered), rtol=1e-3, atol=1e-3)
    start = int(plan.offsets[0, 1])
    np.testing.assert_array_equal(embeddings[0, 1:5], rows[start : start + 4])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=50))
def test_buckets_of_many_keys_are_those_of_each(keys: list[int]) -> None:
    assert buckets_of(np.array(keys, dtype=np.int64)).tolist() == [bucket_of(key) for key in keys]
