"""The seeded network: calls that may be lost or late, and streams that keep their order until they break."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.simulation.world import Process, Signal, Task, World


class UnavailableError(Exception):
    """Nobody answered or the answer was lost; the call may have had its effect."""


class BrokenError(Exception):
    """The stream is broken."""


@dataclass(frozen=True)
class Hello:
    """The first frame on a stream."""

    session: int
    incarnation: str


class Network:
    """Delays and losses between processes. `slow` and `lossy` are probabilities per message, from 0 to 1."""

    def __init__(self, world: World, slow: float, lossy: float) -> None:
        self.world = world
        self.slow = slow
        self.lossy = lossy
        self._random = world.random.random
        self._streams: list[Stream] = []
        self._parted: dict[frozenset[str], float] = {}

    def calm(self) -> None:
        """Stops losses and delays."""
        self.slow = self.lossy = 0.0

    def delay(self) -> float:
        """Returns the delay of one message: mostly a millisecond, seldom longer than its caller waits."""
        random = self._random
        if random() >= self.slow:
            return 0.0005 + (0.003 - 0.0005) * random()
        return 0.05 + (0.5 - 0.05) * random() if random() < 0.9 else 1.0 + (15.0 - 1.0) * random()

    def call(
        self,
        caller: Process,
        find: Callable[[], Process | None],
        handle: Callable[[Any], Task[Any]],
        timeout: float,
    ) -> Signal[Any]:
        """Calls another process, in which the coroutine `handle(process)` answers.

        The signal fails with UnavailableError, or with the handler's exception.
        """
        reply: Signal[Any] = Signal()
        caller.after(timeout, partial(_refuse, reply, "deadline exceeded"))
        if self._random() < self.lossy:
            caller.after(self.delay(), partial(_refuse, reply, "the request was lost"))
        else:
            self.world.after(self.delay(), partial(self._arrive, caller, find, handle, reply))
        return reply

    def _arrive(
        self,
        caller: Process,
        find: Callable[[], Process | None],
        handle: Callable[[Any], Task[Any]],
        reply: Signal[Any],
    ) -> None:
        callee = find()
        if callee is None or not callee.alive:
            caller.after(self.delay(), partial(_refuse, reply, "connection refused"))
            return
        callee.ended(partial(_reset, caller, reply))
        callee.spawn(self._answer(callee, caller, handle, reply))

    def _answer(
        self, callee: Process, caller: Process, handle: Callable[[Any], Task[Any]], reply: Signal[Any]
    ) -> Task[None]:
        try:
            value = yield from handle(callee)
        except Exception as error:  # noqa: BLE001 - it travels to the caller
            answered = partial(reply.fail, error)
        else:
            answered = partial(reply.set, value)
        if self._random() < self.lossy:
            answered = partial(_refuse, reply, "the answer was lost")
        caller.after(self.delay(), answered)

    def connect(self, client: Process, server: Process, accept: Callable[["Stream"], None]) -> "Stream | None":
        """Opens a stream; None if the server is dead or out of reach. `accept` runs in the server."""
        if not server.alive or self._parted.get(_members(client, server), 0.0) > self.world.now:
            return None
        stream = Stream(self, client, server)
        self._streams.append(stream)
        server.after(self.delay(), partial(accept, stream))
        return stream

    def break_streams(self, process: Process) -> None:
        """Breaks all streams of a process."""
        for stream in list(self._streams):
            if process in (stream.client.owner, stream.server.owner):
                stream.break_()

    def part(self, one: str, other: str, seconds: float) -> None:
        """Breaks the streams between two members, such as `ps-1` and `ps-2`, and refuses new ones for this long."""
        pair = frozenset((one, other))
        self._parted[pair] = self.world.now + seconds
        for stream in list(self._streams):
            if _members(stream.client.owner, stream.server.owner) == pair:
                stream.break_()

    def forget(self, stream: "Stream") -> None:
        """Drops a broken stream."""
        if stream in self._streams:
            self._streams.remove(stream)


def _members(one: Process, other: Process) -> frozenset[str]:
    return frozenset(process.name.partition(".")[0] for process in (one, other))


def _reset(caller: Process, reply: Signal[Any]) -> None:
    if not reply.done:
        caller.after(0.001, partial(_refuse, reply, "connection reset"))


def _refuse(reply: Signal[Any], problem: str) -> None:
    if not reply.done:
        reply.fail(UnavailableError(problem))


class Stream:
    """Two ends with an ordered channel each way, until it breaks."""

    def __init__(self, network: Network, client: Process, server: Process) -> None:
        self._network = network
        self.client = End(self, client)
        self.server = End(self, server)
        self.client.peer, self.server.peer = self.server, self.client
        client.ended(self.break_)
        server.ended(self.break_)

    def break_(self) -> None:
        """Breaks the stream; each end learns of it separately, after the messages under way."""
        self._network.forget(self)
        for end in (self.client, self.server):
            end.lose()

    def carry(self, sender: "End", message: Any) -> None:
        """Delivers a message in order."""
        world, target = self._network.world, sender.peer
        due = world.now + self._network.delay()
        if due < target.due:
            due = target.due
        target.due = due
        world.at(due, partial(target.arrived, message), target.owner)

    def delay(self) -> float:
        """Returns the seconds until an end learns that the stream broke."""
        return self._network.delay()


class End:
    """One end of a stream."""

    peer: "End"

    def __init__(self, stream: Stream, owner: Process) -> None:
        self._stream = stream
        self.owner = owner
        self.due = 0.0
        self._inbox: deque[Any] = deque()
        self._waiting: Signal[Any] | None = None
        self.broken = False
        self._losing = False

    def send(self, message: Any) -> None:
        """Sends a message. Raises BrokenError once the break is known here."""
        if self.broken:
            raise BrokenError("the stream is broken")
        if not self._losing:
            self._stream.carry(self, message)

    def receive(self) -> Signal[Any]:
        """Returns the next message; fails with BrokenError."""
        signal: Signal[Any] = Signal()
        if self._inbox:
            signal.set(self._inbox.popleft())
        elif self.broken:
            signal.fail(BrokenError("the stream is broken"))
        else:
            self._waiting = signal
        return signal

    def arrived(self, message: Any) -> None:
        """Takes a message that arrives."""
        if self.broken:
            return
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.set(message)
        else:
            self._inbox.append(message)

    def lose(self) -> None:
        """Schedules the moment at which this end learns that the stream broke."""
        if self._losing:
            return
        self._losing = True
        self.owner.after(self._stream.delay(), self._lost)

    def close(self) -> None:
        """Ends the stream from this end, which knows at once."""
        self._stream.break_()
        self._lost()

    def _lost(self) -> None:
        self.broken = True
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.fail(BrokenError("the stream is broken"))
