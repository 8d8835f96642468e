"""Rounds: several consecutive batches that a worker trains on rows which it pulls and pushes once (BagPipe, section 3).

The reader knows the next batches, so the rows that they share cross the wire once, with their optimizer state. The
worker steps them by the servers' own rules, and pushes by how much they have changed. `RoundLengths` decides how many
batches make a round; it has no clock and no I/O.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import HotEmbeddingsMode, HotEmbeddingsSpec
from emberscale_api.wire import MAX_ROUND
from emberscale_trainer.data.records import IdLists
from emberscale_trainer.data.source import Batch

_COPIES = 6
"""Of the rows of a round: as pulled, as trained, a place for each float, the changes, those of the round before, which
are added to the next round, and the next round as pulled."""

_WORTH = 0.6
"""`Auto` wants rounds to move no more than this share of the bytes of single batches. Between 0.51 and 0.64, on one
machine, they begin to take more time of processors than they save (docs/data.md)."""

_PROBE_EVERY = 64
"""Leases that are trained batch by batch before rounds are looked at again, which save little or did not fit."""

_FIRST = 2


@dataclass(frozen=True)
class Round:
    """Consecutive batches of one lease, and the ids of all of them, one batch after another.

    `ids` int64 [records, columns]; a list of ids for each list column; `edges[i]` is the first record of batch i.
    """

    batches: tuple[Batch, ...]
    ids: NDArray[np.int64]
    lists: tuple[IdLists, ...]
    edges: tuple[int, ...]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "Round":
        """The round of these batches."""
        edges = tuple(accumulate((len(batch.labels) for batch in batches), initial=0))
        if len(batches) == 1:
            return cls((batches[0],), batches[0].ids, batches[0].lists, edges)
        ids = np.concatenate([batch.ids for batch in batches])
        lists = tuple(_joined(column) for column in zip(*(batch.lists for batch in batches), strict=True))
        return cls(tuple(batches), ids, lists, edges)

    @property
    def stop(self) -> int:
        """The position behind the last record of the last batch."""
        return self.batches[-1].stop


def _joined(lists: Sequence[IdLists]) -> IdLists:
    values = np.concatenate([one.values for one in lists])
    starts = accumulate((len(one.values) for one in lists), initial=0)
    edges = [one.offsets[1:] + start for one, start in zip(lists, starts, strict=False)]
    return IdLists(values, np.concatenate([np.zeros(1, np.int64), *edges]))


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """A finished round: `bytes` of its rows on the wire, `single_bytes` that its batches would have taken one by one.

    `values` floats of rows were held, training took `seconds`, and the lease has `of_lease` batches.
    """

    batches: int
    bytes: int
    single_bytes: int
    values: int
    seconds: float
    of_lease: int


class RoundLengths:
    """How many batches make a worker's next round; 1: the batches of the lease are trained one by one, without rounds.

    Rounds grow from two batches by doubling, as far as the staleness bound, the memory budget and the time in which a
    lease must progress let them. Where two batches do not fit, they end and are tried again later: slow moments pass.

    With `Auto`, they begin once an estimate says that they save enough, and end where they do not. The estimate is made
    from the keys of batches that are trained one by one, and again now and then: a hot set drifts, and the bound grows.
    """

    def __init__(self, spec: HotEmbeddingsSpec, lease_timeout: float) -> None:
        self._mode = spec.mode
        self.budget = spec.budget_bytes
        self._longest_seconds = lease_timeout / 4
        self._room = MAX_ROUND
        self._length = _FIRST
        self._fits = MAX_ROUND
        self._in_frame = MAX_ROUND
        self._longest_lease = 1
        self._rest = 0
        self._pays = spec.mode is not HotEmbeddingsMode.AUTO
        self._split: set[int] = set()

    @property
    def length(self) -> int:
        """The number of batches of the next round of a lease that is trained in rounds: a power of two."""
        most = 1 if self._rest else max(1, min(self._length, self._room, self._fits, self._in_frame))
        return 1 << (most.bit_length() - 1)

    def begin_lease(self, token: int) -> bool:
        """Whether the batches of this lease are trained in rounds."""
        if self._mode is HotEmbeddingsMode.DISABLED or token in self._split:
            return False
        if self._rest:
            self._rest -= 1
            return False
        return self._pays and self.length > 1

    @property
    def wants_estimate(self) -> bool:
        """Whether it is to be estimated what rounds would save; the lease is trained batch by batch."""
        return not (self._pays or self._rest)

    def longest(self, batches: int) -> int:
        """The batches of the longest round of at most so many that would be admitted: a power of two."""
        most = max(1, min(batches, self._room, self._in_frame))
        return 1 << (most.bit_length() - 1)

    def memory(self, values: int) -> int:
        """The bytes of memory that a round takes whose rows have so many floats."""
        return _COPIES * 4 * values

    def estimated(self, size: int, single_bytes: int, batches: int = _PROBE_EVERY) -> bool:
        """Takes the bytes of a round, and those of its batches one by one; returns whether rounds are to begin.

        If not, the next estimate comes after as many leases as this one had batches. What a few say, as those of a
        short lease or under a low bound, is soon looked at again, and costs as little.
        """
        self._pays = size <= _WORTH * single_bytes
        if not self._pays:
            self.rest(min(batches, _PROBE_EVERY))
        return self._pays

    def rest(self, leases: int = _PROBE_EVERY) -> None:
        """Has the next leases trained batch by batch; rounds begin anew after them, and with `Auto` an estimate."""
        self._rest, self._length, self._fits = leases, _FIRST, MAX_ROUND
        self._pays = self._mode is not HotEmbeddingsMode.AUTO

    def room(self, batches: int) -> None:
        """The first server says how many batches the next round may have."""
        self._room = batches

    def exceeds_frame(self, batches: int) -> None:
        """The rows of a round of so many batches do not fit into a frame."""
        self._in_frame = min(self._in_frame, max(1, batches // 2))

    def split(self, token: int) -> None:
        """A server has applied a part of a round: the rest of this lease is trained one by one."""
        self._split.add(token)

    def trained(self, figures: RoundFigures) -> None:
        """A round was trained."""
        by_memory = self.budget * figures.batches // max(1, self.memory(figures.values))
        by_time = int(self._longest_seconds * figures.batches / max(figures.seconds, 1e-9))
        self._fits = max(1, min(MAX_ROUND, by_memory, by_time))
        self._longest_lease = max(self._longest_lease, figures.of_lease)
        half = (self._longest_lease + 1) // 2  # wherever a lease begins, one of its rounds may have as many
        longest = (
            figures.batches >= min(self._room, self._fits, self._in_frame) or self._length > figures.batches >= half
        )
        if figures.batches >= self._length:
            self._length = min(MAX_ROUND, 2 * self._length)
        saves = self._mode is HotEmbeddingsMode.ENABLED or figures.bytes <= _WORTH * figures.single_bytes
        if self._fits < _FIRST or (longest and not saves):
            self.rest()
