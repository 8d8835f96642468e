"""Detects a dead watch by the changes that it has not brought."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

from emberscale_operator.kubernetes.census import TRAINING_JOB, Census, Lag, WatchedKind
from emberscale_operator.kubernetes.client import ApiError
from eventually import until, unwrap


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
        self.listings = 0

    def versions(self, kind: WatchedKind, namespace: str) -> Mapping[str, str]:
        return self.seen.get(namespace, {}) if kind is TRAINING_JOB else {}


class _Client:
    def __init__(self, cluster: _Cluster) -> None:
        self._cluster = cluster

    async def versions(self, path: str, **query: str) -> dict[str, str]:
        namespace = path.partition("/namespaces/")[2].partition("/")[0]
        self._cluster.listings += 1
        if namespace in self._cluster.forbidden:
            raise ApiError(403, "Forbidden", f"cannot list in {namespace}")
        return dict(self._cluster.held.get(namespace, {})) if path.endswith("/trainingjobs") else {}


class Scene:
    """A census of a cluster, repeated as quickly as possible."""

    def __init__(self, *namespaces: str) -> None:
        self.cluster = _Cluster()
        self.counted: list[dict[str, set[str]]] = []
        self._namespaces = namespaces

    async def __aenter__(self) -> "Scene":
        client: Any = _Client(self.cluster)
        self._census = Census(client, self.cluster, self._namespaces, 0.01, self._count)
        self._keeps = asyncio.create_task(self._census.keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeps.cancel()
        await asyncio.gather(self._keeps, return_exceptions=True)

    def behind(self) -> str | None:
        return self._census.behind()

    async def until(self, failing: bool) -> str | None:
        while (self.behind() is not None) != failing:
            await asyncio.sleep(0.01)
        return self.behind()

    async def rounds(self, number: int) -> None:
        """Waits until each namespace was listed this many more times."""
        enough = self.cluster.listings + (number + 1) * 2 * max(1, len(self._namespaces))
        while self.cluster.listings < enough:
            await asyncio.sleep(0.01)

    async def _count(self, jobs: Mapping[str, Collection[str]]) -> None:
        self.counted.append({namespace: set(uids) for namespace, uids in jobs.items()})


async def test_a_dead_watch_is_reported_by_its_name_and_until_it_lives() -> None:
    async with Scene() as scene:
        before = scene.behind()
        scene.cluster.held = {"": {"job": "2"}}
        dead = await scene.until(failing=True)
        scene.cluster.seen = {"": {"job": "2"}}
        alive = await scene.until(failing=False)
        assert scene.counted[-1] == {"": {"job"}}
    assert before is None
    assert unwrap(dead).startswith("the watch of trainingjobs has missed a change for")
    assert alive is None


async def test_a_namespace_that_cannot_be_listed_hides_no_dead_watch_of_another_and_its_jobs_keep_their_state() -> None:
    async with Scene("theirs", "ours") as scene:
        cluster = scene.cluster
        cluster.held = {"theirs": {"a": "1"}, "ours": {"b": "1"}}
        cluster.seen = {"theirs": {"a": "1"}, "ours": {"b": "1"}}
        await scene.rounds(1)
        assert scene.counted[-1] == {"theirs": {"a"}, "ours": {"b"}}
        cluster.forbidden = {"theirs"}
        await scene.rounds(1)
        scene.counted.clear()
        cluster.held["ours"] = {"b": "2"}
        dead = await scene.until(failing=True)
        assert unwrap(dead).startswith("the watch of trainingjobs in ours has missed a change for")
        assert scene.counted[-1] == {"ours": {"b"}}, "jobs may exist where nobody can look"
        cluster.seen["ours"] = {"b": "2"}
        await scene.until(failing=False)
        cluster.forbidden = set()
        await scene.rounds(1)
        assert scene.counted[-1] == {"theirs": {"a"}, "ours": {"b"}}


async def test_what_cannot_be_listed_any_more_makes_no_watch_dead() -> None:
    """A watch is always a moment late; nobody can tell whether it caught up."""
    async with Scene("theirs") as scene:
        scene.cluster.held = {"theirs": {"a": "2"}}
        await until(lambda: scene.counted)
        scene.cluster.forbidden = {"theirs"}
        seen = scene.behind()
        await scene.rounds(5)
        assert scene.behind() == seen
