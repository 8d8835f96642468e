"""The loop of one job's controller: it ends when it is told to."""

import asyncio
import time
from typing import Any

import pytest

from emberscale_operator.controller import JobController, Pause


class _Idle:
    """A backend of a job with which there is nothing to do; `looked` tells of a look at it."""

    def __init__(self) -> None:
        self.looked = asyncio.Event()

    async def observe(self, now: float) -> Pause:
        self.looked.set()
        return Pause(3600.0)


@pytest.mark.parametrize("turns", range(6))
async def test_news_of_a_job_does_not_keep_its_controller_from_ending(turns: int) -> None:
    """Python 3.11 offers several moments at which a cancellation that follows an event may be lost."""
    backend: Any = _Idle()
    controller = JobController(backend, time.monotonic, lambda master, wake: pytest.fail("there is no master"))
    running = asyncio.create_task(controller.run())
    await backend.looked.wait()
    await asyncio.sleep(0)
    controller.wake()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait({running}, timeout=10.0)
    assert running.cancelled()
