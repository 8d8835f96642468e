"""What a test's own thread logs: threads of earlier tests may still log while they end."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict


@contextmanager
def own_logs() -> Iterator[list[EventDict]]:
    """As `capture_logs`, of this thread alone."""
    own = threading.get_ident()

    def of_this_thread(_: Any, __: str, entry: EventDict) -> EventDict:
        if threading.get_ident() != own:
            raise structlog.DropEvent
        return entry

    with capture_logs() as logs:
        structlog.get_config()["processors"].insert(0, of_this_thread)
        yield logs
