import gc
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from buckets import bucket_of
from emberscale_api.job import OptimizerType
from emberscale_api.routing import BUCKETS
from emberscale_trainer.table import NonFiniteGradientError, Reader, TableStore, require_finite
from memory_limit import refused_beyond
from snapshots import rows_of_bucket

Pull = Callable[..., NDArray[np.float32]]
Push = Callable[..., None]
Rows = Callable[..., dict[int, tuple[NDArray[np.float32], NDArray[np.float32], int]]]

MANY = 300_000
"""More rows than fit into one segment, and enough for about nine doublings of every bucket's index."""


def test_a_pull_answers_row_by_row_in_the_order_of_the_keys(make_spec: Any, pull: Pull) -> None:
    store = TableStore([make_spec(0, 3), make_spec(1, 5)])
    answer = pull(store, [10, 20], [30])
    assert np.array_equal(answer[0:3], pull(store, [10], []))
    assert np.array_equal(answer[3:6], pull(store, [20], []))
    assert np.array_equal(answer[6:11], pull(store, [], [30]))


def test_values_per_request_follow_the_dimensions(make_spec: Any) -> None:
    store = TableStore([make_spec(0, 3), make_spec(1, 5), make_spec(2, 8)])
    assert store.values_per_request(np.array([2, 0, 4], np.uint32)) == 38
    with pytest.raises(ValueError, match="for 3 tables"):
        store.values_per_request(np.array([2, 0], np.uint32))


def test_a_push_steps_its_rows_only(make_spec: Any, pull: Pull, push: Push) -> None:
    store = TableStore([make_spec(0, 4, learning_rate=0.5), make_spec(1, 4, learning_rate=0.25)])
    before = pull(store, [1, 2], [1])
    push(store, ([2], [1, 2, 3, 4]), ([1], [8, 8, 8, 8]))
    change = before - pull(store, [1, 2], [1])
    np.testing.assert_allclose(change, [0, 0, 0, 0, 0.5, 1, 1.5, 2, 2, 2, 2, 2], atol=1e-6)


def test_a_push_to_a_key_that_was_never_pulled_starts_from_its_initial_weights(
    make_spec: Any, pull: Pull, push: Push
) -> None:
    store = TableStore([make_spec(learning_rate=1.0)])
    initial = pull(store, [5])
    push(store, ([5], [1, 1, 1, 1]))
    np.testing.assert_allclose(pull(store, [5]), initial - 1)


def test_a_key_that_comes_twice_in_a_push_is_stepped_twice(
    make_spec: Any, pull: Pull, push: Push, rows_of: Rows
) -> None:
    spec = make_spec(dimension=8, optimizer=OptimizerType.ADAGRAD, learning_rate=0.1)
    together, apart = TableStore([spec]), TableStore([spec])
    push(together, ([3, 3, 3], np.arange(24)))
    for start in (0, 8, 16):
        push(apart, ([3], np.arange(start, start + 8)))
    assert np.array_equal(pull(together, [3]), pull(apart, [3]))
    assert rows_of(together)[3][2] == 3


def test_pushes_are_counted_row_by_row(make_spec: Any, pull: Pull, push: Push, rows_of: Rows) -> None:
    store = TableStore([make_spec()])
    pull(store, [1, 2, 3])
    push(store, ([2, 3], np.ones(8)))
    push(store, ([3], np.ones(4)))
    assert {key: pushes for key, (_, _, pushes) in rows_of(store).items()} == {2: 1, 3: 2}


def test_a_row_that_was_pushed_to_all_its_life_stays_alive(make_spec: Any, push: Push, rows_of: Rows) -> None:
    store = TableStore([make_spec()])
    records = store.layouts[0].empty(1)
    store.layouts[0].fields(records)["pushes"] = 2**32 - 2
    store.load(0, records)
    for _ in range(3):
        push(store, ([0], np.ones(4)))
    assert rows_of(store)[0][2] == 2**32 - 1


def test_the_bytes_of_a_slot_say_whether_it_is_live(make_spec: Any, push: Push) -> None:
    store = TableStore([make_spec(optimizer=rule, number=number) for number, rule in enumerate(OptimizerType)])
    push(store, *[([0, 7], np.zeros(8)) for _ in store.specs])
    for table, layout in enumerate(store.layouts):
        record = rows_of_bucket(store, table, bucket_of(0))
        assert layout.fields(record)["pushes"] == [1]
        store.load(table, record)
        with pytest.raises(ValueError, match="counts no pushes"):
            store.load(table, layout.empty(1))
        assert len(rows_of_bucket(store, table, bucket_of(0))) == 1


def test_every_key_is_a_key(make_spec: Any, pull: Pull, push: Push) -> None:
    extremes = [0, -1, 1, 2**63 - 1, -(2**63)]
    store = TableStore([make_spec(dimension=2)])
    push(store, (extremes, np.zeros(10)))
    rows = pull(store, extremes).reshape(-1, 2)
    assert len(np.unique(rows, axis=0)) == len(extremes)
    assert store.rows() == {"C1": len(extremes)}


def test_rows_stay_what_they_are_while_the_table_grows(make_spec: Any, pull: Pull, push: Push) -> None:
    store = TableStore([make_spec(dimension=16, optimizer=OptimizerType.ROW_WISE_ADAGRAD), make_spec(1, 3)])
    keys = np.random.default_rng(3).permutation(MANY).astype(np.int64) * 1_000_003 - 5
    first = pull(store, keys[:1000], [])
    push(store, (keys[:1000], np.ones(16_000)), ([7], np.ones(3)))
    stepped = pull(store, keys[:1000], [])
    assert not np.array_equal(first, stepped)
    for start in range(0, MANY, 30_000):
        some = keys[max(start, 1000) : start + 30_000]
        push(store, (some, np.zeros(16 * len(some))), ([], []))
    assert store.rows() == {"C1": MANY, "C2": 1}
    assert np.array_equal(pull(store, keys[:1000], []), stepped)
    last = pull(store, keys[-1000:], [])
    assert np.array_equal(last, pull(TableStore(store.specs), keys[-1000:], []))


def test_a_push_can_make_rows_across_segments(make_spec: Any, push: Push, rows_of: Rows) -> None:
    """Growth in the middle of a push neither repeats nor drops a gradient."""
    store = TableStore([make_spec(0, 64), make_spec(1, 64, learning_rate=0.5)])
    keys = range(40_000)
    gradients = np.ones((40_000, 64), np.float32)
    push(store, (keys, gradients), (keys, gradients))
    fresh = TableStore(store.specs)
    push(fresh, (keys, 0 * gradients), (keys, 0 * gradients))
    for table, rate in ((0, np.float32(0.01)), (1, np.float32(0.5))):
        rows, initial = rows_of(store, table), rows_of(fresh, table)
        assert {pushes for _, _, pushes in rows.values()} == {1}
        for key in (0, 1, 20_000, 39_999):
            assert np.array_equal(rows[key][0], initial[key][0] - rate)


def test_a_push_for_which_there_is_no_memory_changes_nothing(make_spec: Any, pull: Pull, push: Push) -> None:
    store = TableStore([make_spec(dimension=64), make_spec(1, 64)])
    old = range(100)
    push(store, (old, np.ones(6400)), (old, np.ones(6400)))
    before = pull(store, old, old)
    counts = np.array([100_000, 100_000], np.uint32)
    keys = np.concatenate([np.arange(100_000)] * 2).astype(np.int64)
    gradients = np.ones(2 * 64 * 100_000, np.float32)
    with refused_beyond(32 << 20), pytest.raises(MemoryError):  # one of the two tables would fit
        store.push(counts, keys, gradients)
    assert store.rows() == {"C1": 100, "C2": 100}
    assert np.array_equal(pull(store, old, old), before)
    store.push(counts, keys, gradients)
    assert store.rows() == {"C1": 100_000, "C2": 100_000}
    np.testing.assert_allclose(pull(store, old, old), before - 0.01, atol=1e-6)


def test_a_push_after_its_reserve_needs_no_segment(make_spec: Any, rows_of: Rows) -> None:
    store = TableStore([make_spec(dimension=256)])
    counts, keys = np.array([20_000], np.uint32), np.arange(20_000, dtype=np.int64)
    gradients = np.ones(256 * 20_000, np.float32)
    store.push(counts, keys - 20_000, gradients)  # the index then has room for as many again
    store.reserve(counts, keys, gradients)
    assert store.rows() == {"C1": 20_000}
    with refused_beyond(2 << 20):
        store.push(counts, keys, gradients)
    assert {pushes for _, _, pushes in rows_of(store).values()} == {1}
    assert store.rows() == {"C1": 40_000}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [1, 7, 32, 33, 1000])
def test_a_gradient_that_is_not_finite_is_found_wherever_it_stands(value: float, length: int) -> None:
    gradients = np.linspace(-3e38, 3e38, length, dtype=np.float32)
    require_finite(gradients, "rows")
    for place in range(length):
        spoilt = gradients.copy()
        spoilt[place] = value
        with pytest.raises(NonFiniteGradientError, match=f"gradient {place} of {length} of the rows is"):
            require_finite(spoilt, "rows")


def test_large_tables_lie_on_huge_pages(make_spec: Any, push: Push) -> None:
    def huge_bytes() -> int:
        with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
            return sum(int(line.split()[1]) * 1024 for line in rollup if line.startswith("AnonHugePages"))

    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text(encoding="ascii"):
        pytest.skip("this kernel gives no huge pages")
    store = TableStore([make_spec(dimension=256)])
    before = huge_bytes()
    push(store, (range(40_000), np.ones((40_000, 256))))
    assert huge_bytes() - before >= store.allocated_bytes // 2


def test_large_rows_fit(make_spec: Any, pull: Pull, push: Push) -> None:
    store = TableStore([make_spec(dimension=4096, optimizer=OptimizerType.ADAM)])
    keys = range(200)  # several segments
    before = pull(store, keys)
    push(store, (keys, np.ones(200 * 4096)))
    assert (pull(store, keys) < before).all()


def test_the_same_requests_give_the_same_bytes(make_spec: Any, pull: Pull, push: Push) -> None:
    def train() -> list[bytes]:
        random = np.random.default_rng(1)
        store = TableStore([make_spec(number, 10, optimizer=rule) for number, rule in enumerate(OptimizerType)])
        for _ in range(20):
            keys = [random.choice(500, 100, replace=False) for _ in store.specs]
            pull(store, *keys)
            push(store, *((table, random.standard_normal((100, 10))) for table in keys))
        snapshot = store.readers.snapshot(Reader.CHECKPOINT, nullcontext())
        return [chunk.tobytes() for table in range(len(store.specs)) for chunk in snapshot.read(table)]

    assert train() == train()


def test_requests_are_taken_from_a_read_only_buffer_at_any_alignment(make_spec: Any, pull: Pull) -> None:
    store = TableStore([make_spec()])
    gradients = np.full(8, 0.5, np.float32)
    frame = b"?" + np.array([2], np.uint32).tobytes() + np.array([8, 9], np.int64).tobytes() + gradients.tobytes()
    counts = np.frombuffer(frame, np.uint32, 1, offset=1)
    keys = np.frombuffer(frame, np.int64, 2, offset=5)
    before = pull(store, [8, 9])
    store.push(counts, keys, np.frombuffer(frame, np.float32, 8, offset=21))
    np.testing.assert_allclose(pull(store, [8, 9]), before - 0.005, atol=1e-7)


def test_an_empty_request_does_nothing(make_spec: Any, pull: Pull, push: Push) -> None:
    store = TableStore([make_spec(), make_spec(1)])
    assert len(pull(store, [], [])) == 0
    push(store, ([], []), ([], []))
    assert store.rows() == {"C1": 0, "C2": 0}


COUNTS, BOTH_KEYS, VALUES = np.array([1, 1], np.uint32), np.array([1, 2], np.int64), np.zeros(9, np.float32)


@pytest.mark.parametrize(
    ("counts", "keys", "values", "message"),
    [
        (COUNTS.astype(np.int32), BOTH_KEYS, VALUES, "counts must be"),
        (COUNTS[:1], BOTH_KEYS, VALUES, "1 entries for 2 tables"),
        (COUNTS, BOTH_KEYS.astype(np.uint64), VALUES, "keys must be"),
        (COUNTS, BOTH_KEYS[:1], VALUES, "do not add up"),
        (COUNTS, np.zeros(3, np.int64), VALUES, "do not add up"),
        (np.array([2**31, 2**31], np.uint32), BOTH_KEYS, VALUES, "do not add up"),
        (COUNTS, np.zeros(4, np.int64)[::2], VALUES, "keys must be"),
        (COUNTS, BOTH_KEYS, np.zeros(9), "must be"),
        (COUNTS, BOTH_KEYS, VALUES[:8], "do not add up"),
        (COUNTS, BOTH_KEYS, np.zeros((3, 3), np.float32), "must be"),
        (COUNTS, BOTH_KEYS.astype(">i8"), VALUES, "keys must be"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_changes_nothing(
    make_spec: Any, counts: Any, keys: Any, values: Any, message: str
) -> None:
    store = TableStore([make_spec(0, 4), make_spec(1, 5)])
    with pytest.raises(ValueError, match=message):
        store.pull(counts, keys, values)
    with pytest.raises(ValueError, match=message):
        store.push(counts, keys, values)
    assert store.rows() == {"C1": 0, "C2": 0}


def test_a_pull_into_a_read_only_array_is_refused(make_spec: Any) -> None:
    out = np.zeros(4, np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        TableStore([make_spec()]).pull(np.array([1], np.uint32), np.array([1], np.int64), out)


@pytest.mark.parametrize(
    "records", [np.zeros((2, 16), np.uint8), np.zeros((2, 24), np.int8), np.zeros(24, np.uint8)], ids=str
)
def test_records_of_another_form_are_refused(make_spec: Any, records: Any) -> None:
    store = TableStore([make_spec(dimension=3)])
    assert store.layouts[0].stride == 24
    with pytest.raises(ValueError, match=r"uint8\[n, 24\]"):
        store.load(0, records)


@pytest.mark.parametrize(("table", "bucket"), [(1, 0), (-1, 0), (0, BUCKETS), (0, -1)])
def test_tables_and_buckets_that_do_not_exist_are_refused(make_spec: Any, table: int, bucket: int) -> None:
    store = TableStore([make_spec()])
    with pytest.raises(IndexError, match="there is no"):
        store.remove_bucket(table, bucket)
    if table:
        with pytest.raises(IndexError, match="there is no"):
            store.retire(table, np.zeros(1, np.int64))


@pytest.mark.parametrize("table", [1, -1])
def test_records_for_a_table_that_does_not_exist_are_refused(make_spec: Any, table: int) -> None:
    with pytest.raises(IndexError, match=f"there is no table {table}"):
        TableStore([make_spec()]).load(table, np.zeros((0, 32), np.uint8))


def test_what_a_snapshot_holds_can_be_loaded(make_spec: Any, pull: Pull, push: Push) -> None:
    specs = [make_spec(0, 6, OptimizerType.ADAM), make_spec(1, 16, OptimizerType.FTRL)]
    store, other = TableStore(specs), TableStore(specs)
    keys = range(100_000)
    push(store, (keys, np.ones(600_000)), (keys, np.ones(1_600_000)))
    push(other, ([5], np.ones(6)), ([], []))  # the load replaces this row
    snapshot = store.readers.snapshot(Reader.CHECKPOINT, nullcontext())
    for table in range(2):
        for chunk in snapshot.read(table):
            other.load(table, chunk)
    assert other.rows() == store.rows()
    again = (keys, np.full(600_000, 0.5)), (keys, np.full(1_600_000, 0.5))
    push(store, *again)
    push(other, *again)
    assert np.array_equal(pull(store, keys, keys), pull(other, keys, keys))


@pytest.mark.parametrize("first", [0, 2_000])
def test_an_index_does_not_grow_for_rows_that_are_expected(make_spec: Any, pull: Pull, push: Push, first: int) -> None:
    store, other = TableStore([make_spec(dimension=1)]), TableStore([make_spec(dimension=1)])
    push(store, (range(100_000), np.ones(100_000)))
    [records] = store.readers.snapshot(Reader.CHECKPOINT, nullcontext()).read(0)
    other.load(0, records[:first])
    half = np.arange(BUCKETS) % 2 == 0
    other.expect(0, 50_000, half)
    prepared = other.allocated_bytes - other.slots[0].allocated_bytes
    other.load(0, records, half)
    grown = other.allocated_bytes - other.slots[0].allocated_bytes - prepared
    assert grown <= 0.01 * prepared  # of buckets that have many more rows than most
    other.expect(0, 10, half)  # fewer than there are
    other.load(0, records)
    assert np.array_equal(pull(store, range(100_000)), pull(other, range(100_000)))


def test_rows_that_are_too_many_to_expect_leave_the_table_usable(make_spec: Any) -> None:
    store = TableStore([make_spec()])
    for rows in (2_000_000_000, 1 << 70):  # earlier tests have left memory to this process that it may use again
        with refused_beyond(32 << 20), pytest.raises(MemoryError):
            store.expect(0, rows, np.ones(BUCKETS, np.bool_))
    store.expect(0, 100_000, np.ones(BUCKETS, np.bool_))
    store.load(0, store.layouts[0].empty(0))
    assert store.rows() == {"C1": 0}


def test_of_records_with_one_key_the_last_stays(make_spec: Any, pull: Pull) -> None:
    store = TableStore([make_spec(dimension=1)])
    records = store.layouts[0].empty(3)
    store.layouts[0].fields(records)["key"] = [1, 2, 1]
    store.layouts[0].fields(records)["weights"] = [[10], [20], [30]]
    store.layouts[0].fields(records)["pushes"] = 1
    store.load(0, records)
    assert pull(store, [1, 2]).tolist() == [30, 20]
    assert store.rows() == {"C1": 2}


def test_a_bucket_can_be_taken_out_and_brought_back(make_spec: Any, pull: Pull, push: Push, rows_of: Rows) -> None:
    store = TableStore([make_spec(optimizer=OptimizerType.ADAM)])
    push(store, (range(20_000), np.ones(80_000)))
    before = rows_of(store)
    records = rows_of_bucket(store, 0, 77)
    assert {int(key) for key in store.layouts[0].fields(records)["key"]} == {
        key for key in range(20_000) if bucket_of(key) == 77
    }
    assert store.remove_bucket(0, 77) == len(records) > 0
    assert set(rows_of(store)) == {key for key in before if bucket_of(key) != 77}
    assert store.remove_bucket(0, 77) == 0
    assert len(rows_of_bucket(store, 0, 77)) == 0
    store.load(0, records)
    after = rows_of(store)
    assert set(after) == set(before)
    for key, (weights, state, pushes) in after.items():
        assert np.array_equal(weights, before[key][0])
        assert np.array_equal(state, before[key][1])
        assert pushes == before[key][2]


def test_a_removed_row_begins_again(make_spec: Any, pull: Pull, push: Push, rows_of: Rows) -> None:
    store = TableStore([make_spec(optimizer=OptimizerType.ADAM)])
    initial = pull(store, [1])
    push(store, ([1], np.ones(4)))
    store.remove_bucket(0, bucket_of(1))
    assert rows_of(store) == {}
    assert np.array_equal(pull(store, [1]), initial)
    push(store, ([1], np.zeros(4)))
    weights, state, pushes = rows_of(store)[1]
    assert np.array_equal(weights, initial)
    assert state.tolist() == [0] * 8 + [1]
    assert pushes == 1


def test_single_rows_can_be_retired(make_spec: Any, pull: Pull, push: Push, rows_of: Rows) -> None:
    store = TableStore([make_spec(), make_spec(1)])
    push(store, (range(1000), np.ones(4000)), (range(10), np.ones(40)))
    initial = pull(TableStore(store.specs), [7], [])
    assert store.retire(0, np.array([7, 7, 5000, 8], np.int64)) == 2
    assert set(rows_of(store)) == set(range(1000)) - {7, 8}
    assert len(rows_of(store, 1)) == 10
    assert np.array_equal(pull(store, [7], []), initial)
    push(store, ([7], np.ones(4)), ([], []))
    assert rows_of(store)[7][2] == 1


def test_slots_that_were_given_back_are_used_again(make_spec: Any, push: Push) -> None:
    store = TableStore([make_spec(dimension=8)])
    gradients = np.ones(400_000)
    push(store, (range(50_000), gradients))
    full = store.allocated_bytes
    for bucket in range(BUCKETS):
        store.remove_bucket(0, bucket)
    assert store.rows() == {"C1": 0}
    push(store, (range(50_000, 100_000), gradients))
    assert store.rows() == {"C1": 50_000}
    assert store.allocated_bytes < full * 1.1


def test_pulls_take_no_memory(make_spec: Any, pull: Pull) -> None:
    store = TableStore([make_spec(dimension=8)])
    empty = store.allocated_bytes
    pull(store, range(100_000))
    assert store.allocated_bytes == empty
    assert store.rows() == {"C1": 0}


def test_allocated_bytes_follow_the_rows(make_spec: Any, push: Push) -> None:
    store = TableStore([make_spec(dimension=16, optimizer=OptimizerType.ROW_WISE_ADAGRAD)])
    empty = store.allocated_bytes
    push(store, (range(200_000), np.ones(200_000 * 16)))
    per_row = (store.allocated_bytes - empty) / 200_000
    assert store.layouts[0].stride < per_row <= 1.3 * (8 + 64 + 4 + 16)


def test_a_store_that_is_dropped_gives_its_memory_back(make_spec: Any, push: Push) -> None:
    """Python does not count the memory of rows and indexes, so the test reads that of the process."""

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * 4096

    def fill() -> int:
        store = TableStore([make_spec(dimension=16)])
        push(store, (range(100_000), np.ones(1_600_000)))
        return store.allocated_bytes

    size = fill()
    before = resident()
    for _ in range(10):
        fill()
    assert resident() - before < 3 * size
