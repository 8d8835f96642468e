"""What the operator watches, by a server in place of the API server."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from api_server import api_server, never
from emberscale_api.job.training_job import API_VERSION, GROUP, KIND, PLURAL, VERSION
from emberscale_operator.kubernetes.client import ApiClient, ApiUnavailableError
from emberscale_operator.kubernetes.job import JobKey
from emberscale_operator.kubernetes.namespaces import await_closing, readable_namespaces
from emberscale_operator.kubernetes.operator import WatchedCluster, _until_one_ends, _watch
from training_jobs import job_body

_SECONDS = 20.0


class Namespaces:
    """An API server with one job in each namespace, but for those that the operator may not read."""

    def __init__(self, forbidden: set[str]) -> None:
        self.forbidden = forbidden
        self._asked: Counter[str] = Counter()
        self._changed = asyncio.Condition()

    async def asked_for(self, namespace: str, times: int) -> None:
        """Waits until so many lists of a namespace were asked for."""
        async with asyncio.timeout(_SECONDS), self._changed:
            await self._changed.wait_for(lambda: self._asked[namespace] >= times)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        for part in request.path.split("/"):
            self._asked[part] += 1
        async with self._changed:
            self._changed.notify_all()
        match request.path.strip("/").split("/"):
            case ["apis"]:
                return web.json_response({"groups": [_group()]})
            case ["apis", group] if group == GROUP:
                return web.json_response(_group())
            case ["apis", _, _]:
                return web.json_response({"resources": [_resource(PLURAL, KIND)]})
            case ["api"]:
                return web.json_response({"versions": ["v1"]})
            case ["api", "v1"]:
                kinds = {"pods": "Pod", "namespaces": "Namespace"}
                return web.json_response({"resources": [_resource(*kind) for kind in kinds.items()]})
            case [*_, "namespaces", namespace, _] if namespace in self.forbidden:
                problem = {"kind": "Status", "reason": "Forbidden", "message": f"no role in {namespace}", "code": 403}
                return web.json_response(problem, status=403)
            case [*_, "namespaces", namespace, plural]:
                return await _listed(request, namespace, plural)
        return web.json_response({"kind": "Status", "code": 404}, status=404)


def _group() -> dict[str, Any]:
    version = {"groupVersion": API_VERSION, "version": VERSION}
    return {"name": GROUP, "versions": [version], "preferredVersion": version}


def _resource(plural: str, kind: str) -> dict[str, Any]:
    return {"name": plural, "singularName": "", "kind": kind, "namespaced": True, "verbs": ["list", "watch", "patch"]}


async def _listed(request: web.Request, namespace: str, plural: str) -> web.StreamResponse:
    if request.query.get("watch"):
        return await never()
    body = job_body()
    body["metadata"] |= {"namespace": namespace, "uid": f"uid-{namespace}", "resourceVersion": "7"}
    items = [body] if plural == PLURAL else []
    return web.json_response({"kind": "List", "metadata": {"resourceVersion": "7"}, "items": items})


class Seen:
    """A fleet that notes which jobs it sees."""

    def __init__(self) -> None:
        self.namespaces: set[str] = set()
        self.any = asyncio.Event()

    def see(self, key: JobKey, uid: str) -> None:
        self.namespaces.add(key.namespace)
        self.any.set()

    def wake(self, key: JobKey) -> None:
        pass


async def test_a_namespace_that_cannot_be_read_keeps_no_job_of_another_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever administers a namespace may delete the operator's role there, or the namespace."""
    fleet: Any = Seen()
    stopping = asyncio.Event()
    async with api_server(Namespaces({"theirs"}).answer, tmp_path, monkeypatch):
        client = await ApiClient.connect()
        readable = asyncio.create_task(readable_namespaces(client, ("ours", "theirs")))
        watching = asyncio.create_task(_watch(readable, WatchedCluster(), fleet, stopping))
        try:
            async with asyncio.timeout(_SECONDS):
                await fleet.any.wait()
            assert fleet.namespaces == {"ours"}
        finally:
            stopping.set()
            await watching
            await client.close()


async def test_an_operator_that_can_read_no_namespace_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api_server(Namespaces({"ours", "theirs"}).answer, tmp_path, monkeypatch):
        client = await ApiClient.connect()
        with pytest.raises(ApiUnavailableError, match="no role in theirs"):
            await readable_namespaces(client, ("ours", "theirs"))
        await client.close()


async def test_an_operator_starts_anew_once_a_namespace_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kopf would end, and leave the watches of the other namespaces hanging."""
    namespaces = Namespaces(set())
    async with api_server(namespaces.answer, tmp_path, monkeypatch):
        client = await ApiClient.connect()
        readable = asyncio.create_task(readable_namespaces(client, ("ours", "theirs")))
        closing = asyncio.create_task(await_closing(client, readable, 0.01))
        await namespaces.asked_for("theirs", 3)
        assert not closing.done()
        namespaces.forbidden = {"theirs"}
        await asyncio.wait_for(closing, _SECONDS)
        await client.close()


async def test_an_operator_that_is_told_to_stop_waits_for_its_watches_alone() -> None:
    """The others run for ever, and those who wait for the lease wait meanwhile."""
    stopping, closed = asyncio.Event(), asyncio.Event()

    async def close() -> None:
        closed.set()

    watching, keeping = asyncio.create_task(closed.wait()), asyncio.create_task(asyncio.Event().wait())
    told = asyncio.create_task(stopping.wait())
    stopping.set()
    async with asyncio.timeout(1.0):
        await _until_one_ends(watching, [keeping, told], stopping, close)
    assert (watching.cancelled(), keeping.cancelled()) == (False, True)


async def test_an_operator_that_cannot_go_on_ends_its_watches_and_says_why() -> None:
    stopping = asyncio.Event()

    async def lose() -> None:
        raise ApiUnavailableError("the lease is lost")

    async def close() -> None:
        assert stopping.is_set()

    watching = asyncio.create_task(stopping.wait())
    with pytest.raises(ApiUnavailableError, match="the lease is lost"):
        await _until_one_ends(watching, [asyncio.create_task(lose())], stopping, close)
    assert watching.done()
