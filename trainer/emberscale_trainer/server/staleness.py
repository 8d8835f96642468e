"""Bounded staleness: how far workers may drift apart.

A gradient is as stale as the number of pushes that were applied, on any server, between its pull and its own push. The
server with index 0 keeps the bound for all: were every server to hold pushes by its own order of pulls, two of them
could wait for each other. A worker asks it before it pulls from anyone, pushes to it before it pushes to the others,
and tells it when all have applied the push. In between the push is under way: a pull may or may not see it.
"""

from dataclasses import dataclass
from math import isqrt

Ticket = tuple[int, int, int]
"""Who pulled what: (worker, epoch, batch)."""


@dataclass(frozen=True)
class _Outstanding:
    ticket: Ticket
    seen: int


class StalenessBound:
    """Admits pulls and pushes such that no gradient is ever more than `bound` pushes stale.

    The invariant, for every outstanding pull: pushes that it may not have seen, plus the outstanding pulls older than
    it, is at most `bound`. A pull is admitted only if it holds for the newcomer; a push, only if it goes on holding for
    the older ones. The oldest is never held, so someone can always go on.

    Stale gradients do most harm while the parameters still move fast, so the bound itself grows from 0, as the square
    root of the applied batches over `warmup`: the steps of Adagrad shrink with that root, so the harm stays the same.
    """

    def __init__(self, bound: int, warmup: int = 0, applied: int = 0) -> None:
        """`applied` is how many batches the parameters have seen already."""
        self._bound = bound
        self._warmup = warmup
        self._outstanding: list[_Outstanding] = []
        self._under_way: set[Ticket] = set()
        self._applied = applied

    @property
    def outstanding(self) -> int:
        """Pulls whose push has not come."""
        return len(self._outstanding)

    @property
    def in_force(self) -> int:
        """The bound at this moment."""
        return min(self._bound, isqrt(self._applied // self._warmup)) if self._warmup else self._bound

    def may_pull(self) -> bool:
        """Whether one more pull keeps the invariant."""
        return len(self._under_way) + len(self._outstanding) <= self.in_force

    def pulled(self, ticket: Ticket) -> None:
        """Notes an admitted pull. A ticket that is outstanding already (the worker asks anew) takes its last place."""
        self.forget(ticket)
        self._outstanding.append(_Outstanding(ticket, self._applied - len(self._under_way)))

    def may_push(self, ticket: Ticket) -> bool:
        """Whether applying this push keeps the invariant. A push without a pull is as the youngest."""
        bound = self.in_force
        for older, pull in enumerate(self._outstanding):
            if pull.ticket == ticket:
                return True
            if self._applied + 1 - pull.seen + older > bound:
                return False
        return True

    def pushed(self, ticket: Ticket) -> int:
        """Notes a push that is applied here and under way to the others; returns how stale its gradient is at most."""
        seen = next((pull.seen for pull in self._outstanding if pull.ticket == ticket), self._applied)
        staleness = self._applied - seen
        self.forget(ticket)
        self._applied += 1
        self._under_way.add(ticket)
        return staleness

    def completed(self, ticket: Ticket) -> None:
        """Notes that all servers have applied a push."""
        self._under_way.discard(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Drops a pull whose push will not come."""
        self._outstanding = [pull for pull in self._outstanding if pull.ticket != ticket]

    def forget_worker(self, worker: int) -> None:
        """Drops all that a worker has outstanding or under way: its connection broke."""
        self._outstanding = [pull for pull in self._outstanding if pull.ticket[0] != worker]
        self._under_way = {ticket for ticket in self._under_way if ticket[0] != worker}
