"""Rows leave the parity in any order, and whatever is pushed or retired meanwhile, nothing of them stays."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_trainer.table import DeltaLog, TableStore
from emberscale_trainer.table.deltas import DELTA_BYTES
from examples import examples

# rows of 400 kB, so that a few keys fill segments
DIMENSION, KEYS = 100_000, 20
TABLE = TableSpec(0, "C0", 0, DIMENSION, OptimizerSpec(type=OptimizerType.SGD), InitializerSpec(), seed=3)
STORED = [(0,)]
SLOTS = st.sets(st.integers(0, 31), max_size=6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sets(st.integers(0, KEYS - 1), min_size=1, max_size=3)),
        st.tuples(st.just("retire"), st.sets(st.integers(0, KEYS - 1), min_size=1, max_size=2)),
        st.tuples(st.just("withdraw slots"), SLOTS),
        st.tuples(st.just("withdraw"), st.just(set[int]())),
        st.tuples(st.just("take"), st.just(set[int]())),
    ),
    max_size=12,
)


class Parity:
    """The sum of all deltas that a log has given, by slot."""

    def __init__(self, log: DeltaLog, stride: int) -> None:
        self._log = log
        self._stride = stride
        self.sums: dict[int, NDArray[np.uint8]] = {}

    def take(self) -> None:
        (deltas,) = self._log.take(STORED)
        at = 0
        while at < len(deltas):
            first, word = deltas[at : at + DELTA_BYTES].view("<u4").tolist()
            at += DELTA_BYTES
            for slot in range(first, first + (word & 0xFFFF)):
                before = self.sums.get(slot, np.zeros(self._stride, np.uint8))
                self.sums[slot] = before ^ deltas[at : at + self._stride]
                at += self._stride

    def slots(self) -> set[int]:
        return {slot for slot, row in self.sums.items() if row.any()}


def push(store: TableStore, keys: set[int]) -> None:
    gradients = np.ones(DIMENSION * len(keys), np.float32)
    store.push(np.array([len(keys)], np.uint32), np.array(sorted(keys), np.int64), gradients)


@settings(max_examples=examples(25), deadline=None)
@given(st.sets(st.integers(0, KEYS - 1)), STEPS, st.booleans(), st.sampled_from([None, 0, 1]))
def test_nothing_stays_of_rows_that_are_withdrawn(
    first: set[int], steps: list[tuple[str, set[int]]], merges: bool, needless: int | None
) -> None:
    store = TableStore([TABLE])
    if first:
        push(store, first)
    log = store.log_deltas(1, lambda _table, _segment: 0, merges=merges)
    parity, layout = Parity(log, store.layouts[0].stride), store.layouts[0]
    while not log.is_whole:
        log.fill(1 << 20)
    (end,) = log.begin_withdrawal(lambda _table, segment: segment != needless)
    withdrawn: set[int] = set()
    for what, numbers in steps:
        match what:
            case "push":
                push(store, numbers)
            case "retire":
                store.retire(0, np.array(sorted(numbers), np.int64))
            case "withdraw slots":
                log.withdraw_slots(0, np.array(sorted(numbers), np.int64))
                withdrawn |= numbers
            case "withdraw":
                log.withdraw(1)
            case _:
                parity.take()
        parity.take()
        (now,) = log.ends
        assert now <= end
        end = now
        needed = {slot for slot in parity.slots() if slot >> layout.slot_bits != needless}
        assert not [slot for slot in needed if slot >= end or slot in withdrawn]
    while not log.is_empty:
        log.withdraw(1 << 20)
    parity.take()
    assert {slot >> layout.slot_bits for slot in parity.slots()} <= {needless}
