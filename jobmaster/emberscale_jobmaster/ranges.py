"""Sets of batch numbers as half-open ranges: ascending, disjoint, none touching the next."""

from collections.abc import Iterable, Sequence

Ranges = tuple[tuple[int, int], ...]


def normalised(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Any [start, stop) pairs as ranges; empty ones vanish."""
    result: list[tuple[int, int]] = []
    for start, stop in sorted(pair for pair in pairs if pair[0] < pair[1]):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((start, stop))
    return tuple(result)


def union(one: Ranges, other: Ranges) -> Ranges:
    """What is in either."""
    return normalised((*one, *other))


def intersection(one: Ranges, other: Ranges) -> Ranges:
    """What is in both."""
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
    """What is in the first and not in the second."""
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
    """How many numbers there are in all ranges together."""
    return sum(stop - start for start, stop in ranges)


def flattened(ranges: Ranges) -> list[int]:
    """As on the wire: start, stop, start, stop, ..."""
    return [number for pair in ranges for number in pair]


def unflattened(numbers: Sequence[int]) -> Ranges:
    """From the wire. Raises ValueError where the numbers do not ascend in pairs."""
    if len(numbers) % 2 or any(later <= earlier for earlier, later in zip(numbers[::2], numbers[1::2], strict=True)):
        raise ValueError(f"{len(numbers)} numbers are not ranges: expected start, stop, start, stop, ...")
    return normalised(zip(numbers[::2], numbers[1::2], strict=True))
