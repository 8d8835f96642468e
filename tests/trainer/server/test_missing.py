"""Rows that a server knows the keys of, and whose bytes have yet to arrive."""

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.partition import Ownership, buckets_of
from emberscale_trainer.server.missing import MissingPart, MissingRows
from emberscale_trainer.server.moves import Transfer
from eventually import unwrap
from moves import table_of


def ints(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def missing_rows(**tables: list[tuple[int, int]]) -> MissingRows:
    """Returns missing rows by key and place, of tables `t0`, `t1` and so on."""
    found = MissingRows(Transfer(1, table_of(2, [""]), 0, Ownership.of_nothing(), lost=(0,), on_demand=True))
    for name, pairs in tables.items():
        found.tell(int(name[1:]), np.array(pairs, np.int64).reshape(-1))
    return found


def request(rows: MissingRows, *keys: list[int]) -> MissingPart | None:
    return rows.of_request((table, None, ints(*them)) for table, them in enumerate(keys))


def test_a_request_waits_for_exactly_its_missing_rows() -> None:
    rows = missing_rows(t0=[(7, 70), (3, 30), (5, 50)], t2=[(3, 33)])
    rows.begin(1.0)
    assert rows.count == 4
    assert request(rows, [4], [3, 7], [5]) is None, "keys of other tables"
    part = unwrap(request(rows, [5, 4], [], [3]))
    other = unwrap(request(rows, [3], [], []))
    rows.arrived(0, ints(5), 2.0)
    assert not part.is_there()
    rows.arrived(2, ints(3), 3.0)
    assert part.is_there()
    assert not other.is_there()
    assert (rows.count, rows.changed_at) == (2, 3.0)
    assert request(rows, [5], [], [3]) is None


def test_a_row_is_wanted_once() -> None:
    rows = missing_rows(t0=[(7, 70), (3, 30)], t1=[(3, 31)])
    rows.begin(0.0)
    assert rows.take_wanted().tolist() == []
    assert request(rows, [7, 3, 3], []) is not None
    assert request(rows, [3], [3]) is not None
    assert sorted(rows.take_wanted().tolist()) == [30, 31, 70]
    assert rows.take_wanted().tolist() == []


def test_rows_that_arrive_before_the_switch_are_not_missing() -> None:
    rows = missing_rows(t0=[(7, 70), (3, 30)])
    rows.arrived(0, ints(3), 0.0)
    rows.begin(1.0)
    assert rows.count == 1
    assert rows.still_missing(0, ints(3, 7, 8)).tolist() == [False, True, False]
    assert rows.still_missing(4, ints(3)).tolist() == [False]


def test_a_request_waits_for_the_sketches_of_its_buckets() -> None:
    """Their keys are others of these buckets."""
    beside, elsewhere = np.flatnonzero(buckets_of(np.arange(5000)) == 7)[:2], ints(9999)
    assert buckets_of(elsewhere) != 7
    rows = missing_rows(t0=[(int(beside[0]), 70), (9999, 99)], t1=[(3, 30)])
    rows.begin(1.0)
    part = unwrap(rows.of_request([(1, 0, beside[1:])]))
    assert rows.take_wanted().tolist() == [70]
    rows.arrived(0, elsewhere, 2.0)
    assert not part.is_there()
    rows.arrived(0, beside[:1], 2.0)
    assert part.is_there()
