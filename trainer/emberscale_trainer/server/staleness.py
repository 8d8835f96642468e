"""Bounded staleness: how far workers may drift apart.

The staleness of a gradient is the number of batches that were applied, on any server, between its pull and its own
push. A push of a round applies all batches of the round. A worker that trains in rounds adds its own unpushed changes
to the rows that it pulls, so its own pushes never make its rounds stale.

The first server of the routing table enforces the bound for all: if each server held pushes by its own order of pulls,
two of them could wait for each other. A worker asks the first server before it pulls from any, pushes to it before the
others, and tells it when all have applied the push. In between, the push is under way: a pull may or may not see it. If
a move makes another server the first, the outstanding pulls are handed over. If the first server is lost, they are lost
too, and with them what is under way. Its successor therefore refuses every push whose pull it does not know, even that
of a batch in its rebuilt rows, which others may lack; the worker pulls the batch again.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import isqrt
from typing import NamedTuple

from emberscale_api.wire import MAX_ROUND


class Ticket(NamedTuple):
    """Names one pull for training: the session that pulls, the first batch, and the number of `batches`.

    `is_round`: the session trains the batches on its own copies of rows, which include its earlier pushes.
    """

    session: int
    epoch: int
    batch: int
    batches: int = 1
    is_round: bool = False

    def ages_with(self, other: "Ticket") -> bool:
        """Whether a push of the other ticket makes this pull stale."""
        return not self.is_round or self.session != other.session


@dataclass(slots=True)
class OutstandingPull:
    """An admitted pull, until its push is applied everywhere.

    `unseen` counts the batches of other pushes, applied since the pull or under way then, that it may not have seen.
    """

    ticket: Ticket
    token: int
    unseen: int


class StalenessBound:
    """Admits pulls and pushes such that no gradient is ever more than `bound` batches stale.

    The invariant, for every outstanding pull: batches that it may not have seen, plus those of the outstanding pulls
    older than it, number at most `bound`; a round that alone exceeds the bound is admitted when nothing else is
    outstanding. A pull is admitted only if the invariant holds for it; a push, only if the invariant still holds for
    the older pulls. It also covers a push that is under way, because other servers may receive later pushes before it.
    The oldest pull waits only while pushes are under way, so some worker can always continue.

    Stale gradients do most harm while the parameters still move fast, so the bound itself grows from 0, as the square
    root of the applied batches over `warmup`: the steps of Adagrad shrink with that root, so the harm stays the same.

    A ticket ends with the session that holds it or with its lease, whichever ends first: a worker that hangs keeps its
    connections open, but loses its leases.
    """

    def __init__(self, bound: int, warmup: int = 0, applied: int = 0) -> None:
        """`applied` is the number of batches already in the parameters."""
        self._bound = bound
        self._warmup = warmup
        self._outstanding: list[OutstandingPull] = []
        self._under_way: dict[Ticket, OutstandingPull] = {}
        self._waiting: dict[Ticket, int] = {}
        self._applied = applied

    def hand_over(self) -> tuple[OutstandingPull, ...]:
        """Returns all outstanding pulls, the oldest first."""
        return tuple(replace(one) for one in self._outstanding)

    def take_over(self, pulls: Iterable[OutstandingPull]) -> None:
        """Takes over the pulls that another server admitted, the oldest first."""
        self._outstanding += [replace(one) for one in pulls]

    @property
    def in_force(self) -> int:
        """The bound at this moment."""
        return min(self._bound, isqrt(self._applied // self._warmup)) if self._warmup else self._bound

    def round_limit(self, session: int) -> int:
        """The most batches of a round such that all sessions may have one outstanding at the same time."""
        others = len(self._others(session))
        return min(MAX_ROUND, max(1, self.in_force // others)) if others else MAX_ROUND

    def _others(self, session: int) -> set[int]:
        """The other sessions that train now."""
        pulls = (*self._outstanding, *self._under_way.values())
        return ({one.ticket.session for one in pulls} | {ticket.session for ticket in self._waiting}) - {session}

    def may_pull(self, ticket: Ticket) -> bool:
        """Returns whether this pull keeps the invariant. An outstanding one always does: the worker asks again.

        A session that has a round outstanding pulls for another one only while it trains alone. Rows that are pulled a
        round ahead lack all that others push meanwhile, so at the same staleness rounds would be half as long.
        """
        if self.is_outstanding(ticket):
            return True
        if self.is_ahead(ticket) and self._others(ticket.session):
            return False
        ahead = _batches(self._under_way.values(), ticket) + _batches(self._outstanding, ticket)
        return ahead <= self.in_force

    def is_ahead(self, ticket: Ticket) -> bool:
        """Whether this pull is for a round while another of the session is outstanding, whose push may come first."""
        return ticket.is_round and any(pull.ticket.session == ticket.session for pull in self._outstanding)

    def waits(self, ticket: Ticket, token: int) -> None:
        """Notes that a session waits for the admission of this pull."""
        self._waiting[ticket] = token

    def pulled(self, ticket: Ticket, token: int) -> None:
        """Notes an admitted pull under a lease. One that is outstanding already keeps its place."""
        self._waiting.pop(ticket, None)
        if not self.is_outstanding(ticket):
            self._outstanding.append(OutstandingPull(ticket, token, _batches(self._under_way.values(), ticket)))

    def may_push(self, ticket: Ticket) -> bool:
        """Returns whether applying this push keeps the invariant. A push without a pull counts as the youngest."""
        bound = self.in_force
        if any(_aged(pull, ticket) > max(bound, pull.unseen) for pull in self._under_way.values()):
            return False
        for older, pull in enumerate(self._outstanding):
            if pull.ticket == ticket:
                return True
            aged = _aged(pull, ticket)
            if aged > pull.unseen and aged + _batches(self._outstanding[:older], pull.ticket) > bound:
                return False
        return True

    def pushed(self, ticket: Ticket, token: int) -> int:
        """Notes a push that is applied here and under way to the others; returns how stale its gradient is at most."""
        mine = next((pull for pull in self._outstanding if pull.ticket == ticket), OutstandingPull(ticket, token, 0))
        self.forget(ticket)
        self._applied += ticket.batches
        for pull in (*self._outstanding, *self._under_way.values()):
            pull.unseen = _aged(pull, ticket)
        self._under_way[ticket] = mine
        return mine.unseen

    def is_outstanding(self, ticket: Ticket) -> bool:
        """Whether a pull is admitted, and its push has not come."""
        return any(pull.ticket == ticket for pull in self._outstanding)

    def is_under_way(self, ticket: Ticket) -> bool:
        """Whether a push is applied here and perhaps not everywhere."""
        return ticket in self._under_way

    def knows(self, ticket: Ticket) -> bool:
        """Whether a pull is outstanding, or its push is under way: its staleness is known."""
        return self.is_outstanding(ticket) or self.is_under_way(ticket)

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
        self._waiting = {ticket: token for ticket, token in self._waiting.items() if wanted(ticket, token)}


def _batches(pulls: Iterable[OutstandingPull], ticket: Ticket) -> int:
    """The batches of pulls that make this one stale, once they are pushed."""
    return sum(one.ticket.batches for one in pulls if ticket.ages_with(one.ticket))


def _aged(pull: OutstandingPull, ticket: Ticket) -> int:
    """The batches that a pull has not seen once the push of the ticket is applied."""
    return pull.unseen + ticket.batches if pull.ticket.ages_with(ticket) else pull.unseen
