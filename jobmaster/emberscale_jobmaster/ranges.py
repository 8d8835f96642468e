"""Sets of batch numbers as half-open ranges, and the batches that several parameter servers have applied.

Ranges are ascending and disjoint, and none touches the next.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from operator import itemgetter

Ranges = tuple[tuple[int, int], ...]


def normalised(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Returns any [start, stop) pairs as ranges, without empty ones."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(pair for pair in pairs if pair[0] < pair[1]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)


def union(one: Ranges, other: Ranges) -> Ranges:
    """Returns the union."""
    return normalised((*one, *other))


def including(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Returns the ranges with [start, stop), which is not empty; those that it does not touch stay the same objects."""
    first = bisect_left(ranges, start, key=itemgetter(1))
    last = bisect_right(ranges, stop, key=itemgetter(0))
    if first < last:
        start, stop = min(start, ranges[first][0]), max(stop, ranges[last - 1][1])
    return (*ranges[:first], (start, stop), *ranges[last:])


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """Returns the intersection."""
    result = []
    left, right = 0, 0
    while left < len(one) and right < len(other):
        start, stop = max(one[left][0], other[right][0]), min(one[left][1], other[right][1])
        if start < stop:
            result.append((start, stop))
        if one[left][1] <= other[right][1]:
            left += 1
        else:
            right += 1
    return tuple(result)


def difference(one: Ranges, other: Ranges) -> Ranges:
    """Returns the numbers of the first ranges that are not in the second."""
    result = []
    right = 0
    for start, stop in one:
        while right < len(other) and other[right][1] <= start:
            right += 1
        scan = right
        while scan < len(other) and other[scan][0] < stop:
            if start < other[scan][0]:
                result.append((start, other[scan][0]))
            start = max(start, other[scan][1])
            scan += 1
        if start < stop:
            result.append((start, stop))
    return tuple(result)


def count(ranges: Ranges) -> int:
    """Returns the count of numbers in all ranges."""
    return sum(stop - start for start, stop in ranges)


def flattened(ranges: Ranges) -> list[int]:
    """Returns the ranges as on the wire: start, stop, start, stop, ..."""
    return [number for pair in ranges for number in pair]


def unflattened(numbers: Sequence[int]) -> Ranges:
    """Returns the ranges of `start, stop, start, stop, ...`. Raises ValueError unless each stop exceeds its start."""
    if len(numbers) % 2 or any(later <= earlier for earlier, later in zip(numbers[::2], numbers[1::2], strict=True)):
        raise ValueError(f"{len(numbers)} numbers are not ranges: expected start, stop, start, stop, ...")
    return normalised(zip(numbers[::2], numbers[1::2], strict=True))


Applied = Mapping[int, Ranges]
"""Batch numbers by epoch."""


def on_all(servers: Collection[Applied]) -> dict[int, Ranges]:
    """Returns the batches that every server has applied."""
    return _combined(servers, intersection)


def on_any(servers: Collection[Applied]) -> dict[int, Ranges]:
    """Returns the batches that at least one server has applied."""
    return _combined(servers, union)


def minus(one: Applied, other: Applied) -> dict[int, Ranges]:
    """Returns the batches of the first, by epoch, that are not in the second; no epoch without any."""
    left = {epoch: difference(batches, other.get(epoch, ())) for epoch, batches in one.items()}
    return {epoch: batches for epoch, batches in left.items() if batches}


def differing(one: Applied, other: Applied) -> str:
    """Describes the first batch that only one of the two has; empty if they are equal."""
    for present, absent in ((one, other), (other, one)):
        for epoch, batches in sorted(minus(present, absent).items()):
            return f"batch {batches[0][0]} of epoch {epoch}"
    return ""


def _combined(servers: Collection[Applied], combine: Callable[[Ranges, Ranges], Ranges]) -> dict[int, Ranges]:
    epochs = sorted({epoch for server in servers for epoch in server})
    combined = {epoch: reduce(combine, [server.get(epoch, ()) for server in servers]) for epoch in epochs}
    return {epoch: batches for epoch, batches in combined.items() if batches}
