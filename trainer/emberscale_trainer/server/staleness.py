"""Bounded staleness: how far workers may drift apart.

A gradient is as stale as the number of pushes applied between its pull and its own push. One parameter server, the one
with index 0, keeps the bound for all: were every server to hold pushes by its own order of pulls, two of them could
wait for each other.
"""

from dataclasses import dataclass

Ticket = tuple[int, int, int]
"""Who pulled what: (worker, epoch, batch)."""


@dataclass(frozen=True)
class _Outstanding:
    ticket: Ticket
    version: int


class StalenessBound:
    """Admits pulls and pushes such that no gradient is ever more than `bound` pushes stale.

    The invariant, for every outstanding pull: pushes applied since it, plus the outstanding pulls older than it, is at
    most `bound`. A pull is admitted only if it holds for the newcomer; a push, only if it goes on holding for the older
    ones. The oldest is never held, so someone can always go on.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._outstanding: list[_Outstanding] = []
        self._applied = 0

    @property
    def outstanding(self) -> int:
        """Pulls whose push has not come."""
        return len(self._outstanding)

    def may_pull(self) -> bool:
        """Whether one more pull keeps the invariant."""
        return len(self._outstanding) <= self._bound

    def pulled(self, ticket: Ticket) -> None:
        """Notes an admitted pull. A ticket that is outstanding already (the worker asks anew) takes its last place."""
        self.forget(ticket)
        self._outstanding.append(_Outstanding(ticket, self._applied))

    def may_push(self, ticket: Ticket) -> bool:
        """Whether applying this push keeps the invariant. A push without a pull is as the youngest."""
        for older, pull in enumerate(self._outstanding):
            if pull.ticket == ticket:
                return True
            if self._applied + 1 - pull.version + older > self._bound:
                return False
        return True

    def pushed(self, ticket: Ticket) -> int:
        """Notes an applied push, and returns how stale its gradient was."""
        version = next((pull.version for pull in self._outstanding if pull.ticket == ticket), self._applied)
        staleness = self._applied - version
        self.forget(ticket)
        self._applied += 1
        return staleness

    def forget(self, ticket: Ticket) -> None:
        """Drops a pull whose push will not come."""
        self._outstanding = [pull for pull in self._outstanding if pull.ticket != ticket]

    def forget_worker(self, worker: int) -> None:
        """Drops all that a worker has outstanding: its connection broke."""
        self._outstanding = [pull for pull in self._outstanding if pull.ticket[0] != worker]
