"""The protocol of one batch with several parameter servers, as a pure state machine.

An exchange is the whole conversation between a worker and the servers that pulls the rows of a batch, or pushes its
gradients. `step(exchange, event) -> (exchange, effects)`: the caller carries out the effects in order and reports
events. `conversation` drives it for a caller with a single thread. There is no I/O, no clock and no thread.

* A pull for training goes to the first server, which answers once the bound on staleness admits it, then to all others
  at once. A pull for evaluation needs no admission, and goes to all at once.
* A push goes to the first server, then to all others at once. When all have answered, the batch is committed and the
  first server is told (COMPLETE).
* MOVED: when the pending answers have arrived, the worker plans the batch again under a newer routing table of the same
  generation, and asks every server again. A push that a server has applied is REPEATED there, and a pull that is
  admitted stays admitted. The worker's lease and all other batches stay.
* LATER ends the pull of a round, which may be asked for again on the same connections. PARTIAL ends its push: its
  batches are trained again, one by one.
* REFRESH, FENCED, REFUSED and a lost connection end the exchange; its batch is not committed.

Requests on a connection are answered in order, so an exchange that ended early ends its connections too.
"""

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from emberscale_api.wire import Kind, Status


class Purpose(StrEnum):
    """The purpose of an exchange."""

    TRAIN = "Train"
    EVALUATE = "Evaluate"
    PUSH = "Push"


@dataclass(frozen=True, slots=True)
class Planned:
    """The batch is planned under a routing table with this `version`.

    `servers` are the indexes of those that own anything, ascending.
    """

    version: int
    servers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """A server has answered the last request that it was sent; `reason` says why a request is REFUSED."""

    server: int
    status: Status
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """A connection to a server broke, or could not be opened."""

    problem: str


@dataclass(frozen=True, slots=True)
class HistoryChanged:
    """The routing table that was fetched is of another generation."""


Event = Planned | Answered | Lost | HistoryChanged


@dataclass(frozen=True, slots=True)
class Send:
    """Send the batch's request of this kind to a server. COMPLETE is not answered; all others are."""

    server: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Replan:
    """Fetch a routing table newer than `version`, plan the batch under it, and report Planned or HistoryChanged."""

    version: int


class Ending(StrEnum):
    """The end of an exchange."""

    DONE = "Done"
    """Pulled from every server; or pushed to every server, and committed by that."""
    STALE = "Stale"
    """The generation has changed, or the first server does not know the session or the batch's pull."""
    FENCED = "Fenced"
    """The lease is void."""
    REFUSED = "Refused"
    """A server refuses the request as invalid."""
    LATER = "Later"
    """The staleness bound does not admit a round before another round of this worker is pushed."""
    PARTIAL = "Partial"
    """A server has applied only some batches of a round."""
    LOST = "Lost"
    """A connection broke; whether that server has applied the batch is unknown."""


@dataclass(frozen=True, slots=True)
class End:
    """The exchange is over; `reason` is for people."""

    how: Ending
    reason: str = ""


Effect = Send | Replan | End


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for the answer of a server to its request of this kind, and report Answered."""

    server: int
    kind: Kind


class Exchange(NamedTuple):
    """One batch's pull or push, from `begin` to an End.

    `queue` holds the groups of servers to ask next, one group after another; `asked` holds the servers of the current
    group whose answers are pending. `moved`: a server has answered MOVED.
    """

    purpose: Purpose
    plan: Planned
    queue: tuple[tuple[int, ...], ...] = ()
    asked: frozenset[int] = frozenset()
    moved: bool = False
    over: bool = False


def begin(purpose: Purpose, plan: Planned) -> tuple[Exchange, tuple[Effect, ...]]:
    """Starts the exchange of a batch that is planned."""
    return _ask_all(Exchange(purpose, plan))


def step(exchange: Exchange, event: Event) -> tuple[Exchange, tuple[Effect, ...]]:
    """Returns the exchange after an event, and the next commands. An exchange that is over ignores events."""
    if exchange.over:
        return exchange, ()
    match event:
        case Answered(server, status, reason):
            return _answered(exchange, server, status, reason)
        case Planned():
            return _ask_all(exchange._replace(plan=event))
        case HistoryChanged():
            return _end(exchange, Ending.STALE)
        case Lost(problem):
            return _end(exchange, Ending.LOST, problem)


def conversation(purpose: Purpose, plan: Planned) -> Generator[Send | Replan | Receive, Event | None, End]:
    """A whole exchange, answer by answer: yields the next command, takes the event that follows, returns the end.

    A Send that succeeds causes no event; any command may cause Lost.
    """
    exchange, effects = begin(purpose, plan)
    pending = deque(effects)
    while True:
        effect: Effect | Receive
        effect = pending.popleft() if pending else Receive(min(exchange.asked), _kind(exchange))
        if isinstance(effect, End):
            return effect
        event = yield effect
        if event is None or exchange.over:
            continue
        exchange, effects = step(exchange, event)
        if exchange.over:
            pending.clear()
        pending.extend(effects)


def _ask_all(exchange: Exchange) -> tuple[Exchange, tuple[Effect, ...]]:
    servers = exchange.plan.servers
    groups = (servers,) if exchange.purpose is Purpose.EVALUATE else (servers[:1], servers[1:])
    return _ask_next(exchange._replace(moved=False, queue=groups))


def _kind(exchange: Exchange) -> Kind:
    return Kind.PUSH if exchange.purpose is Purpose.PUSH else Kind.PULL


def _ask_next(exchange: Exchange) -> tuple[Exchange, tuple[Effect, ...]]:
    group, *rest = exchange.queue
    exchange = exchange._replace(asked=frozenset(group), queue=tuple(one for one in rest if one))
    kind = _kind(exchange)
    return exchange, tuple(Send(server, kind) for server in group)


def _answered(exchange: Exchange, server: int, status: Status, reason: str) -> tuple[Exchange, tuple[Effect, ...]]:
    if status is Status.REFRESH:
        return _end(exchange, Ending.STALE)
    if status is Status.FENCED:
        return _end(exchange, Ending.FENCED)
    if status is Status.REFUSED:
        return _end(exchange, Ending.REFUSED, reason)
    if status is Status.LATER:
        return _end(exchange, Ending.LATER)
    if status is Status.PARTIAL:
        return _end(exchange, Ending.PARTIAL)
    exchange = exchange._replace(asked=exchange.asked - {server}, moved=exchange.moved or status is Status.MOVED)
    if exchange.asked:
        return exchange, ()
    if exchange.moved:
        return exchange._replace(queue=()), (Replan(exchange.plan.version),)
    if exchange.queue:
        return _ask_next(exchange)
    exchange, effects = _end(exchange, Ending.DONE)
    return exchange, (
        (Send(exchange.plan.servers[0], Kind.COMPLETE), *effects) if exchange.purpose is Purpose.PUSH else effects
    )


def _end(exchange: Exchange, how: Ending, reason: str = "") -> tuple[Exchange, tuple[Effect, ...]]:
    return exchange._replace(asked=frozenset(), queue=(), over=True), (End(how, reason),)
