"""One seeded clock, and processes whose threads are coroutines on it.

Everything that happens is an event at a simulated time, and runs to its end before the next event. Events at the same
time run in the order of scheduling. All randomness comes from one seeded generator, so a seed determines a whole run.

A process runs coroutines ("tasks") in place of threads. A task yields the Signal that it waits for. A process that
hangs (SIGSTOP) receives nothing until it resumes, then everything in order; a dead process receives nothing any more.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, Generic, TypeVar

_Value = TypeVar("_Value")

Action = Callable[[], None]
Task = Generator["Signal[Any]", Any, _Value]
"""A coroutine: it waits with `yield signal`, or for another coroutine with `yield from`."""


class SimulationError(AssertionError):
    """The cores broke a rule of the model; the text names the rule."""


class Signal(Generic[_Value]):
    """An event that happens once: a waiting task gets its value, or its error raised."""

    done = False
    value: Any = None
    error: Exception | None = None
    _listeners: "list[tuple[Process, Task[Any]]] | None" = None

    def set(self, value: Any = None) -> None:
        """Makes it happen. Only the first call counts."""
        if not self.done:
            self.done, self.value = True, value
            if self._listeners is not None:
                self._wake(value, None)

    def fail(self, error: Exception) -> None:
        """Makes it fail for good. Only the first call counts."""
        if not self.done:
            self.done, self.error = True, error
            self._wake(None, error)

    def await_in(self, process: "Process", task: Task[Any]) -> None:
        """Registers a task to be woken; the event has not happened yet."""
        if self._listeners is None:
            self._listeners = [(process, task)]
        else:
            self._listeners.append((process, task))

    def _wake(self, value: Any, error: Exception | None) -> None:
        listeners, self._listeners = self._listeners, None
        for process, task in listeners or ():
            process.wake(task, value, error)


class Condition(Signal[None]):
    """An event that happens repeatedly: a task waits for the next time."""

    def notify(self) -> None:
        """Makes it happen now."""
        if self._listeners is not None:
            self._wake(None, None)


@dataclass
class World:
    """The clock, the randomness, and the record of what happened. `traced` keeps the lines of the trace."""

    seed: int
    traced: bool = False
    now: float = 0.0
    steps: int = 0
    over: bool = False
    """Whether nothing more should happen."""
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self._queue: list[tuple[float, int, Process | None, Action]] = []
        self._order = count()

    def at(self, time: float, action: Action, process: "Process | None" = None) -> None:
        """Runs an action at a time, or now if that has passed; with a process, the process runs it once it can."""
        now = self.now
        heappush(self._queue, (time if time > now else now, next(self._order), process, action))

    def after(self, delay: float, action: Action) -> None:
        """Runs an action after a delay."""
        self.at(self.now + delay, action)

    def run(self, until: float) -> None:
        """Runs events until the world is over, none is left, or the time has come."""
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
            elif process.hung:
                process.deliver(action)
            elif process.alive:
                action()

    def trace(self, who: str, what: str) -> None:
        """Adds a line to the trace."""
        if self.traced:
            self.lines.append(f"{self.now:9.3f}  {who:<14} {what}")


class Process:
    """An independent process: it runs, hangs, and dies with all its tasks."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.hung = False
        self._backlog: list[Action] = []
        self._on_end: list[Action] = []

    def deliver(self, action: Action) -> None:
        """Runs an action in this process: now, after a hang, or never."""
        if not self.alive:
            return
        if self.hung:
            self._backlog.append(action)
        else:
            action()

    def after(self, delay: float, action: Action) -> None:
        """Runs an action in this process after a delay."""
        world = self.world
        world.at(world.now + delay, action, self)

    def spawn(self, task: Task[Any]) -> None:
        """Starts a task, in place of a thread."""
        self.wake(task, None, None)

    def sleep(self, seconds: float) -> Signal[None]:
        """Returns a signal that happens after a delay."""
        signal: Signal[None] = Signal()
        self.after(seconds, signal.set)
        return signal

    def ended(self, action: Action) -> None:
        """Runs an action, outside of the process, when the process dies."""
        self._on_end.append(action)

    def hang(self) -> None:
        """Stops the process, as SIGSTOP does: its connections stay open."""
        self.hung = True

    def resume(self) -> None:
        """Resumes after a hang, with everything that has arrived meanwhile."""
        self.hung = False
        backlog, self._backlog = self._backlog, []
        for place, action in enumerate(backlog):
            if self.hung or not self.alive:
                self._backlog = [*backlog[place:], *self._backlog]
                return
            action()

    def die(self) -> None:
        """Ends the process, as SIGKILL does."""
        if not self.alive:
            return
        self.alive = False
        self._backlog.clear()
        actions, self._on_end = self._on_end, []
        for action in actions:
            action()

    def trace(self, what: str) -> None:
        """Adds a line to the trace."""
        if self.world.traced:
            self.world.trace(self.name, what)

    def wake(self, task: Task[Any], value: Any, error: Exception | None) -> None:
        """Resumes a waiting task, now or after a hang."""
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
