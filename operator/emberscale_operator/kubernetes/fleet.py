"""All jobs: one task each, started when a job is first seen and ended when it is gone."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable

import structlog

from emberscale_api.readable import duration_text
from emberscale_operator.controller import JobController
from emberscale_operator.kubernetes.job import JobKey

_PATIENCE_SECONDS = 300.0
_DEFECT_SECONDS = 10.0
"""How long a job rests after a defect."""
_log = structlog.get_logger()


class Fleet:
    """Wakes the controllers of jobs. `make` makes one for a job's key and uid; `bury` follows when a job is gone.

    A job that is reconciled for longer than `patience`, in seconds, is stuck: each call has a time limit far below.
    """

    def __init__(
        self,
        make: Callable[[JobKey, str], JobController],
        bury: Callable[[str], Awaitable[None]],
        patience: float = _PATIENCE_SECONDS,
    ) -> None:
        self._make = make
        self._bury = bury
        self._patience = patience
        self._tasks: dict[tuple[JobKey, str], asyncio.Task[None]] = {}
        self.controllers: dict[tuple[JobKey, str], JobController] = {}
        self._uids: defaultdict[JobKey, set[str]] = defaultdict(set)
        self._closed = False
        self.defects = 0

    def see(self, key: JobKey, uid: str) -> None:
        """Starts a controller for a job that is new, and wakes it; does nothing once the fleet is closed."""
        if self._closed:
            return
        if (key, uid) not in self._tasks:
            controller = self.controllers[key, uid] = self._make(key, uid)
            self._uids[key].add(uid)
            task = asyncio.create_task(self._run(key, uid, controller), name=str(key))
            self._tasks[key, uid] = task
            task.add_done_callback(lambda _: self._forget(key, uid))
        self.controllers[key, uid].wake()

    def wake(self, key: JobKey) -> None:
        """Wakes the controller of a job, if the job is known; for a while, there may be two jobs of one name."""
        for uid in self._uids.get(key, ()):
            self.controllers[key, uid].wake()

    async def close(self) -> None:
        """Ends all tasks, and starts none any more: the watches deliver events until they have ended, too."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stuck(self, now: float) -> str | None:
        """Names a job whose reconciliation is stuck; None if there is none. `now` is a time of the monotonic clock."""
        busy = ((since, key) for (key, _), one in self.controllers.items() if (since := one.busy_since) is not None)
        since, key = min(busy, default=(now, None), key=lambda entry: entry[0])
        return f"{key} has been reconciled for {duration_text(now - since)}" if now - since > self._patience else None

    def _forget(self, key: JobKey, uid: str) -> None:
        self._tasks.pop((key, uid), None)
        self.controllers.pop((key, uid), None)
        self._uids[key].discard(uid)
        if not self._uids[key]:
            del self._uids[key]

    async def _run(self, key: JobKey, uid: str, controller: JobController) -> None:
        """Runs one job's controller. A defect must not end other jobs: it is logged in full, counted, and retried."""
        while True:
            try:
                await controller.run()
                await self._bury(uid)
            except Exception:  # noqa: BLE001 - the outermost edge of a task that must not end silently
                self.defects += 1
                _log.exception("defect", job=str(key))
                await asyncio.sleep(_DEFECT_SECONDS)
            else:
                return
