"""Waiting for what another thread or process does, without keeping it from doing so."""

import threading
from collections.abc import Callable

_LOOK_SECONDS = 0.01


def eventually(holds: Callable[[], bool]) -> None:
    """Returns once `holds` does; the test's own timeout ends what never does."""
    never = threading.Event()
    while not holds():
        never.wait(_LOOK_SECONDS)
