"""The tests' waits for conditions, for calls and for objects to leave the memory; `eventually` polls the rest."""

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_SECONDS = 60.0


def wait_at(changed: threading.Condition, is_met: Callable[[], object]) -> None:
    """Waits at a condition, which must be notified, until this is met."""
    with changed:
        assert changed.wait_for(is_met, _SECONDS)


def noted_call(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, thread: str = "") -> threading.Event:
    """Returns an event that is set once a method of a class or an object is called, by a thread of such a name."""
    called, method = threading.Event(), getattr(owner, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith(thread):
            called.set()
        return method(*arguments, **options)

    monkeypatch.setattr(owner, name, noting)
    return called


class Freed:
    """Says when things are no longer in memory, and keeps none of them there."""

    def __init__(self, things: Iterable[object]) -> None:
        self._events = [_end_of(thing) for thing in things]
        assert self._events

    def wait(self) -> bool:
        """Waits until all are gone; returns whether they are."""
        return all(event.wait(_SECONDS) for event in self._events)


def _end_of(thing: object) -> threading.Event:
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    return gone
