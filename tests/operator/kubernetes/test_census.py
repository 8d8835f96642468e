"""Whether a watch is dead, told from what it has not brought."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from emberscale_operator.kubernetes.census import TRAINING_JOB, Census, Lag, WatchedKind


def test_a_change_that_stays_missing_makes_the_watch_late() -> None:
    lag = Lag()
    lag.compare({"a": "2"}, {"a": "1"}, now=10.0)
    lag.compare({"a": "3"}, {"a": "1"}, now=40.0)
    assert lag.seconds(50.0) == 40.0


def test_a_watch_that_catches_up_between_two_looks_is_alive_though_it_is_always_late() -> None:
    lag = Lag()
    for number in range(10):
        lag.compare({"a": str(number + 1)}, {"a": str(number)}, now=float(number))
    assert lag.seconds(10.0) == 1.0


def test_a_deletion_and_a_creation_can_be_missed_too() -> None:
    for held, seen in (({"a": "1"}, {}), ({}, {"a": "1"})):
        lag = Lag()
        lag.compare(held, seen, now=0.0)
        assert lag.seconds(5.0) == 5.0
        lag.compare(held, held, now=6.0)
        assert lag.seconds(7.0) == 0.0


class _Cluster:
    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.seen: dict[str, str] = {}

    def versions(self, kind: WatchedKind) -> Mapping[str, str]:
        return self.seen if kind is TRAINING_JOB else {}


class _Client:
    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster

    async def versions(self, path: str, **query: str) -> dict[str, str]:
        return dict(self._cluster.held) if path.endswith("/trainingjobs") else {}


def test_a_dead_watch_is_reported_by_its_name_and_until_it_lives() -> None:
    async def scenario() -> list[str | None]:
        cluster = _Cluster()
        interval = 0.01
        counted: list[set[str]] = []

        async def count(jobs: Collection[str]) -> None:
            counted.append(set(jobs))

        client: Any = _Client(cluster)
        census = Census(client, cluster, (), interval, count)
        keeps = asyncio.create_task(census.keep())
        loop = asyncio.get_running_loop()

        async def until(failing: bool) -> str | None:
            while (census.behind(loop.time()) is not None) != failing:
                await asyncio.sleep(interval)
            return census.behind(loop.time())

        said = [census.behind(loop.time())]
        cluster.held = {"job": "2"}
        said.append(await until(failing=True))
        cluster.seen = {"job": "2"}
        said.append(await until(failing=False))
        keeps.cancel()
        assert counted[-1] == {"job"}
        return said

    before, dead, alive = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert before is None
    assert dead is not None
    assert dead.startswith("the watch of trainingjobs has missed a change for")
    assert alive is None
