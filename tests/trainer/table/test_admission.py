"""Which keys get rows, and which rows are evicted, in one store."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from buckets import bucket_of
from emberscale_api.job import AdmissionSpec, EvictionSpec, TableSpec
from emberscale_api.job.running import AdmissionCounts
from emberscale_api.routing import BUCKETS, mix64
from emberscale_trainer.table import Eviction, RowLayout, TableStore, keys_of
from emberscale_trainer.table.eviction import HALF_LIFE_BATCHES
from snapshots import all_rows

OWNED = np.ones(BUCKETS, np.bool_)
ONE_BUCKET = [key for key in range(40_000) if bucket_of(key) == 5]


class Trained:
    """A store of one table with one weight per row, swept after each batch."""

    def __init__(self, spec: TableSpec) -> None:
        self.store = TableStore([spec])
        self.eviction = Eviction(self.store)

    def push(self, keys: list[int]) -> None:
        """Pushes a batch whose gradients are all 1."""
        self.store.clock += 1
        self.store.push(np.array([len(keys)], np.uint32), np.array(keys, np.int64), np.ones(len(keys), np.float32))
        for due in self.eviction.due(self.store.clock, OWNED):
            self.eviction.sweep(due)

    def keys(self) -> set[int]:
        """The keys that have rows."""
        return set(keys_of(all_rows(self.store, len(self.store.specs) - 1)).tolist())

    @property
    def counts(self) -> AdmissionCounts:
        return self.store.admission_counts()["C1"]


@pytest.fixture
def make(make_spec: Callable[..., TableSpec]) -> Callable[..., Trained]:
    def call(min_count: int = 1, ttl: int | None = None, most: int | None = None, **parameters: float) -> Trained:
        spec = make_spec(dimension=1, learning_rate=0.5, **parameters)
        admission, eviction = AdmissionSpec(min_count=min_count), EvictionSpec(ttl_batches=ttl, max_rows=most)
        return Trained(replace(spec, admission=admission, eviction=eviction))

    return call


def test_a_sketch_is_a_row_of_the_bucket_whose_keys_it_counts(make: Callable[..., Trained]) -> None:
    trained = make(min_count=2)
    trained.push(list(range(3000)))
    sketches = keys_of(all_rows(trained.store, 0)).tolist()
    assert sorted(mix64(key) for key in sketches) == sorted({bucket_of(key) for key in range(3000)})
    assert [bucket_of(key) for key in sketches] == [mix64(key) for key in sketches]


def test_requests_name_tables_behind_their_sketches(make_spec: Callable[..., TableSpec]) -> None:
    """Also those with too few tables or keys, which are refused."""
    specs = [make_spec(), replace(make_spec(), number=1, admission=AdmissionSpec(min_count=2))]
    store, keys = TableStore(specs), np.array([7, 8, 9], np.int64)

    def named(*counts: int) -> list[tuple[int, int | None, list[int]]]:
        return [(*numbers, part.tolist()) for *numbers, part in store.named_by(np.array(counts, np.uint32), keys)]

    assert named(1, 2) == [(1, None, [7]), (2, 0, [8, 9])]
    assert named(2) == [(1, None, [7, 8])]
    assert named(2, 2, 1) == [(1, None, [7, 8]), (2, 0, [9])]


def test_a_key_gets_a_row_with_the_push_that_reaches_the_count(
    make: Callable[..., Trained], pull: Callable[..., NDArray[np.float32]]
) -> None:
    trained = make(min_count=3)
    initial = pull(trained.store, [7, 8])
    for _ in range(2):
        trained.push([7])
        np.testing.assert_array_equal(pull(trained.store, [7, 8]), initial)
        assert trained.store.rows() == {"C1": 0}
    trained.push([8, 7, 9])
    np.testing.assert_array_equal(pull(trained.store, [7, 8]), initial - np.array([0.5, 0], np.float32))
    assert trained.keys() == {7}
    assert trained.counts == AdmissionCounts(admitted=1, refused=4)


def test_keys_that_come_once_get_no_rows_beside_those_that_come_often(make: Callable[..., Trained]) -> None:
    trained = make(min_count=3)
    random = np.random.default_rng(0)
    common = list(range(20_000))
    rare = random.integers(1 << 40, 1 << 62, 60_000).tolist()
    for first in range(0, 60_000, 20_000):
        trained.push(common + rare[first : first + 20_000])
    with_rows = trained.keys()
    assert set(common) <= with_rows
    assert len(with_rows - set(common)) < 0.01 * len(rare)


def test_sketches_forget_so_that_rare_keys_do_not_fill_them(make: Callable[..., Trained]) -> None:
    trained = make(min_count=2)
    for key in ONE_BUCKET:  # one bucket's share of forty thousand keys
        trained.push([key])
    assert len(trained.keys()) < len(ONE_BUCKET) / 2
    random = np.random.default_rng(1)
    before = trained.counts.admitted
    for _ in range(20):
        trained.push(random.integers(1 << 40, 1 << 62, 100_000).tolist())
    assert trained.counts.admitted - before < 0.15 * 2_000_000


def test_a_table_without_eviction_pays_no_byte(make_spec: Callable[..., TableSpec]) -> None:
    spec = make_spec(dimension=16)
    admitted = replace(spec, admission=AdmissionSpec(min_count=2))
    evicted = replace(spec, eviction=EvictionSpec(ttl_batches=1))
    assert RowLayout.of(spec) == RowLayout.of(admitted)
    assert "touched" not in (RowLayout.of(spec).dtype.names or ())
    assert RowLayout.of(evicted).stride - RowLayout.of(spec).stride in (0, 8)


def test_rows_that_no_push_touches_leave_after_their_time_to_live(make: Callable[..., Trained]) -> None:
    trained = make(ttl=16)
    trained.push([1, 2, 3])
    for _ in range(15):
        trained.push([3])
        assert trained.keys() == {1, 2, 3}
    for _ in range(1 + 16 // 8):
        trained.push([3])
    assert trained.keys() == {3}
    assert trained.counts.evicted == 2


def test_an_evicted_row_starts_anew(make: Callable[..., Trained], pull: Callable[..., NDArray[np.float32]]) -> None:
    trained = make(ttl=8)
    initial = pull(trained.store, [1])
    trained.push([1])
    for _ in range(10):
        trained.push([2])
    np.testing.assert_array_equal(pull(trained.store, [1]), initial)
    trained.push([1])
    np.testing.assert_array_equal(pull(trained.store, [1]), initial - np.float32(0.5))


def test_the_rows_pushed_least_often_leave_first(make: Callable[..., Trained]) -> None:
    trained = make(most=16 * BUCKETS)  # sixteen rows per bucket; a sweep leaves fourteen
    often, seldom = ONE_BUCKET[:14], ONE_BUCKET[14:30]
    for _ in range(3):
        trained.push(often)
    for key in seldom:
        trained.push([key])
        while trained.store.clock % 16:  # the bucket is due once every sixteen batches
            trained.push([often[0]])
        assert len(trained.keys()) <= 16
        assert trained.keys() >= set(often)
    assert trained.counts.evicted > 0


def test_what_was_frequent_long_ago_makes_room(make: Callable[..., Trained]) -> None:
    trained = make(most=BUCKETS)
    old, new = ONE_BUCKET[:2]
    for _ in range(7):
        trained.push([old])
    trained.store.clock += 4 * HALF_LIFE_BATCHES
    for _ in range(16):
        trained.push([new])
    assert trained.keys() == {new}


@pytest.mark.parametrize("most", [BUCKETS, 10_000])
def test_a_table_keeps_to_its_rows(make: Callable[..., Trained], most: int) -> None:
    trained = make(most=most)
    random = np.random.default_rng(2)
    pushed: Counter[int] = Counter()
    for _ in range(60):
        batch = np.unique(np.minimum(random.zipf(1.2, 2000), 1 << 40)).tolist()
        pushed.update(batch)
        trained.push(batch)
    period = 16
    assert trained.store.rows()["C1"] <= most + 2000 * period
    if most > BUCKETS:  # otherwise a bucket may have to choose between two keys that are in all batches
        assert trained.keys() >= {key for key, times in pushed.items() if times == 60}


def test_time_to_live_and_most_rows_go_together(make: Callable[..., Trained]) -> None:
    trained = make(ttl=8, most=BUCKETS)
    trained.push(ONE_BUCKET[:3])
    assert len(trained.keys()) == 1
    for _ in range(10):
        trained.push([3])
    assert trained.keys() == {3}
