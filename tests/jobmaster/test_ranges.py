from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from emberscale_jobmaster import ranges
from emberscale_jobmaster.ranges import minus, on_all, on_any

NUMBERS = st.sets(st.integers(0, 40))


def of(numbers: set[int]) -> ranges.Ranges:
    return ranges.normalised((number, number + 1) for number in numbers)


def back(found: ranges.Ranges) -> set[int]:
    return {number for start, stop in found for number in range(start, stop)}


@given(NUMBERS, NUMBERS)
def test_ranges_are_sets(one: set[int], other: set[int]) -> None:
    assert back(ranges.union(of(one), of(other))) == one | other
    assert back(ranges.intersection(of(one), of(other))) == one & other
    assert back(ranges.difference(of(one), of(other))) == one - other
    assert ranges.count(of(one)) == len(one)


@given(NUMBERS, NUMBERS)
def test_results_are_ascending_and_never_touch(one: set[int], other: set[int]) -> None:
    for combine in (ranges.union, ranges.intersection, ranges.difference):
        found = combine(of(one), of(other))
        assert all(start < stop for start, stop in found)
        assert all(left[1] < right[0] for left, right in pairwise(found))


@given(NUMBERS)
def test_the_wire_form_reads_back(numbers: set[int]) -> None:
    assert ranges.unflattened(ranges.flattened(of(numbers))) == of(numbers)


@given(st.lists(st.dictionaries(st.integers(0, 2), NUMBERS), min_size=1, max_size=3))
def test_servers_agree_on_what_all_and_any_have_applied(servers: list[dict[int, set[int]]]) -> None:
    applied = [{epoch: of(batches) for epoch, batches in server.items()} for server in servers]
    for epoch in range(3):
        sets = [server.get(epoch, set()) for server in servers]
        assert back(on_all(applied).get(epoch, ())) == set.intersection(*sets)
        assert back(on_any(applied).get(epoch, ())) == set.union(*sets)
        assert back(minus(on_any(applied), applied[0]).get(epoch, ())) == set.union(*sets) - sets[0]
