"""The ledger of one stage's work, counted in batches: what is done, leased and left.

At any time every batch is in exactly one of: `done`, a live lease beyond its commit offset, `returned` (the rest of a
lease that ended early), or `uncut` (not part of any shard yet). The caller gives leases fencing tokens that ascend over
the life of the job. Calls for a lease that is no longer live report that.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, pairwise
from operator import is_not
from typing import TypeVar

from emberscale_api.frozen import replace
from emberscale_api.job.roles import MemberId
from emberscale_jobmaster import ranges
from emberscale_jobmaster.ranges import Ranges

_Item = TypeVar("_Item")


class LedgerError(AssertionError):
    """A batch is in two places of the ledger, or in none. This is a defect; the ledger cannot be trusted afterwards."""


@dataclass(frozen=True)
class Lease:
    """Batches [start, stop) that one member works on; those below `committed` are done.

    `shard` is the start of the shard as first cut; a remainder keeps it when it is leased again.
    """

    token: int
    holder: MemberId
    shard: int
    start: int
    stop: int
    committed: int


@dataclass(frozen=True)
class Remainder:
    """The batches that a lease left undone when it ended early."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True)
class Ledger:
    """Immutable; every method that changes something returns a new ledger."""

    batches: int
    uncut: Ranges
    done: Ranges = ()
    returned: tuple[Remainder, ...] = ()
    leases: Mapping[int, Lease] = field(default_factory=dict)

    @classmethod
    def fresh(cls, batches: int, done: Ranges = ()) -> "Ledger":
        """Returns a ledger in which only `done` is done: the start of an epoch, or the state of one in a checkpoint."""
        everything = ranges.normalised([(0, batches)])
        done = ranges.intersection(done, everything)
        return cls(batches=batches, uncut=ranges.difference(everything, done), done=done)

    @property
    def done_count(self) -> int:
        """Batches that are done."""
        return ranges.count(self.done)

    @property
    def complete(self) -> bool:
        """Whether every batch is done."""
        return self.done == (((0, self.batches),) if self.batches else ())

    @property
    def available(self) -> int:
        """Batches that are neither done nor leased."""
        return ranges.count(self.uncut) + sum(rest.stop - rest.start for rest in self.returned)

    def held_by(self, member: MemberId) -> tuple[Lease, ...]:
        """The live leases of a member."""
        return tuple(lease for lease in self.leases.values() if lease.holder == member)

    def grant(self, member: MemberId, token: int, batches: int) -> tuple["Ledger", Lease] | None:
        """Leases up to `batches` batches, returned ones first; None if nothing is left to lease.

        Only the first part of a longer remainder is leased; the rest waits as a shard of its own.
        """
        if self.returned:
            rest, *others = self.returned
            stop = min(rest.stop, rest.start + batches)
            if stop < rest.stop:
                others.insert(0, Remainder(shard=stop, start=stop, stop=rest.stop))
            lease = Lease(token, member, rest.shard, rest.start, stop, rest.start)
            ledger = replace(self, returned=tuple(others))
        elif self.uncut:
            start = self.uncut[0][0]
            stop = min(self.uncut[0][1], start + batches)
            lease = Lease(token, member, start, start, stop, start)
            ledger = replace(self, uncut=ranges.difference(self.uncut, ((start, stop),)))
        else:
            return None
        return replace(ledger, leases={**self.leases, token: lease}), lease

    def commit(self, token: int, committed: int) -> "Ledger":
        """Marks a live lease's batches below `committed` as done; never goes back, never beyond the lease."""
        lease = self.leases[token]
        committed = min(committed, lease.stop)
        if committed <= lease.committed:
            return self
        return replace(
            self,
            done=ranges.including(self.done, lease.committed, committed),
            leases={**self.leases, token: replace(lease, committed=committed)},
        )

    def finish(self, token: int) -> "Ledger":
        """Marks all of a live lease as done and ends it."""
        ledger = self.commit(token, self.leases[token].stop)
        return replace(ledger, leases={other: lease for other, lease in ledger.leases.items() if other != token})

    def revoke(self, tokens: Container[int]) -> "Ledger":
        """Ends the live leases among these. Batches that they had not committed are leased again, lowest first."""
        ended = [lease for token, lease in self.leases.items() if token in tokens]
        if not ended:
            return self
        rests = [Remainder(lease.shard, lease.committed, lease.stop) for lease in ended if lease.committed < lease.stop]
        return replace(
            self,
            returned=tuple(sorted((*self.returned, *rests), key=lambda rest: rest.start)),
            leases={token: lease for token, lease in self.leases.items() if token not in tokens},
        )

    def check(self) -> None:
        """Raises LedgerError unless every batch is in exactly one place."""
        leased, returned = _leased(self.leases.values()), _returned(self.returned)
        expected = 0
        for start, stop in sorted(pair for pair in (*self.done, *self.uncut, *leased, *returned) if pair[0] < pair[1]):
            if start != expected:
                places = "no place" if start > expected else "two places"
                raise LedgerError(f"batch {min(start, expected)} is in {places} of the ledger")
            expected = stop
        if expected != self.batches:
            raise LedgerError(f"the ledger ends at batch {expected} of {self.batches}")

    def check_since(self, before: "Ledger") -> None:
        """As `check`, if the ledger was sound `before`; looks only at the places that differ."""
        if not self._rearranges(before):
            self.check()

    def _rearranges(self, before: "Ledger") -> bool:
        """Whether all places that differ hold the same batches as before, each batch once."""
        if self.batches != before.batches:
            return False
        done = _differing(before.done, self.done)
        uncut = _differing(before.uncut, self.uncut)
        returned = _differing(before.returned, self.returned)
        leases = _differing(tuple(before.leases.values()), tuple(self.leases.values()))
        were, are = (
            sorted(
                pair
                for pair in (*done[side], *uncut[side], *_returned(returned[side]), *_leased(leases[side]))
                if pair[0] < pair[1]
            )
            for side in (0, 1)
        )
        is_disjoint = all(stop <= start for (_, stop), (start, _) in pairwise(are))
        return is_disjoint and ranges.normalised(were) == ranges.normalised(are)

    def revoke_all(self) -> "Ledger":
        """Ends every lease."""
        return self.revoke(self.leases.keys())


def _leased(leases: Iterable[Lease]) -> list[tuple[int, int]]:
    return [(lease.committed, lease.stop) for lease in leases]


def _returned(rests: Iterable[Remainder]) -> list[tuple[int, int]]:
    return [(rest.start, rest.stop) for rest in rests]


def _differing(before: Sequence[_Item], after: Sequence[_Item]) -> tuple[Sequence[_Item], Sequence[_Item]]:
    """Returns both sequences without the objects that they share at the beginning and at the end.

    No Python code runs per item: a ledger has two leases for each worker.
    """
    if before is after:
        return (), ()
    shortest = min(len(before), len(after))
    first = next(compress(count(), map(is_not, before, after)), shortest)
    last = next(compress(count(), map(is_not, reversed(before), reversed(after))), shortest)
    last = min(last, shortest - first)
    return before[first : len(before) - last], after[first : len(after) - last]
