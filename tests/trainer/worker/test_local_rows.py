"""Batches that a worker steps itself, against parameter servers that step the same batches."""

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from emberscale_api.job import AdmissionSpec, InitializerSpec, OptimizerSpec, OptimizerType, Pooling, TableSpec
from emberscale_api.routing import DENSE_PIECES, piece_length
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.table import DensePieces, NonFiniteGradientError, TableStore
from emberscale_trainer.worker.keys import KeyPlan, KeyPlanner
from emberscale_trainer.worker.local_rows import LocalChanges, LocalRows
from emberscale_trainer.worker.rows import EmbeddingLayout
from master_stand_in import even_table

ADDITIVE = [OptimizerType.SGD, OptimizerType.ADAGRAD, OptimizerType.ROW_WISE_ADAGRAD]
PARAMETERS = 700
INITIAL = np.linspace(-1, 1, PARAMETERS, dtype=np.float32)
PADDED = DENSE_PIECES * piece_length(PARAMETERS)
DENSE = OptimizerSpec(type=OptimizerType.ADAGRAD, learning_rate=0.05)
Records = list[tuple[int, int, list[int]]]

keys = st.integers(-3, 8)
batches = st.lists(st.tuples(keys, keys, st.lists(keys, max_size=4)), max_size=8)
rounds = st.lists(batches, min_size=1, max_size=4)


def spec(number: int, column: int, dimension: int, rule: OptimizerType, pooling: Pooling | None = None) -> TableSpec:
    optimizer = OptimizerSpec(type=rule, learning_rate=0.1, initial_accumulator=0.1)
    return TableSpec(number, f"t{number}", column, dimension, optimizer, InitializerSpec(), 5, pooling)


def tables_of(rule: OptimizerType) -> list[TableSpec]:
    """Returns tables for two columns of single ids, a second one for the first, and two for a column of lists."""
    return [
        spec(0, 0, 16, rule),
        spec(1, 1, 5, rule),
        spec(2, 2, 9, rule, Pooling.MEAN),
        spec(3, 0, 1, rule),
        spec(4, 2, 3, rule, Pooling.SUM),
    ]


def columns_of(records: Records) -> tuple[NDArray[np.int64], list[IdLists]]:
    ids = np.array([[one, other] for one, other, _ in records], np.int64).reshape(-1, 2)
    values = np.array([key for _, _, some in records for key in some], np.int64)
    return ids, [IdLists(values, np.cumsum([0, *(len(some) for _, _, some in records)], dtype=np.int64))]


class Servers:
    """Stores of several servers, which together hold all rows."""

    def __init__(self, tables: list[TableSpec], servers: int, dense: OptimizerSpec = DENSE) -> None:
        self.routing = even_table(servers)
        self.stores = [TableStore(tables, DensePieces.of(INITIAL, dense)) for _ in range(servers)]
        self.planner = KeyPlanner(self.routing, tables, PARAMETERS)
        self.wide = KeyPlanner(self.routing, tables, PARAMETERS, dense.type)

    def pull(self, plan: KeyPlan, *, state: bool) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        rows = np.empty(plan.values, np.float32)
        dense = np.empty(max(stop for runs in plan.dense_runs for _, stop in runs), np.float32)
        for server, store in enumerate(self.stores):
            out = np.empty(store.values_per_request(plan.counts[server], state=state), np.float32)
            store.pull(plan.counts[server], plan.keys[server], out, state=state)
            share = plan.values_of(server)
            place = share.stop - share.start
            rows[share] = out[:place]
            for start, stop in plan.dense_runs[server]:
                dense[start:stop] = out[place : place + stop - start]
                place += stop - start
        return rows, dense

    def push(
        self, plan: KeyPlan, rows: NDArray[np.float32], dense: NDArray[np.float32], *, changes_of: int = 0
    ) -> None:
        for server, store in enumerate(self.stores):
            pieces = [dense[start:stop] for start, stop in plan.dense_runs[server]]
            values = np.concatenate([rows[plan.values_of(server)], *pieces])
            store.push(plan.counts[server], plan.keys[server], values, changes_of=changes_of)


def gradients_of(records: int, width: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    dense = np.zeros(PADDED, np.float32)
    dense[:PARAMETERS] = random.standard_normal(PARAMETERS, np.float32)
    of_embeddings = random.standard_normal((records, width), np.float32)
    of_embeddings[random.random(of_embeddings.shape) < 0.1] = -0.0
    return of_embeddings, dense


def run(local: LocalRows, plan: KeyPlan, batches: list[Records], width: int, seed: int = 0) -> None:
    first = 0
    for number, records in enumerate(batches):
        stop = first + len(records)
        local.step(plan.of_records(first, stop), *gradients_of(len(records), width, seed + number))
        first = stop


def joined(batches: list[Records]) -> Records:
    return [record for records in batches for record in records]


@pytest.mark.parametrize("rule", ADDITIVE)
@settings(deadline=None)
@given(rounds, st.integers(1, 3))
def test_a_worker_alone_steps_rows_as_the_servers_do_bit_by_bit(
    rule: OptimizerType, batches: list[Records], servers: int
) -> None:
    tables = tables_of(rule)
    dense = OptimizerSpec(type=OptimizerType.SGD if rule is OptimizerType.SGD else OptimizerType.ADAGRAD)
    remote, layout, local = (
        Servers(tables, servers, dense),
        EmbeddingLayout(tables),
        LocalRows(tables, dense, PARAMETERS),
    )
    plan = remote.wide.plan(*columns_of(joined(batches)))
    pulled = remote.pull(plan, state=True)
    local.begin(plan, pulled[0].copy(), pulled[1].copy())
    first = 0
    for number, records in enumerate(batches):
        batch = plan.of_records(first, first + len(records))
        first += len(records)
        narrow = remote.planner.plan(*columns_of(records))
        rows, flat = remote.pull(narrow, state=False)
        np.testing.assert_array_equal(layout.gather(local.rows, batch), layout.gather(rows, narrow))
        np.testing.assert_array_equal(local.dense, flat)
        of_embeddings, of_dense = gradients_of(len(records), layout.width, number)
        local.step(batch, of_embeddings, of_dense)
        remote.push(narrow, layout.scatter(of_embeddings, narrow), of_dense)
    rows, pieces = remote.pull(plan, state=True)
    assert local.rows.tobytes() == rows.tobytes()
    changes = local.changes()
    np.testing.assert_array_equal(changes.rows, rows - pulled[0])
    np.testing.assert_array_equal(changes.dense, pieces - pulled[1])


@settings(deadline=None)
@given(rounds, rounds)
def test_pushed_changes_are_those_of_the_round(first: list[Records], second: list[Records]) -> None:
    """Successive rounds share their memory; neither repeats changes of the other."""
    tables = tables_of(OptimizerType.ROW_WISE_ADAGRAD)
    width = EmbeddingLayout(tables).width
    stepped, changed = Servers(tables, 2), Servers(tables, 2)
    local = LocalRows(tables, DENSE, PARAMETERS)
    for seed, batches in enumerate((first, second)):
        plan = changed.wide.plan(*columns_of(joined(batches)))
        local.begin(plan, *changed.pull(plan, state=True))
        run(local, plan, batches, width, 10 * seed)
        changes = local.changes()
        changed.push(plan, changes.rows, changes.dense, changes_of=1)
        for number, records in enumerate(batches):
            narrow = stepped.planner.plan(*columns_of(records))
            of_embeddings, of_dense = gradients_of(len(records), width, 10 * seed + number)
            stepped.push(narrow, EmbeddingLayout(tables).scatter(of_embeddings, narrow), of_dense)
    plan = changed.wide.plan(*columns_of(joined([*first, *second])))
    for mine, other in zip(changed.pull(plan, state=True), stepped.pull(plan, state=True), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(rounds, rounds, st.integers(1, 3), st.integers(1, 3))
def test_a_round_that_was_pulled_too_early_gets_the_changes_of_the_one_before(
    first: list[Records], second: list[Records], before: int, after: int
) -> None:
    tables = tables_of(OptimizerType.ADAGRAD)
    width = EmbeddingLayout(tables).width
    old, new = Servers(tables, before), Servers(tables, after)
    ahead, behind = LocalRows(tables, DENSE, PARAMETERS), LocalRows(tables, DENSE, PARAMETERS)
    earlier = old.wide.plan(*columns_of(joined(first)))
    ahead.begin(earlier, *old.pull(earlier, state=True))
    run(ahead, earlier, first, width)
    changes = ahead.changes()

    plan = new.wide.plan(*columns_of(joined(second)))
    early = new.pull(plan, state=True)
    moved = new.wide.plan(*columns_of(joined(first)))
    new.push(moved, *relaid(changes, moved, tables), changes_of=1)
    ahead.begin(plan, *early, changes)
    behind.begin(plan, *new.pull(plan, state=True))
    assert ahead.rows.tobytes() == behind.rows.tobytes()
    assert ahead.dense.tobytes() == behind.dense.tobytes()
    assert not ahead.changes().rows.any()
    assert not ahead.changes().dense.any()
    for one in (ahead, behind):
        run(one, plan, second, width, 50)
    assert ahead.changes().rows.tobytes() == behind.changes().rows.tobytes()
    assert ahead.changes().dense.tobytes() == behind.changes().dense.tobytes()


def relaid(
    changes: LocalChanges, plan: KeyPlan, tables: list[TableSpec]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the changes in the layout of `plan`, which has the same rows on other servers."""
    state = {OptimizerType.ADAGRAD: 2}
    wide = [replace(one, dimension=state[one.optimizer.type] * one.dimension) for one in tables]
    return EmbeddingLayout(wide).relaid(changes.rows, changes.plan, plan), changes.dense


@pytest.mark.parametrize("rule", [OptimizerType.MOMENTUM, OptimizerType.ADAM, OptimizerType.FTRL])
def test_rules_whose_changes_do_not_add_up_are_refused(rule: OptimizerType) -> None:
    with pytest.raises(ValueError, match="do not add up"):
        LocalRows([spec(0, 0, 4, rule)], DENSE, PARAMETERS)


def test_a_table_with_admission_is_refused() -> None:
    table = replace(spec(0, 0, 4, OptimizerType.SGD), admission=AdmissionSpec(min_count=2))
    with pytest.raises(ValueError, match="t0 has admission"):
        LocalRows([table], DENSE, PARAMETERS)


def test_arrays_of_another_layout_are_refused() -> None:
    tables = tables_of(OptimizerType.SGD)
    servers, local = Servers(tables, 1), LocalRows(tables, DENSE, PARAMETERS)
    plan = servers.wide.plan(*columns_of([(1, 2, [3]), (4, 5, [])]))
    rows, dense = servers.pull(plan, state=True)
    with pytest.raises(ValueError, match="contiguous float32"):
        local.begin(plan, rows[:-1], dense)
    local.begin(plan, rows, dense)
    of_embeddings, of_dense = gradients_of(2, EmbeddingLayout(tables).width, 0)
    with pytest.raises(ValueError, match="contiguous float32"):
        local.step(plan.of_records(0, 1), of_embeddings, of_dense)
    other = servers.wide.plan(*columns_of([(1, 1, []), (1, 1, [])]))
    with pytest.raises(ValueError, match="not one of this round"):
        local.step(other, of_embeddings, of_dense)


def test_a_step_beyond_float32_is_told_before_it_is_pushed() -> None:
    tables = [
        replace(spec(0, 0, 4, OptimizerType.SGD), optimizer=OptimizerSpec(type=OptimizerType.SGD, learning_rate=100))
    ]
    servers, local = Servers(tables, 1), LocalRows(tables, DENSE, PARAMETERS)
    plan = servers.wide.plan(np.array([[1], [2]]))
    local.begin(plan, *servers.pull(plan, state=True))
    local.step(plan, np.full((2, 4), 1e38, np.float32), np.zeros(PADDED, np.float32))
    with pytest.raises(NonFiniteGradientError, match="rows of a round"):
        local.changes()
