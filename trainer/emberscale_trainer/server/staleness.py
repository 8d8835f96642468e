"""Bounded staleness: how far workers may drift apart.

The staleness of a gradient is the number of pushes that were applied, on any server, between its pull and its own push.
The first server of the routing table enforces the bound for all: if each server held pushes by its own order of pulls,
two of them could wait for each other. A worker asks it before it pulls from any server, pushes to it before the others,
and tells it when all have applied the push. In between, the push is under way: a pull may or may not see it. Where a
move makes another server the first, the pulls that are outstanding are handed over.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple


class Ticket(NamedTuple):
    """Names one pull for training: the batch, and the session that pulls it."""

    session: int
    epoch: int
    batch: int


@dataclass(frozen=True, slots=True)
class _Outstanding:
    """A pull whose push has not come. `seen` counts the pushes that it has certainly seen."""

    ticket: Ticket
    token: int
    seen: int


@dataclass(frozen=True, slots=True)
class OutstandingPull:
    """A pull that another server orders from now on; `unseen` counts the pushes that it may not have seen."""

    ticket: Ticket
    token: int
    unseen: int


class StalenessBound:
    """Admits pulls and pushes such that no gradient is ever more than `bound` pushes stale.

    The invariant, for every outstanding pull: pushes that it may not have seen, plus the outstanding pulls older than
    it, number at most `bound`. A pull is admitted only if the invariant holds for it; a push, only if the invariant
    still holds for the older pulls. It also covers a push that is under way, because other servers may receive later
    pushes before it. The oldest pull waits only while pushes are under way, so some worker can always continue.

    Stale gradients do most harm while the parameters still move fast, so the bound itself grows from 0, as the square
    root of the applied batches over `warmup`: the steps of Adagrad shrink with that root, so the harm stays the same.

    A ticket ends with the session that holds it or with its lease, whichever ends first: a worker that hangs keeps its
    connections open, but loses its leases.
    """

    def __init__(self, bound: int, warmup: int = 0, applied: int = 0) -> None:
        """`applied` is how many batches the parameters have seen already."""
        self._bound = bound
        self._warmup = warmup
        self._outstanding: list[_Outstanding] = []
        self._under_way: dict[Ticket, _Outstanding] = {}
        self._applied = applied

    def hand_over(self) -> tuple[OutstandingPull, ...]:
        """All outstanding pulls, the oldest first."""
        return tuple(OutstandingPull(one.ticket, one.token, self._applied - one.seen) for one in self._outstanding)

    def take_over(self, pulls: Iterable[OutstandingPull]) -> None:
        """Goes on with the pulls that another server admitted, the oldest first."""
        for one in pulls:
            self._outstanding.append(_Outstanding(one.ticket, one.token, self._applied - one.unseen))

    @property
    def under_way(self) -> int:
        """Pushes that are applied here and perhaps not everywhere."""
        return len(self._under_way)

    @property
    def in_force(self) -> int:
        """The bound at this moment."""
        return min(self._bound, isqrt(self._applied // self._warmup)) if self._warmup else self._bound

    def may_pull(self, ticket: Ticket) -> bool:
        """Returns whether this pull keeps the invariant. An outstanding one always does: the worker asks again."""
        return len(self._under_way) + len(self._outstanding) <= self.in_force or any(
            pull.ticket == ticket for pull in self._outstanding
        )

    def pulled(self, ticket: Ticket, token: int) -> None:
        """Notes an admitted pull under a lease. One that is outstanding already keeps its place."""
        if all(pull.ticket != ticket for pull in self._outstanding):
            self._outstanding.append(_Outstanding(ticket, token, self._applied - len(self._under_way)))

    def may_push(self, ticket: Ticket) -> bool:
        """Returns whether applying this push keeps the invariant. A push without a pull counts as the youngest."""
        bound = self.in_force
        if any(self._applied - pull.seen > bound for pull in self._under_way.values()):
            return False
        for older, pull in enumerate(self._outstanding):
            if pull.ticket == ticket:
                return True
            if self._applied + 1 - pull.seen + older > bound:
                return False
        return True

    def pushed(self, ticket: Ticket, token: int) -> int:
        """Notes a push that is applied here and under way to the others; returns how stale its gradient is at most."""
        seen = next((pull.seen for pull in self._outstanding if pull.ticket == ticket), self._applied)
        staleness = self._applied - seen
        self.forget(ticket)
        self._applied += 1
        self._under_way[ticket] = _Outstanding(ticket, token, seen)
        return staleness

    def is_outstanding(self, ticket: Ticket) -> bool:
        """Whether a pull is admitted, and its push has not come."""
        return any(pull.ticket == ticket for pull in self._outstanding)

    def is_under_way(self, ticket: Ticket) -> bool:
        """Whether a push is applied here and perhaps not everywhere."""
        return ticket in self._under_way

    def completed(self, ticket: Ticket) -> None:
        """Notes that all servers have applied a push."""
        self._under_way.pop(ticket, None)

    def forget(self, ticket: Ticket) -> None:
        """Drops a pull whose push will not come."""
        self._outstanding = [pull for pull in self._outstanding if pull.ticket != ticket]

    def forget_session(self, session: int) -> None:
        """Drops all that a session has outstanding or under way: its connections are gone."""
        self._keep(lambda ticket, _: ticket.session != session)

    def forget_leases(self, dead: Callable[[int], bool]) -> None:
        """Drops all that is outstanding or under way under leases whose tokens are dead."""
        self._keep(lambda _, token: not dead(token))

    def _keep(self, wanted: Callable[[Ticket, int], bool]) -> None:
        self._outstanding = [pull for pull in self._outstanding if wanted(pull.ticket, pull.token)]
        self._under_way = {ticket: push for ticket, push in self._under_way.items() if wanted(ticket, push.token)}
