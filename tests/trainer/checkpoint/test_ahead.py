"""Items that are read ahead."""

import threading
from collections.abc import Iterator

import pytest

from emberscale_trainer.checkpoint.work import ahead, each_ahead


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


def test_what_is_made_of_items_comes_in_their_order() -> None:
    assert list(each_ahead(str, range(100), 3)) == [str(item) for item in range(100)]


def test_an_error_in_making_one_is_told_while_others_hang() -> None:
    hangs, ended = threading.Event(), threading.Event()

    def make(item: int) -> int:
        if item == 0:
            hangs.wait(60)
            ended.set()
        return 12 // (1 - item)

    made = each_ahead(make, range(1000), 2)
    with pytest.raises(ZeroDivisionError):
        next(made)
    assert not ended.is_set()
    hangs.set()


def test_a_few_items_are_made_at_once_and_no_more() -> None:
    both = threading.Barrier(2, timeout=30)
    begun: list[int] = []

    def make(item: int) -> int:
        begun.append(item)
        if item < 2:
            both.wait()  # breaks unless another thread makes the other one
        return item

    made = each_ahead(make, range(1000), 2)
    assert next(made) == 0
    made.close()
    assert len(begun) <= 3


def test_an_end_waits_for_the_items_under_way() -> None:
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def make(item: int) -> int:
        if item == 1:
            begun.set()
            go_on.wait(30)
            ended.set()
        return item

    made = each_ahead(make, range(10), 1)
    assert next(made) == 0
    assert begun.wait(30)
    go_on.set()
    made.close()
    assert ended.is_set()
