"""The health of all controllers together."""

import asyncio
import time
from typing import Any

from emberscale_operator.kubernetes.fleet import Fleet
from emberscale_operator.kubernetes.job import JobKey


class _Controller:
    """A controller whose look at its job lasts until `done` is set."""

    def __init__(self, key: JobKey) -> None:
        self.key, self.uid = key, "uid"
        self.done = asyncio.Event()
        self.busy_since: float | None = None

    def wake(self) -> None:
        pass

    async def run(self) -> None:
        self.busy_since = time.monotonic()
        await self.done.wait()
        self.busy_since = None
        await asyncio.Event().wait()


async def test_a_job_whose_reconciling_gets_nowhere_is_named_until_it_goes_on() -> None:
    made: list[_Controller] = []

    def make(key: JobKey, uid: str) -> Any:
        made.append(_Controller(key))
        return made[-1]

    async def bury(uid: str) -> None:
        pass

    fleet = Fleet(make, bury, patience=60.0)
    for name in ("quick", "slow"):
        fleet.see(JobKey("team", name), "uid")
    made[0].done.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    now = time.monotonic()
    assert fleet.stuck(now) is None
    assert fleet.stuck(now + 61.0) == "team/slow has been reconciled for 61 s"
    made[1].done.set()
    await asyncio.sleep(0)
    assert fleet.stuck(now + 61.0) is None
    await fleet.close()
