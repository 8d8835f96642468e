"""Waits for what another thread or process does without blocking it; and values that must be present."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

_LOOK_SECONDS = 0.01
Value = TypeVar("Value")


def eventually(holds: Callable[[], object]) -> None:
    """Returns once `holds` is true; only the test's own timeout ends the wait."""
    never = threading.Event()
    while not holds():
        never.wait(_LOOK_SECONDS)


async def until(holds: Callable[[], object]) -> None:
    """Like `eventually`, but lets the event loop run."""
    while not holds():
        await asyncio.sleep(_LOOK_SECONDS)


def unwrap(value: Value | None) -> Value:
    """Returns a value that must be there."""
    assert value is not None
    return value
