"""The parts of the calibrator, against plain counting: logs, estimates, thresholds and hot sets."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberscale_trainer.data.records import IdLists
from emberscale_trainer.hot.access import Accesses, AccessLog, IdRecords
from emberscale_trainer.hot.classifier import HotSet, HotTable, InputProcessor, classify_rows
from emberscale_trainer.hot.optimizer import calibrate_threshold
from emberscale_trainer.hot.profiler import CHUNK_ENTRIES, CHUNKS, TableProfile

ids = st.one_of(st.integers(-20, 20), st.sampled_from([-(2**63), -(2**63) + 1, 2**63 - 1, -1, 0]))
ROW = 80


def logged(*parts: list[int]) -> Accesses:
    log = AccessLog()
    for part in parts:
        log.add(np.array(part, dtype=np.int64))
    return log.entries()


def power_law(rows: int, seed: int = 1, exponent: float = 1.2, scale: float = 20_000) -> Accesses:
    """Returns rows in a random order, as a hash leaves them."""
    counts = np.maximum(1, scale * np.arange(1, rows + 1) ** -exponent).astype(np.int64)
    return Accesses(np.arange(rows), np.random.default_rng(seed).permutation(counts))


@given(st.lists(st.lists(ids, max_size=60), max_size=8))
def test_a_log_counts_as_a_dictionary_does(parts: list[list[int]]) -> None:
    entries = logged(*parts)
    expected = Counter(one for part in parts for one in part)
    assert dict(zip(entries.keys.tolist(), entries.counts.tolist(), strict=True)) == expected
    assert entries.total == sum(len(part) for part in parts)


def test_a_log_grows_as_far_as_it_must() -> None:
    many = np.random.default_rng(0).integers(0, 50_000, 400_000)
    log = AccessLog()
    for part in np.array_split(many, 7):
        log.add(part)
    entries = log.entries()
    keys, counts = np.unique(many, return_counts=True)
    order = np.argsort(entries.keys)
    assert np.array_equal(entries.keys[order], keys)
    assert np.array_equal(entries.counts[order], counts)
    assert (log.rows, log.accesses) == (keys.size, many.size)


def test_neighbours_in_a_log_are_a_random_sample_of_its_rows() -> None:
    """Chunks of neighbours are representative, although popular ids came first and are small numbers."""
    entries = logged([number for number in range(60_000) for _ in range(9 if number < 6_000 else 1)])
    shares = [(chunk > 1).mean() for chunk in np.array_split(entries.counts, 50)]
    assert np.mean(shares) == pytest.approx(0.1, rel=0.02)
    assert np.std(shares) == pytest.approx((0.1 * 0.9 / 1200) ** 0.5, rel=0.4)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.floats(0.01, 1))
def test_rows_that_cover_a_share_are_as_few_as_can_be(counts: list[int], share: float) -> None:
    entries = Accesses(np.arange(len(counts)), np.array(counts))
    rows = entries.rows_covering(share)
    falling = sorted(counts, reverse=True)
    assert sum(falling[:rows]) >= share * sum(counts) - 1e-6
    assert sum(falling[: rows - 1]) < share * sum(counts) + 1e-6


def test_rows_not_seen_yet_are_told_by_those_seen_once() -> None:
    drawn = np.random.default_rng(0).integers(0, 1000, 1500)
    entries = logged(drawn.tolist())
    assert entries.keys.size < 800
    assert entries.estimated_rows == pytest.approx(1000, rel=0.1)


def test_a_small_log_is_counted_and_a_large_one_estimated() -> None:
    random = np.random.default_rng(0)
    small = TableProfile.of(power_law(CHUNKS * CHUNK_ENTRIES), ROW, random)
    large = TableProfile.of(power_law(200_000), ROW, random)
    assert (small.hot_rows(1e-4).half_width, small.chunks.size) == (0.0, CHUNKS * CHUNK_ENTRIES)
    assert large.hot_rows(1e-4).half_width > 0.0
    assert large.chunks.shape == (CHUNKS, CHUNK_ENTRIES)


def test_the_interval_holds_the_count_as_often_as_it_says() -> None:
    """Of 400 draws, a 95% interval misses 20 on average; 40 would be 4.6 standard deviations more."""
    entries = power_law(120_000)
    threshold = 2.5 / entries.total
    actual = int((entries.counts >= 2.5).sum())
    missed = 0
    for seed in range(400):
        estimate = TableProfile.of(entries, ROW, np.random.default_rng(seed)).hot_rows(threshold, 0.95)
        missed += abs(estimate.mean - actual) > estimate.half_width
    assert 2 <= missed < 40


def test_the_interval_is_that_of_the_papers_equation() -> None:
    profile = TableProfile.of(power_law(100_000), ROW, np.random.default_rng(3))
    hot = (profile.chunks >= profile.cutoff(1e-5)).sum(axis=1)
    n, total = 35, 100_000 // 1024
    expected = 3.601 * np.sqrt((total - n) / total * hot.std(ddof=1) ** 2 / n)  # t(34) at 99.9%, from a printed table
    assert profile.hot_rows(1e-5).half_width * 1024 / 100_000 == pytest.approx(expected, rel=1e-3)


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=60), min_size=1, max_size=5), st.integers(0, 20_000))
def test_a_hot_set_fits_its_budget_and_no_larger_one_does(tables: list[list[int]], budget: int) -> None:
    logs = [Accesses(np.arange(len(counts)), np.array(counts)) for counts in tables]
    profiles = [TableProfile.of(log, ROW, np.random.default_rng(0)) for log in logs]
    calibration = calibrate_threshold(profiles, budget)
    hot = classify_rows(logs, [ROW] * len(logs), calibration)
    assert hot.bytes == ROW * hot.rows <= budget
    if calibration.threshold < 1 and not calibration.whole:
        for table, log in zip(hot.tables, logs, strict=True):
            assert set(table.keys.tolist()) == set(log.keys[log.counts >= calibration.threshold * log.total].tolist())
    # with the rows that a slightly lower threshold adds, the hot set does not fit
    lower = 0.99 * calibration.threshold
    size = sum(
        profile.estimated_bytes if number in calibration.whole else ROW * int((log.counts >= lower * log.total).sum())
        for number, (log, profile) in enumerate(zip(logs, profiles, strict=True))
    )
    everything = all(lower * log.total < 1 for log in logs)
    assert everything or size > budget


def test_a_budget_that_was_estimated_too_low_is_kept_all_the_same() -> None:
    entries = power_law(200_000)
    profile = TableProfile.of(entries, ROW, np.random.default_rng(0))
    calibration = calibrate_threshold([profile], 4 << 20)
    counted = int((entries.counts >= calibration.threshold * entries.total).sum())
    smaller = type(calibration)(ROW * (counted - 100), calibration.threshold, frozenset())
    hot = classify_rows([entries], [ROW], smaller)
    assert 0 < hot.bytes <= smaller.budget
    assert hot.threshold > calibration.threshold


def test_small_tables_are_hot_as_a_whole_within_half_of_the_budget() -> None:
    logs = [Accesses(np.arange(rows), np.full(rows, 5)) for rows in (300, 4000, 20_000)]
    profiles = [TableProfile.of(log, ROW, np.random.default_rng(0)) for log in logs]
    assert calibrate_threshold(profiles, 10 << 20).whole == {0, 1}  # the third takes more than 1 MiB
    assert calibrate_threshold(profiles, 500_000).whole == {0}
    assert calibrate_threshold(profiles, 30_000).whole == frozenset()


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be negative"):
        calibrate_threshold([], -1)


def hot_set(*tables: tuple[set[int], bool]) -> HotSet:
    keys = [np.array(sorted(one), dtype=np.int64) for one, _ in tables]
    return HotSet(tuple(HotTable(k, whole, 0.5) for k, (_, whole) in zip(keys, tables, strict=True)), 0, 0.1)


@given(
    st.lists(st.tuples(ids, ids, st.lists(ids, max_size=4)), max_size=30),
    st.tuples(st.sets(ids), st.booleans()),
    st.tuples(st.sets(ids), st.booleans()),
    st.tuples(st.sets(ids), st.booleans()),
)
def test_a_record_is_hot_if_every_id_of_it_is(
    records: list[tuple[int, int, list[int]]],
    first: tuple[set[int], bool],
    second: tuple[set[int], bool],
    third: tuple[set[int], bool],
) -> None:
    single = np.array([record[:2] for record in records], dtype=np.int64).reshape(len(records), 2)
    offsets = np.cumsum([0, *(len(record[2]) for record in records)])
    values = np.array([one for record in records for one in record[2]], dtype=np.int64)
    tags = InputProcessor(hot_set(first, second, third), 2).tag(IdRecords(single, (IdLists(values, offsets),)))
    expected = [
        all(whole or key in keys for key, (keys, whole) in zip(record[:2], (first, second), strict=True))
        and (third[1] or set(record[2]) <= third[0])
        for record in records
    ]
    assert tags.tolist() == expected


@given(st.lists(st.lists(ids, max_size=4), min_size=1, max_size=20), st.data())
def test_taking_and_joining_records_keeps_their_lists(lists: list[list[int]], data: st.DataObject) -> None:
    offsets = np.cumsum([0, *(len(one) for one in lists)])
    whole = IdRecords(
        np.arange(len(lists)).reshape(-1, 1),
        (IdLists(np.array([one for part in lists for one in part], dtype=np.int64), offsets),),
    )
    order = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=20))
    parts = [whole.take(np.array([number])) for number in order]
    joined = IdRecords.join(parts)
    taken = joined.lists[0]
    found = [taken.values[taken.offsets[n] : taken.offsets[n + 1]].tolist() for n in range(len(order))]
    assert found == [lists[number] for number in order]
    assert joined.ids[:, 0].tolist() == order
