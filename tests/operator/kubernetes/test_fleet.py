"""The health of all controllers together."""

import asyncio
import time
from typing import Any

from emberscale_operator.kubernetes.fleet import Fleet
from emberscale_operator.kubernetes.job import JobKey
from eventually import until


class _Controller:
    """A controller whose look at its job lasts until `done` is set; its job is gone once `gone` is."""

    def __init__(self, key: JobKey, uid: str = "uid") -> None:
        self.key, self.uid = key, uid
        self.done, self.gone = asyncio.Event(), asyncio.Event()
        self.busy_since: float | None = None
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    async def run(self) -> None:
        self.busy_since = time.monotonic()
        await self.done.wait()
        self.busy_since = None
        await self.gone.wait()


class _Fleet(Fleet):
    """Keeps the controllers that it has made, and the uids of the jobs that it has buried."""

    def __init__(self) -> None:
        self.made: dict[str, _Controller] = {}
        self.buried: list[str] = []
        super().__init__(self._made, self._note)

    def _made(self, key: JobKey, uid: str) -> Any:
        self.made[uid] = _Controller(key, uid)
        return self.made[uid]

    async def _note(self, uid: str) -> None:
        self.buried.append(uid)


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
        await until(lambda: (CTR, gone) not in fleet.controllers)  # noqa: B023  # it is awaited here
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
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    now = time.monotonic()
    assert fleet.stuck(now) is None
    assert fleet.stuck(now + 61.0) == "team/slow has been reconciled for 61 s"
    made[1].done.set()
    await asyncio.sleep(0)
    assert fleet.stuck(now + 61.0) is None
    await fleet.close()
