"""The rows of a lost member that one holder can decode now, in the order in which it does: wanted ones first.

This module has no clock, thread, socket or row.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]
"""Places in a stripe, from 0, distinct: int64[n]."""


@dataclass(frozen=True, eq=False)
class Alone:
    """Places of a stripe that only the lost member's rows are left in."""

    table: int
    stripe: int
    places: Places


class _Stripe:
    """What is known of the row at each place of a stripe, bool[places] each."""

    def __init__(self, places: int) -> None:
        self.decodable = np.zeros(places, np.bool_)
        self.wanted = np.zeros(places, np.bool_)
        self.taken = np.zeros(places, np.bool_)


class DecodableRows:
    """A queue of rows that can be decoded, each of which is taken once.

    In a group of two, no live member has rows in the stripes that a holder decodes, so all rows can be decoded at once:
    `take` returns few at a time.
    """

    def __init__(self, row_bytes: Sequence[int]) -> None:
        """`row_bytes` are the bytes of a row of each table."""
        self._row_bytes = row_bytes
        self._stripes: dict[tuple[int, int], _Stripe] = {}
        self._first: deque[Alone] = deque()
        self._others: deque[Alone] = deque()

    def begin(self, table: int, stripe: int, places: int) -> None:
        """Begins with a stripe of so many places, none of whose rows can be decoded yet."""
        self._stripes[table, stripe] = _Stripe(places)

    def clear(self) -> None:
        """Forgets all rows."""
        self._stripes.clear()
        self._first.clear()
        self._others.clear()

    def add(self, table: int, stripe: int, places: Places) -> None:
        """Adds rows that can be decoded; those that were added before stay where they are."""
        known = self._stripes[table, stripe]
        new = places[~known.decodable[places]]
        known.decodable[new] = True
        wanted = known.wanted[new]
        for queue, some in ((self._first, new[wanted]), (self._others, new[~wanted])):
            if len(some):
                queue.append(Alone(table, stripe, some))

    def want(self, table: int, stripe: int, places: Places) -> None:
        """Puts rows before others, now or once they can be decoded. Ignores stripes that others decode.

        Raises ValueError for places that do not exist.
        """
        known = self._stripes.get((table, stripe))
        if known is None:
            return
        require_places(table, stripe, places, len(known.wanted))
        new = places[~known.wanted[places]]
        known.wanted[new] = True
        waiting = new[known.decodable[new] & ~known.taken[new]]
        if len(waiting):
            self._first.append(Alone(table, stripe, waiting))

    @property
    def has_wanted(self) -> bool:
        """Whether `take` may return rows that are wanted."""
        return bool(self._first)

    @property
    def has_more(self) -> bool:
        """Whether `take` may return any rows."""
        return bool(self._first or self._others)

    def take(self, most_bytes: int) -> list[Alone]:
        """Takes rows of about this many bytes, or all that are left."""
        found: list[Alone] = []
        for queue in (self._first, self._others):
            while queue and most_bytes > 0:
                one = queue.popleft()
                taken, row_bytes = self._stripes[one.table, one.stripe].taken, self._row_bytes[one.table]
                places, most = one.places[~taken[one.places]], -(-most_bytes // row_bytes)
                if len(places) > most:
                    queue.appendleft(Alone(one.table, one.stripe, places[most:]))
                    places = places[:most]
                if len(places):
                    taken[places] = True
                    most_bytes -= row_bytes * len(places)
                    found.append(Alone(one.table, one.stripe, places))
        return found

    def give_back(self, taken: Sequence[Alone]) -> None:
        """Has `take` return these rows again, before others."""
        for one in reversed(taken):
            self._stripes[one.table, one.stripe].taken[one.places] = False
            self._first.appendleft(one)


def require_places(table: int, stripe: int, places: Places, count: int) -> None:
    """Raises ValueError for places that a stripe with so many does not have."""
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < count:
        raise ValueError(f"stripe {stripe} of table {table} has no places {places.min()} to {places.max()}")
