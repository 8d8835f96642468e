"""Applied batches of several epochs, on several parameter servers."""

from collections.abc import Callable, Collection, Mapping
from functools import reduce

from emberscale_jobmaster import ranges
from emberscale_jobmaster.ranges import Ranges

Applied = Mapping[int, Ranges]
"""Batch numbers by epoch."""


def on_all(servers: Collection[Applied]) -> dict[int, Ranges]:
    """What is applied on every server."""
    return _combined(servers, ranges.intersection)


def on_any(servers: Collection[Applied]) -> dict[int, Ranges]:
    """What is applied on at least one server."""
    return _combined(servers, ranges.union)


def minus(one: Applied, other: Applied) -> dict[int, Ranges]:
    """What is in the first and not in the second."""
    left = {epoch: ranges.difference(batches, other.get(epoch, ())) for epoch, batches in one.items()}
    return {epoch: batches for epoch, batches in left.items() if batches}


def differing(one: Applied, other: Applied) -> str:
    """Where the two differ, for people: the first batch that only one of them has. Empty where they are equal."""
    for present, absent in ((one, other), (other, one)):
        for epoch, batches in sorted(minus(present, absent).items()):
            return f"batch {batches[0][0]} of epoch {epoch}"
    return ""


def _combined(servers: Collection[Applied], combine: Callable[[Ranges, Ranges], Ranges]) -> dict[int, Ranges]:
    epochs = sorted({epoch for server in servers for epoch in server})
    combined = {epoch: reduce(combine, [server.get(epoch, ()) for server in servers]) for epoch in epochs}
    return {epoch: batches for epoch, batches in combined.items() if batches}
