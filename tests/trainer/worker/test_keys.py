"""From ids to the keys in the request to each server, and from the answers back to the ids."""

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from buckets import bucket_of
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, Pooling, TableSpec
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable, piece_length
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.partition import buckets_of
from emberscale_trainer.worker import keys
from emberscale_trainer.worker.keys import KeyPlanner
from emberscale_trainer.worker.rows import EmbeddingLayout
from master_stand_in import spread_evenly

any_id = st.one_of(st.integers(-1, 5), st.integers(-(2**63), 2**63 - 1))
few_ids = st.integers(0, 12).flatmap(lambda batch: arrays(np.int64, (batch, 2), elements=any_id))


def table(number: int, column: int, dimension: int, pooling: Pooling | None = None) -> TableSpec:
    return TableSpec(number, f"t{number}", column, dimension, OptimizerSpec(), InitializerSpec(), 0, pooling)


# two columns of single ids and one of lists, and the same with dimension 1, as for a wide part
TABLES = (
    table(0, 0, 1),
    table(1, 1, 4),
    table(2, 2, 3, Pooling.MEAN),
    table(3, 0, 1),
    table(4, 1, 1),
    table(5, 2, 1, Pooling.SUM),
)


PARAMETERS = 1000
NO_LIST = IdLists(np.empty(0, np.int64), np.zeros(2, np.int64))


def routing(servers: int, version: int = 1, turned: int = 0) -> RoutingTable:
    """Gives servers contiguous shares; `turned` rotates the servers by that many places."""
    return RoutingTable(
        generation=1,
        version=version,
        servers=tuple(PsAddress(index, f"i{index}", "", "") for index in range(servers)),
        bucket_owners=tuple((owner + turned) % servers for owner in spread_evenly(BUCKETS, servers)),
        piece_owners=tuple((owner + turned) % servers for owner in spread_evenly(DENSE_PIECES, servers)),
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
    plan = KeyPlanner(where, TABLES, PARAMETERS).plan(ids, [lists])

    asked: dict[tuple[int, int], int] = {}
    position = 0
    for server in range(servers):
        assert position == plan.value_edges[server]
        edge = 0
        *of_rows, of_pieces = plan.counts[server].tolist()
        for number, count in enumerate(of_rows):
            for key in plan.keys[server][edge : edge + count].tolist():
                assert where.bucket_owners[bucket_of(key)] == server
                assert (number, key) not in asked
                asked[number, key] = position
                position += TABLES[number].dimension
            edge += count
        assert tuple(plan.keys[server][edge:].tolist()) == where.pieces_of(server)
        assert of_pieces == len(where.pieces_of(server))
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
    plan = KeyPlanner(routing(servers), TABLES, PARAMETERS).plan(ids, [lists])
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


@given(batches(), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_gradients_are_laid_out_anew_for_other_owners(
    batch: tuple[NDArray[np.int64], IdLists], before: int, after: int, turned: int
) -> None:
    ids, lists = batch
    old = KeyPlanner(routing(before), TABLES, PARAMETERS).plan(ids, [lists])
    new = KeyPlanner(routing(after, 2, turned), TABLES, PARAMETERS).plan(ids, [lists])
    layout = EmbeddingLayout(TABLES)
    gradients = np.random.default_rng(0).normal(size=(len(ids), layout.width)).astype(np.float32)
    np.testing.assert_array_equal(
        layout.relaid(layout.scatter(gradients, old), old, new), layout.scatter(gradients, new)
    )


@pytest.mark.parametrize("turned", [0, 1])
def test_pieces_that_lie_side_by_side_are_one_run(turned: int) -> None:
    plan = KeyPlanner(routing(3, turned=turned), TABLES, PARAMETERS).plan(np.zeros((1, 2), np.int64), [NO_LIST])
    assert [len(runs) for runs in plan.dense_runs] == [1, 1, 1]
    covered = sorted(run for runs in plan.dense_runs for run in runs)
    assert covered[0][0] == 0
    assert all(one[1] == other[0] for one, other in pairwise(covered))
    assert covered[-1][1] == DENSE_PIECES * piece_length(PARAMETERS) >= PARAMETERS


def test_scattered_pieces_are_as_many_runs_as_they_need() -> None:
    where = replace(routing(2), piece_owners=(0, 0, 1, 0, 1, 1) + (1,) * (DENSE_PIECES - 6))
    length = piece_length(PARAMETERS)
    plan = KeyPlanner(where, TABLES, PARAMETERS).plan(np.zeros((1, 2), np.int64), [NO_LIST])
    assert plan.dense_runs == (
        ((0, 2 * length), (3 * length, 4 * length)),
        ((2 * length, 3 * length), (4 * length, DENSE_PIECES * length)),
    )


@pytest.mark.parametrize(("limit", "value"), [("_MAX_VALUES", 7), ("MAX_PAYLOAD_BYTES", 600)])
def test_a_batch_that_does_not_fit_is_refused_with_what_to_make_smaller(
    limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, limit, value)
    with pytest.raises(keys.RequestTooLargeError, match=r"make spec\.training\.batchSize.*smaller"):
        KeyPlanner(routing(1), [table(0, 0, 4)], 8).plan(np.array([[1], [2]]))


@given(batches(), st.integers(1, 3))
def test_a_plan_with_state_asks_for_the_same_keys_and_leaves_room_for_the_state(
    batch: tuple[NDArray[np.int64], IdLists], servers: int
) -> None:
    ids, lists = batch
    rules = [OptimizerType.SGD, OptimizerType.ADAGRAD, OptimizerType.ROW_WISE_ADAGRAD] * 2
    tables = [replace(spec, optimizer=OptimizerSpec(type=rule)) for spec, rule in zip(TABLES, rules, strict=True)]
    wide = [
        replace(spec, dimension=spec.dimension + state) for spec, state in zip(tables, [0, 4, 1, 0, 1, 1], strict=True)
    ]
    plan = KeyPlanner(routing(servers), tables, PARAMETERS, OptimizerType.ADAGRAD).plan(ids, [lists])
    expected = KeyPlanner(routing(servers), wide, PARAMETERS).plan(ids, [lists])
    assert [keys.tolist() for keys in plan.keys] == [keys.tolist() for keys in expected.keys]
    assert [counts.tolist() for counts in plan.counts] == [counts.tolist() for counts in expected.counts]
    assert plan.value_edges == expected.value_edges
    assert plan.offsets.tolist() == expected.offsets.tolist()
    assert [one.rows.tolist() for one in plan.lists] == [one.rows.tolist() for one in expected.lists]
    pieces = [[(2 * start, 2 * stop) for start, stop in runs] for runs in expected.dense_runs]
    assert [list(runs) for runs in plan.dense_runs] == pieces


def test_a_plan_with_state_counts_it_in_the_size_of_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [table(0, 0, 4)]
    monkeypatch.setattr(keys, "MAX_PAYLOAD_BYTES", 4000)
    KeyPlanner(routing(1), tables, 8).plan(np.array([[1], [2]]))
    with pytest.raises(keys.RequestTooLargeError):
        KeyPlanner(routing(1), tables, 8, OptimizerType.ADAGRAD).plan(np.array([[1], [2]]))


@given(batches(), st.data())
def test_the_plan_of_some_records_gathers_their_embeddings(
    batch: tuple[NDArray[np.int64], IdLists], data: st.DataObject
) -> None:
    ids, lists = batch
    plan = KeyPlanner(routing(2), TABLES, PARAMETERS).plan(ids, [lists])
    first = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(first, len(ids)))
    rows = np.random.default_rng(0).normal(size=plan.values).astype(np.float32)
    layout = EmbeddingLayout(TABLES)
    some = layout.gather(rows, plan.of_records(first, stop))
    np.testing.assert_array_equal(some, layout.gather(rows, plan)[first:stop])
