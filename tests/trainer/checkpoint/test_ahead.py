"""Items that are read ahead."""

import threading
from collections.abc import Iterator

import pytest

from emberscale_trainer.checkpoint.work import ahead


def test_items_come_in_order() -> None:
    assert list(ahead(iter(range(100)), 3)) == list(range(100))


def test_an_error_comes_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    read = ahead(source(), 3)
    assert next(read) == 1
    with pytest.raises(ValueError, match="broken"):
        next(read)


def test_the_source_waits_for_a_slow_reader_and_ends_with_it() -> None:
    begun: list[int] = []
    ended = threading.Event()

    def source() -> Iterator[int]:
        try:
            for number in range(1000):
                begun.append(number)
                yield number
        finally:
            ended.set()

    read = ahead(source(), 2)
    assert next(read) == 0
    read.close()
    assert ended.wait(30)
    assert len(begun) < 10
