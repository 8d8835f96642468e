"""Waiting for what another thread or process does, without keeping it from doing so; and what must be there at once."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

_LOOK_SECONDS = 0.01
Value = TypeVar("Value")


def eventually(holds: Callable[[], object]) -> None:
    """Returns once `holds` does; the test's own timeout ends what never does."""
    never = threading.Event()
    while not holds():
        never.wait(_LOOK_SECONDS)


async def until(holds: Callable[[], object]) -> None:
    """As `eventually`, while the event loop goes on."""
    while not holds():
        await asyncio.sleep(_LOOK_SECONDS)


def unwrap(value: Value | None) -> Value:
    """Returns a value that must be there."""
    assert value is not None
    return value
