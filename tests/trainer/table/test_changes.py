"""Pulls of rows with their state, and pushes of changes to both."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from emberscale_api.job import AdmissionSpec, EvictionSpec, InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.job.model import InitializerType
from emberscale_api.routing import DENSE_PIECES
from emberscale_trainer.table import DensePieces, Reader, TableStore
from snapshots import records_of

ADDITIVE = [OptimizerType.SGD, OptimizerType.ADAGRAD, OptimizerType.ROW_WISE_ADAGRAD]
Rows = Callable[..., dict[int, tuple[NDArray[np.float32], NDArray[np.float32], int]]]
KEYS = st.integers(-20, 20)
DENSE = DensePieces.of(np.linspace(-1, 1, 600, dtype=np.float32), OptimizerSpec(type=OptimizerType.ADAGRAD))


def spec(number: int, dimension: int, rule: OptimizerType) -> TableSpec:
    optimizer = OptimizerSpec(type=rule, learning_rate=0.1, initial_accumulator=0.5)
    initializer = InitializerSpec(type=InitializerType.NORMAL, scale=0.1)
    return TableSpec(number, f"C{number}", number, dimension, optimizer, initializer, seed=3)


def pull(store: TableStore, *keys: list[int], state: bool = True) -> NDArray[np.float32]:
    counts = np.array([len(table) for table in keys], np.uint32)
    out = np.full(store.values_per_request(counts, state=state), np.nan, np.float32)
    store.pull(counts, np.concatenate([np.array(table, np.int64) for table in keys]), out, state=state)
    return out


def add(store: TableStore, changes: NDArray[np.float32], *keys: list[int]) -> None:
    counts = np.array([len(table) for table in keys], np.uint32)
    store.push(counts, np.concatenate([np.array(table, np.int64) for table in keys]), changes, changes_of=1)


def step(store: TableStore, seed: int, *keys: list[int]) -> None:
    counts = np.array([len(table) for table in keys], np.uint32)
    gradients = np.random.default_rng(seed).standard_normal(store.values_per_request(counts), np.float32)
    store.push(counts, np.concatenate([np.array(table, np.int64) for table in keys]), gradients)


@pytest.mark.parametrize("rule", list(OptimizerType))
@pytest.mark.parametrize("dimension", [1, 5, 16, 27])
def test_a_pull_with_state_answers_what_the_rows_hold(rule: OptimizerType, dimension: int, rows_of: Rows) -> None:
    store = TableStore([spec(0, dimension, rule)])
    step(store, 1, list(range(100)))
    step(store, 2, list(range(50)))
    answer = pull(store, list(range(100))).reshape(100, -1)
    rows = rows_of(store)
    for key in range(100):
        np.testing.assert_array_equal(answer[key], np.concatenate(rows[key][:2]))


@pytest.mark.parametrize("rule", list(OptimizerType))
@pytest.mark.parametrize("dimension", [1, 5, 16])
def test_a_key_without_a_row_answers_what_its_row_would_begin_with(rule: OptimizerType, dimension: int) -> None:
    """A gradient of zero makes the row to compare with, since its step changes nothing."""
    asked, made = (TableStore([spec(0, dimension, rule)]) for _ in range(2))
    answer = pull(asked, [7, -3]).reshape(2, -1)
    assert asked.rows() == {"C0": 0}
    np.testing.assert_array_equal(answer[:, :dimension].reshape(-1), pull(asked, [7, -3], state=False))
    counts, keys = np.array([2], np.uint32), np.array([7, -3])
    made.push(counts, keys, np.zeros(2 * dimension, np.float32))
    state = pull(made, [7, -3]).reshape(2, -1)[:, dimension:]
    if rule is OptimizerType.ADAM:
        assert state[:, -1].tolist() == [1, 1]  # Adam counts steps
        state[:, -1] = 0
    np.testing.assert_array_equal(answer[:, dimension:], state)


def test_dense_pieces_answer_piece_by_piece_their_parameters_and_their_state() -> None:
    store = TableStore([spec(0, 4, OptimizerType.SGD)], DENSE)
    pieces = [3, 0, 63]
    fresh = pull(store, [1], pieces)[4:].reshape(3, 2, -1)
    np.testing.assert_array_equal(fresh[:, 0], DENSE.initial[pieces])
    step(store, 1, [], pieces)
    stepped = pull(store, [1], pieces)[4:].reshape(3, 2, -1)
    np.testing.assert_array_equal(stepped[:, 0].reshape(-1), pull(store, [], pieces, state=False))
    assert (stepped[:, 1] > fresh[:, 1]).all()


@given(
    held=st.lists(KEYS, unique=True),
    asked=st.tuples(*[st.lists(KEYS, unique=True, max_size=30)] * 3),
    dimension=st.sampled_from([1, 5, 8, 17]),
)
def test_a_change_is_added_to_weights_and_state_and_counts_as_a_push(
    held: list[int], asked: tuple[list[int], ...], dimension: int
) -> None:
    store = TableStore([spec(number, dimension, rule) for number, rule in enumerate(ADDITIVE)], DENSE)
    step(store, 1, held, held, held, [])
    pieces = [0, 5, DENSE_PIECES - 1]
    before = pull(store, *asked, pieces)
    changes = np.random.default_rng(2).standard_normal(len(before), np.float32)
    add(store, changes, *asked, pieces)
    np.testing.assert_array_equal(pull(store, *asked, pieces), before + changes)
    for number, keys in enumerate(asked):
        records = records_of(store.readers.snapshot(Reader.FLASH, nullcontext()), number)
        fields = [store.layouts[number].fields(np.frombuffer(one, np.uint8)[None])[0] for one in records.values()]
        pushes = {int(one["key"]): int(one["pushes"]) for one in fields}
        assert pushes == {key: (key in held) + (key in keys) for key in {*held, *keys}}


@given(KEYS, st.integers(0, 100))
def test_a_key_that_comes_twice_is_changed_twice(key: int, seed: int) -> None:
    together, apart = (TableStore([spec(0, 9, OptimizerType.ADAGRAD)]) for _ in range(2))
    first, second = np.random.default_rng(seed).standard_normal((2, 18), np.float32)
    add(together, np.concatenate([first, second]), [key, key])
    add(apart, first, [key])
    add(apart, second, [key])
    np.testing.assert_array_equal(pull(together, [key]), pull(apart, [key]))


@pytest.mark.parametrize("rule", ADDITIVE)
def test_what_two_workers_did_apart_adds_up(rule: OptimizerType) -> None:
    """The state sums that of both; the weights take both steps, each at its own size."""
    start = TableStore([spec(0, 8, rule)])
    before = pull(start, [1, 2])
    results = []
    for seed in (1, 2):
        alone = TableStore([spec(0, 8, rule)])
        step(alone, seed, [1, 2])
        results.append(pull(alone, [1, 2]))
        add(start, results[-1] - before, [1, 2])
    np.testing.assert_allclose(pull(start, [1, 2]), results[0] + results[1] - before, atol=1e-6)


def test_readers_learn_of_changes_as_of_pushes() -> None:
    store = TableStore([spec(0, 4, OptimizerType.ADAGRAD)])
    step(store, 1, [1, 2, 3])
    store.readers.track(Reader.CHECKPOINT)
    snapshot = store.readers.snapshot(Reader.FLASH, nullcontext())
    before = records_of(store.readers.snapshot(Reader.MOVE, nullcontext()))
    add(store, np.ones(16, np.float32), [2, 9])
    assert records_of(snapshot) == before
    assert set(records_of(store.readers.take(Reader.CHECKPOINT, nullcontext()))) == {2, 9}


def test_changes_are_logged_for_parity() -> None:
    store = TableStore([spec(0, 4, OptimizerType.ADAGRAD)])
    log = store.log_deltas(1, lambda _table, _segment: 0)
    while not log.is_whole:
        log.fill(1 << 20)
    add(store, np.ones(16, np.float32), [2, 9])
    (deltas,) = log.take([(0,)])
    records = deltas.reshape(2, -1)[:, 8:]
    held = records_of(store.readers.snapshot(Reader.FLASH, nullcontext()))
    assert {record.tobytes() for record in records} == set(held.values())


def test_a_changed_row_notes_the_batch() -> None:
    table = replace(spec(0, 4, OptimizerType.SGD), eviction=EvictionSpec(ttl_batches=10))
    store = TableStore([table])
    store.clock = 77
    add(store, np.ones(4, np.float32), [5])
    (record,) = records_of(store.readers.snapshot(Reader.FLASH, nullcontext())).values()
    assert store.layouts[0].fields(np.frombuffer(record, np.uint8)[None])[0]["touched"] == 77


@pytest.mark.parametrize(
    "table",
    [
        *(spec(0, 4, rule) for rule in OptimizerType if not rule.is_additive),
        replace(spec(0, 4, OptimizerType.SGD), admission=AdmissionSpec(min_count=2)),
    ],
)
def test_tables_in_which_changes_do_not_add_up_refuse_them(table: TableSpec) -> None:
    store = TableStore([table])
    changes = np.ones(store.values_per_request(np.array([1], np.uint32), state=True), np.float32)
    with pytest.raises(ValueError, match="do not add up in these tables"):
        add(store, changes, [1])
    assert store.rows() == {"C0": 0}


def test_changes_of_another_size_are_refused() -> None:
    store = TableStore([spec(0, 4, OptimizerType.ADAGRAD)])
    with pytest.raises(ValueError, match=r"do not add up to the keys and values: .* \[8\]"):
        add(store, np.ones(4, np.float32), [1])


def test_rules_whose_state_is_a_sum_are_additive() -> None:
    assert [rule for rule in OptimizerType if rule.is_additive] == [rule for rule in OptimizerType if rule in ADDITIVE]
