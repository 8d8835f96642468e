"""Rows that a server owns and knows the keys of, and whose bytes have yet to arrive: they are rebuilt from parity.

A request that names one of them waits until it is there, and has it sent before others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from emberscale_api.routing import BUCKETS
from emberscale_trainer.partition import buckets_of
from emberscale_trainer.server.moves import Transfer

_KEY, _PLACE = 0, 1

Named = tuple[int, int | None, NDArray[np.int64]]
"""A table of a request, as `TableStore.named_by` yields them: its number, that of its sketches, and keys, int64[n]."""


@dataclass(frozen=True, eq=False)
class MissingPart:
    """The missing rows of one request: the positions of their keys, int64[n], by table."""

    positions: Sequence[tuple["_Table", NDArray[np.int64]]]

    def is_there(self) -> bool:
        """Whether all of them have arrived."""
        return not any(table.missing[positions].any() for table, positions in self.positions)


class _Table:
    """The missing rows of one table. `keys` are sorted; `places` are where the parity has them (`parity.places`)."""

    def __init__(self, pairs: NDArray[np.int64]) -> None:
        ordered = pairs[np.argsort(pairs[:, _KEY], kind="stable")]
        self.keys, self.places = ordered[:, _KEY].copy(), ordered[:, _PLACE].copy()
        self.missing = np.ones(len(pairs), np.bool_)
        self.asked = np.zeros(len(pairs), np.bool_)

    def positions_of(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the position of each key, and whether its row is missing."""
        positions = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return positions, (self.keys[positions] == keys) & self.missing[positions]

    def missing_of(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions of those of the keys whose rows are missing."""
        positions, missing = self.positions_of(keys)
        return positions[missing]

    def missing_beside(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions of the rows that are missing in the buckets of these keys."""
        in_buckets = np.zeros(BUCKETS, np.bool_)
        in_buckets[buckets_of(keys)] = True
        return np.flatnonzero(self.missing & in_buckets[self._buckets])

    @cached_property
    def _buckets(self) -> NDArray[np.int64]:
        """The bucket of each key."""
        return buckets_of(self.keys)

    def want(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the places of those rows at these positions that nobody has wanted before."""
        new = np.unique(positions[~self.asked[positions]])
        self.asked[new] = True
        return self.places[new]


class MissingRows:
    """The missing rows of one server, since the move `transfer` in which it took them over. The caller holds the lock.

    `count`: how many rows are missing. `changed_at`: when the last ones arrived, on the caller's clock.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.count = 0
        self.changed_at = 0.0
        self._has_begun = False
        self._told: dict[int, list[NDArray[np.int64]]] = {}
        self._early: list[tuple[int, NDArray[np.int64]]] = []
        self._tables: dict[int, _Table] = {}
        self._wanted: list[NDArray[np.int64]] = []

    def tell(self, table: int, pairs: NDArray[np.int64]) -> None:
        """Notes rows that will arrive: `pairs` are key and place of each, int64[2 n]."""
        self._told.setdefault(table, []).append(pairs.reshape(-1, 2).copy())

    def begin(self, now: float) -> None:
        """Begins to wait for the rows that were told and have not arrived."""
        self._tables = {table: _Table(np.concatenate(parts)) for table, parts in sorted(self._told.items())}
        self._told, early, self._early, self._has_begun = {}, self._early, [], True
        self.count = sum(len(table.keys) for table in self._tables.values())
        for table, keys in early:
            self.arrived(table, keys[self.still_missing(table, keys)], now)
        self.changed_at = now

    def of_request(self, named: Iterable[Named]) -> MissingPart | None:
        """Returns the missing rows of a request, which are wanted from now on; None if all are there.

        They include the sketches that a push of the keys may change.
        """
        found = []
        for number, sketches, keys in named:
            if (table := self._tables.get(number)) is not None:
                found.append((table, table.missing_of(keys)))
            if sketches is not None and (table := self._tables.get(sketches)) is not None:
                found.append((table, table.missing_beside(keys)))
        part = [(table, positions) for table, positions in found if len(positions)]
        self._wanted += [table.want(positions) for table, positions in part]
        return MissingPart(part) if part else None

    def take_wanted(self) -> NDArray[np.int64]:
        """Returns the places of rows that have become wanted since the last call: int64[n]."""
        wanted, self._wanted = self._wanted, []
        return np.concatenate([*wanted, np.zeros(0, np.int64)])

    def still_missing(self, table: int, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which of these keys' rows are missing: bool[n]."""
        known = self._tables.get(table)
        return np.zeros(len(keys), np.bool_) if known is None else known.positions_of(keys)[1]

    def arrived(self, table: int, keys: NDArray[np.int64], now: float) -> None:
        """Notes that rows of these distinct keys have arrived, which are missing, or may be once it begins."""
        if not self._has_begun:
            self._early.append((table, keys.copy()))
        elif len(keys):
            known = self._tables[table]
            known.missing[known.positions_of(keys)[0]] = False
            self.count -= len(keys)
            self.changed_at = now
