"""The record of what a parameter server has applied."""

import hypothesis.strategies as st
from hypothesis import given

from emberscale_trainer.partition import AppliedBatches

batches = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5000)), max_size=60)


def record(names: list[tuple[int, int]]) -> AppliedBatches:
    applied = AppliedBatches()
    for epoch, number in names:
        applied.record(epoch, number)
    return applied


@given(batches)
def test_it_knows_exactly_what_was_recorded(names: list[tuple[int, int]]) -> None:
    applied = record(names)
    for name in names:
        assert name in applied
    from_ranges = {
        (epoch, number)
        for epoch in applied.epochs()
        for first, stop in applied.ranges(epoch)
        for number in range(first, stop)
    }
    assert from_ranges == set(names)


@given(batches)
def test_runs_count_every_application_and_survive_a_round_trip(names: list[tuple[int, int]]) -> None:
    applied = record(names)
    runs = {epoch: applied.runs(epoch) for epoch in applied.epochs()}
    for epoch, number in set(names):
        (times,) = [times for first, stop, times in runs[epoch] if first <= number < stop]
        assert times == names.count((epoch, number))
    restored = AppliedBatches.from_runs(runs.items())
    assert {epoch: restored.runs(epoch) for epoch in restored.epochs()} == runs


def test_a_copy_does_not_follow_the_original() -> None:
    applied = record([(0, 1)])
    copy = applied.copy()
    applied.record(0, 2)
    assert (0, 2) not in copy


def test_together_servers_have_applied_what_each_of_them_has() -> None:
    merged = AppliedBatches.merged([record([(0, 0), (0, 1), (0, 1)]), record([(0, 1), (0, 5)])])
    assert merged.ranges(0) == [(1, 2)]
    assert merged.runs(0) == [(1, 2, 2)]


@given(batches, batches)
def test_records_of_different_lengths_are_merged(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    merged = AppliedBatches.merged([record(one), record(other)])
    assert {name for name in (*one, *other) if name in merged} == {*one} & {*other}
    assert merged.total == len({*one} & {*other})
