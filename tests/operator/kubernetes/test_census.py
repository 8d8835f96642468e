"""Detects a dead watch by the changes that it has not brought."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from emberscale_operator.kubernetes.census import TRAINING_JOB, Census, Lag, WatchedKind
from emberscale_operator.kubernetes.client import ApiError


def test_a_change_that_stays_missing_makes_the_watch_late() -> None:
    lag = Lag()
    lag.compare({"a": "2"}, {"a": "1"}, now=10.0)
    lag.compare({"a": "3"}, {"a": "1"}, now=40.0)
    assert lag.seconds == 30.0, "what nobody looked at since is no news"


def test_a_watch_that_catches_up_between_two_looks_is_alive_though_it_is_always_late() -> None:
    lag = Lag()
    for number in range(10):
        lag.compare({"a": str(number + 1)}, {"a": str(number)}, now=float(number))
    assert lag.seconds == 0.0


def test_a_deletion_and_a_creation_can_be_missed_too() -> None:
    for held, seen in (({"a": "1"}, {}), ({}, {"a": "1"})):
        lag = Lag()
        lag.compare(held, seen, now=0.0)
        lag.compare(held, seen, now=5.0)
        assert lag.seconds == 5.0
        lag.compare(held, held, now=6.0)
        assert lag.seconds == 0.0


class _Cluster:
    """Holds jobs by namespace; a watch has brought those in `seen`. Namespaces in `forbidden` cannot be listed."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, str]] = {}
        self.seen: dict[str, dict[str, str]] = {}
        self.forbidden: set[str] = set()
        self.listed = asyncio.Event()

    def versions(self, kind: WatchedKind, namespace: str) -> Mapping[str, str]:
        return self.seen.get(namespace, {}) if kind is TRAINING_JOB else {}


class _Client:
    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster

    async def versions(self, path: str, **query: str) -> dict[str, str]:
        self._cluster.listed.set()
        namespace = path.partition("/namespaces/")[2].partition("/")[0]
        if namespace in self._cluster.forbidden:
            raise ApiError(403, "Forbidden", f"cannot list in {namespace}")
        return dict(self._cluster.held.get(namespace, {})) if path.endswith("/trainingjobs") else {}


class Scene:
    """A census that the test takes, of a cluster in which a watch may be 20 s late."""

    def __init__(self, *namespaces: str, interval: float = 10.0) -> None:
        self.cluster = _Cluster()
        self.counted: list[dict[str, set[str]]] = []
        client: Any = _Client(self.cluster)
        self.census = Census(client, self.cluster, namespaces, interval, self._count)

    async def behind(self, now: float) -> str | None:
        """Takes a census at `now`; returns the watch that is late by it."""
        await self.census.take(now)
        return self.census.behind()

    async def _count(self, jobs: Mapping[str, Collection[str]]) -> None:
        self.counted.append({namespace: set(uids) for namespace, uids in jobs.items()})


async def test_a_dead_watch_is_reported_by_its_name_and_until_it_lives() -> None:
    scene = Scene()
    assert await scene.behind(0.0) is None
    scene.cluster.held = {"": {"job": "2"}}
    assert await scene.behind(10.0) is None
    assert await scene.behind(29.0) is None, "it is as late as a live one may be"
    assert await scene.behind(30.0) == "the watch of trainingjobs has missed a change for 20s"
    scene.cluster.seen = {"": {"job": "2"}}
    assert await scene.behind(40.0) is None
    assert scene.counted[-1] == {"": {"job"}}


async def test_a_namespace_that_cannot_be_listed_hides_no_dead_watch_of_another_and_its_jobs_keep_their_state() -> None:
    scene = Scene("theirs", "ours")
    cluster = scene.cluster
    cluster.held = {"theirs": {"a": "1"}, "ours": {"b": "1"}}
    cluster.seen = {"theirs": {"a": "1"}, "ours": {"b": "1"}}
    await scene.census.take(0.0)
    assert scene.counted[-1] == {"theirs": {"a"}, "ours": {"b"}}
    cluster.forbidden = {"theirs"}
    cluster.held["ours"] = {"b": "2"}
    await scene.census.take(10.0)
    assert await scene.behind(30.0) == "the watch of trainingjobs in ours has missed a change for 20s"
    assert scene.counted[-1] == {"ours": {"b"}}, "jobs may exist where nobody can look"
    cluster.seen["ours"] = {"b": "2"}
    assert await scene.behind(40.0) is None
    cluster.forbidden = set()
    await scene.census.take(50.0)
    assert scene.counted[-1] == {"theirs": {"a"}, "ours": {"b"}}


async def test_what_cannot_be_listed_any_more_makes_no_watch_dead() -> None:
    """A watch is always a moment late; nobody can tell whether it caught up."""
    scene = Scene("theirs")
    scene.cluster.held = {"theirs": {"a": "2"}}
    assert await scene.behind(0.0) is None
    scene.cluster.forbidden = {"theirs"}
    assert await scene.behind(1000.0) is None


async def test_the_census_is_taken_again_and_again() -> None:
    scene = Scene(interval=0.0)
    keeps = asyncio.create_task(scene.census.keep())
    for _ in range(3):
        scene.cluster.listed.clear()
        await scene.cluster.listed.wait()
    keeps.cancel()
    await asyncio.gather(keeps, return_exceptions=True)
