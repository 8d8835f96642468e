"""How far parity may lag behind pushes, and when a push waits for it."""

import hypothesis.strategies as st
from hypothesis import given

from emberscale_trainer.server.lag import LagBound, ParityLag

BOUND = LagBound(pushes=4, nbytes=1000, item_pushes=2, item_bytes=400)


def test_without_a_bound_each_push_is_an_item_and_waits_for_it() -> None:
    lag = ParityLag(None)
    assert lag.pushed((0, 7), 100)
    assert lag.send(1, 100) == ((0, 7),)
    assert (lag.is_async, lag.must_store(1), lag.pushes, lag.nbytes) == (False, 1, 1, 100)
    lag.stored(1)
    assert (lag.pushes, lag.nbytes) == (0, 0)


def test_pushes_gather_until_there_are_enough_of_them() -> None:
    lag = ParityLag(BOUND)
    assert [lag.pushed((0, 7), 10), lag.pushed((0, 9), 20)] == [False, True]
    assert lag.send(1, 20) == ((0, 7), (0, 9))
    assert not lag.has_gathered


def test_large_changes_become_an_item_at_once() -> None:
    assert ParityLag(BOUND).pushed((0, 7), 400)


def test_a_push_waits_for_the_oldest_items_while_there_are_more_pushes_than_the_bound() -> None:
    lag = ParityLag(BOUND)
    for number, batch in enumerate((0, 2, 4), 1):
        lag.pushed((0, batch), 10)
        lag.pushed((0, batch + 1), 20)
        assert lag.must_store(number - 1) == (0 if number < 3 else 1)
        lag.send(number, 20)
    assert (lag.must_store(3), lag.pushes) == (1, 6)
    lag.stored(1)
    assert (lag.must_store(3), lag.pushes) == (0, 4)


def test_a_push_waits_while_there_are_more_bytes_than_the_bound() -> None:
    lag = ParityLag(BOUND)
    lag.pushed((0, 0), 700)
    lag.send(1, 700)
    assert lag.must_store(1) == 0
    lag.pushed((0, 1), 350)
    assert (lag.must_store(1), lag.nbytes) == (1, 1050)


def test_pushes_that_find_no_memory_to_become_an_item_count_as_too_many_beyond_the_bound() -> None:
    lag = ParityLag(BOUND)
    for number in range(BOUND.pushes):
        lag.pushed((0, number), 10)
    assert not lag.gathers_too_much
    lag.pushed((0, BOUND.pushes), 10)
    assert lag.gathers_too_much
    lag.send(1, 10)
    assert not lag.gathers_too_much


@given(st.lists(st.tuples(st.sampled_from(("push", "send", "store", "answer")), st.integers(1, 900)), max_size=60))
def test_no_more_answered_pushes_than_the_bound_are_ever_left_to_store(steps: list[tuple[str, int]]) -> None:
    lag, last, stored = ParityLag(BOUND), 0, 0
    pending, order = 0, list[int]()  # the item of each push, in their order; 0: it is in none yet
    for what, size in steps:
        match what:
            case "push":
                pending += size
                order.append(0)
                lag.pushed((0, len(order)), pending)
            case "send":
                last += 1
                lag.send(last, pending)
                pending, order = 0, [item or last for item in order]
            case "store" if stored < last:
                stored += 1
                lag.stored(stored)
            case "answer":
                number = lag.must_store(last)
                left = [item for item in order if not item or item > max(number, stored)]
                gathered = sum(not item for item in order)
                assert len(left) <= max(BOUND.pushes, gathered), "what has gathered is sent before it exceeds the bound"
    assert lag.pushes == sum(not item or item > stored for item in order)
