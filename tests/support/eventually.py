"""The tests' polls: for what a real process, or a thread without an event, does; and values that must be present.

An event, a future or an injected clock is better; where there is none, `tests/api/test_waits.py` holds tests to these.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

_SECONDS = 120.0
_LOOK_SECONDS = 0.02
_ANYTHING = "what the test waits for"
Value = TypeVar("Value")


class NotInTimeError(AssertionError):
    """What a test waited for did not happen."""


def eventually(
    look: Callable[[], Value | None], what: str = _ANYTHING, seconds: float = _SECONDS, every: float = _LOOK_SECONDS
) -> Value:
    """Polls until `look` finds something true, and returns that. Raises NotInTimeError."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise NotInTimeError(f"not within {seconds:g} s: {what}")
        time.sleep(every)
    return found


async def until(look: Callable[[], Value | None], what: str = _ANYTHING, seconds: float = _SECONDS) -> Value:
    """Like `eventually`, but lets the event loop run."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise NotInTimeError(f"not within {seconds:g} s: {what}")
        await asyncio.sleep(_LOOK_SECONDS)
    return found


def unwrap(value: Value | None) -> Value:
    """Returns a value that must be there."""
    assert value is not None
    return value
