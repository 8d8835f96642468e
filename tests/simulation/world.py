"""One seeded clock, and processes whose threads are coroutines on it.

Everything that happens is an event at a simulated time, run to its end before the next. Events at one time run in the
order in which they were scheduled. All chance comes from one seeded generator, so a seed is a whole run.

A process runs coroutines ("tasks"), which stand for its threads. A task yields the Signal that it waits for. A process
that hangs (SIGSTOP) gets nothing until it goes on, then everything in order; one that died gets nothing any more.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")

Action = Callable[[], None]
Task = Generator["Signal[Any]", Any, _Value]
"""A coroutine: it waits with `yield signal`, or for another one with `yield from`."""


class SimulationError(AssertionError):
    """The cores broke a rule that the model keeps; the text says which."""


class Signal(Generic[_Value]):
    """Something that happens once: a task waits for it and gets its value, or its error raised."""

    done = False
    value: Any = None
    error: Exception | None = None
    _listeners: "list[tuple[Process, Task[Any]]] | None" = None

    def set(self, value: Any = None) -> None:
        """It has happened. The first time counts."""
        if not self.done:
            self.done, self.value = True, value
            self._wake(value, None)

    def fail(self, error: Exception) -> None:
        """It will not happen any more. The first time counts."""
        if not self.done:
            self.done, self.error = True, error
            self._wake(None, error)

    def await_in(self, process: "Process", task: Task[Any]) -> None:
        """Wakes a task of a process when it happens; it has not happened yet."""
        if self._listeners is None:
            self._listeners = [(process, task)]
        else:
            self._listeners.append((process, task))

    def _wake(self, value: Any, error: Exception | None) -> None:
        listeners = self._listeners
        if listeners is not None:
            self._listeners = None
            for process, task in listeners:
                process.wake(task, value, error)


class Condition(Signal[None]):
    """Something that happens again and again: a task waits for the next time."""

    def notify(self) -> None:
        """It happens now."""
        self._wake(None, None)


@dataclass
class World:
    """The clock, the chance, and the record of what happened. `traced` keeps the lines of the trace."""

    seed: int
    traced: bool = False
    now: float = 0.0
    steps: int = 0
    over: bool = False
    """Nothing more is to happen."""
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self._queue: list[tuple[float, int, Process | None, Action]] = []
        self._scheduled = 0

    def at(self, time: float, action: Action, process: "Process | None" = None) -> None:
        """Runs an action at a time, or now if that is past; in a process if it is given, once that one runs."""
        self._scheduled += 1
        heappush(self._queue, (time if time > self.now else self.now, self._scheduled, process, action))

    def after(self, delay: float, action: Action) -> None:
        """Runs an action after so many seconds."""
        self.at(self.now + delay, action)

    def run(self, until: float) -> None:
        """Runs events until it is over, nothing is left, or the time has come."""
        queue = self._queue
        while queue and not self.over:
            time, _, process, action = heappop(queue)
            if time > until:
                self.now = until
                return
            self.now = time
            self.steps += 1
            if process is None:
                action()
            else:
                process.deliver(action)

    def trace(self, who: str, what: str) -> None:
        """Notes a line of the trace."""
        if self.traced:
            self.lines.append(f"{self.now:9.3f}  {who:<14} {what}")


class Process:
    """Something with a life of its own: it runs, hangs, and dies with all its tasks."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.hung = False
        self._backlog: list[Action] = []
        self._on_end: list[Action] = []

    def deliver(self, action: Action) -> None:
        """Runs an action in this process: now, when it goes on, or never."""
        if not self.alive:
            return
        if self.hung:
            self._backlog.append(action)
        else:
            action()

    def after(self, delay: float, action: Action) -> None:
        """Runs an action in this process after so many seconds."""
        world = self.world
        world.at(world.now + delay, action, self)

    def spawn(self, task: Task[Any]) -> None:
        """Starts a thread of the process."""
        self.wake(task, None, None)

    def sleep(self, seconds: float) -> Signal[None]:
        """Happens after so many seconds."""
        signal: Signal[None] = Signal()
        self.after(seconds, signal.set)
        return signal

    def ended(self, action: Action) -> None:
        """Runs an action when the process dies, outside of it."""
        self._on_end.append(action)

    def hang(self) -> None:
        """Stops, as by SIGSTOP: its connections stay open."""
        self.hung = True

    def resume(self) -> None:
        """Goes on after a hang, with all that has come meanwhile."""
        self.hung = False
        backlog, self._backlog = self._backlog, []
        for place, action in enumerate(backlog):
            if self.hung or not self.alive:
                self._backlog = [*backlog[place:], *self._backlog]
                return
            action()

    def die(self) -> None:
        """Ends, as by SIGKILL."""
        if not self.alive:
            return
        self.alive = False
        self._backlog.clear()
        actions, self._on_end = self._on_end, []
        for action in actions:
            action()

    def trace(self, what: str) -> None:
        """Notes a line of the trace."""
        if self.world.traced:
            self.world.trace(self.name, what)

    def wake(self, task: Task[Any], value: Any, error: Exception | None) -> None:
        """Goes on with a task that waits, now, or when the process goes on."""
        if self.hung:
            self.deliver(partial(self.wake, task, value, error))
            return
        while self.alive:
            try:
                signal = task.send(value) if error is None else task.throw(error)
            except StopIteration:
                return
            if not signal.done:
                signal.await_in(self, task)
                return
            value, error = signal.value, signal.error
