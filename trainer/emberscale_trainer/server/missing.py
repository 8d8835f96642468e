"""Rows that a server owns and knows the keys of, and whose bytes have yet to arrive: they are rebuilt from parity.

A request that names one of them waits until it is there, and has it sent before others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_trainer.server.moves import Transfer

_KEY, _PLACE = 0, 1


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

    def of_request(self, counts: NDArray[np.uint32], keys: NDArray[np.int64]) -> MissingPart | None:
        """Returns the missing rows of a request, which are wanted from now on; None if all are there.

        `counts` is uint32[tables], `keys` int64[n].
        """
        stops = np.cumsum(counts.astype(np.int64))
        found = []
        for number, table in self._tables.items():
            if number >= len(counts):  # a request that does not fit is refused later
                break
            part = keys[stops[number] - int(counts[number]) : stops[number]]
            positions, missing = table.positions_of(part)
            if missing.any():
                positions = positions[missing]
                new = np.unique(positions[~table.asked[positions]])
                table.asked[new] = True
                if len(new):
                    self._wanted.append(table.places[new])
                found.append((table, positions))
        return MissingPart(found) if found else None

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
