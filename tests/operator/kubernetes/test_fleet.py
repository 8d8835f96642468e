"""The health of all controllers together."""

import asyncio
import time
from typing import Any

from emberscale_operator.kubernetes.fleet import Fleet
from emberscale_operator.kubernetes.job import JobKey


class _Controller:
    """A controller whose look at its job lasts until `done` is set; its job is gone once `gone` is."""

    def __init__(self, key: JobKey, uid: str = "uid") -> None:
        self.key, self.uid = key, uid
        self.done, self.gone = asyncio.Event(), asyncio.Event()
        self.looks, self.rests = asyncio.Event(), asyncio.Event()
        self.busy_since: float | None = None
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    async def run(self) -> None:
        self.busy_since = time.monotonic()
        self.looks.set()
        await self.done.wait()
        self.busy_since = None
        self.rests.set()
        await self.gone.wait()


class _Fleet(Fleet):
    """Keeps the controllers that it has made, and the uids of the jobs that it has buried and forgotten."""

    def __init__(self) -> None:
        self.made: dict[str, _Controller] = {}
        self.buried: list[str] = []
        self.forgotten = asyncio.Queue[str]()
        super().__init__(self._made, self._note)

    def _made(self, key: JobKey, uid: str) -> Any:
        self.made[uid] = _Controller(key, uid)
        return self.made[uid]

    async def _note(self, uid: str) -> None:
        self.buried.append(uid)

    def _forget(self, key: JobKey, uid: str) -> None:
        super()._forget(key, uid)
        self.forgotten.put_nowait(uid)


CTR = JobKey("team", "ctr")


async def test_a_fleet_that_is_closed_starts_no_controller_for_a_late_event() -> None:
    fleet = _Fleet()
    fleet.see(CTR, "first")
    await fleet.close()
    fleet.see(CTR, "first")
    fleet.see(JobKey("team", "other"), "second")
    assert list(fleet.made) == ["first"]
    assert not fleet.controllers


async def test_events_of_pods_reach_a_job_also_after_the_late_end_of_another_of_its_name() -> None:
    """The events of two objects may arrive in any order, and that of a deletion last."""
    fleet = _Fleet()
    fleet.see(CTR, "old")
    fleet.see(CTR, "new")
    fleet.see(CTR, "old")
    for gone in ("old", "new"):
        before = fleet.made["new"].wakes
        fleet.wake(CTR)
        assert fleet.made["new"].wakes == before + 1
        fleet.made[gone].done.set()
        fleet.made[gone].gone.set()
        assert await fleet.forgotten.get() == gone
    assert fleet.buried == ["old", "new"]
    fleet.wake(CTR)
    await fleet.close()


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
    await made[0].rests.wait()
    await made[1].looks.wait()
    now = time.monotonic()
    assert fleet.stuck(now) is None
    assert fleet.stuck(now + 61.0) == "team/slow has been reconciled for 1m1s"
    made[1].done.set()
    await made[1].rests.wait()
    assert fleet.stuck(now + 61.0) is None
    await fleet.close()
