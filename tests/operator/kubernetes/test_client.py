"""How the operator understands the answers of an API server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from api_server import Handler, api_server
from emberscale_operator.kubernetes import client as client_module
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiInternalError, ApiUnavailableError

WEBHOOK = 'Internal error occurred: failed calling webhook "guard.example.com": service unavailable'


@asynccontextmanager
async def connected(handler: Handler, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiClient]:
    """Yields a client of an API server with the test's answers."""
    async with api_server(handler, folder, monkeypatch):
        client = await ApiClient.connect()
        yield client
        await client.close()


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (web.json_response({"kind": "Status", "reason": "InternalError", "message": WEBHOOK}, status=500), True),
        (web.json_response({"kind": "Status", "reason": "ServiceUnavailable", "message": "later"}, status=503), False),
        (web.Response(text="bad gateway", status=502), False),
    ],
)
async def test_an_error_behind_the_api_server_is_told_from_one_that_is_away(
    answer: web.Response, kind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return answer

    async with connected(handler, tmp_path, monkeypatch) as client:
        with pytest.raises(ApiUnavailableError) as raised:
            await client.create("/api/v1/namespaces/team/pods", {})
    assert isinstance(raised.value, ApiInternalError) is kind


async def test_calls_that_are_refused_whatever_their_object_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks = 'pods "a" is forbidden: User "system:serviceaccount:e" cannot patch resource "pods/resize" in API group ""'
    quota = 'pods "a" is forbidden: exceeded quota: q, requested: limits.memory=1Gi'
    answers = [(403, lacks), (403, quota), (404, ""), (409, ""), (422, ""), (500, ""), (200, "")]

    async def handler(request: web.Request) -> web.StreamResponse:
        status, message = answers.pop(0)
        return web.json_response({"message": message}, status=status)

    async with connected(handler, tmp_path, monkeypatch) as client:
        for _ in range(6):
            with pytest.raises((ApiError, ApiUnavailableError)):
                await client.patch("/api/v1/namespaces/team/pods/a/resize", {})
        await client.patch("/api/v1/namespaces/team/pods/a/resize", {})
        assert client.refused == {("PATCH", "pods/resize", "403"): 1, ("PATCH", "pods/resize", "500"): 1}
        assert client.calls == {("PATCH", "pods/resize"): 7}
        answers.append((403, lacks.replace("patch", "create")))
        with pytest.raises(ApiError):
            await client.create("/api/v1/namespaces/team/pods", {})
        assert client.refused["POST", "pods", "403"] == 1


async def test_an_answer_without_end_is_not_read_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_ANSWER_BYTES", 1 << 20)
    sent = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b" " * (1 << 16))
            sent += 1 << 16
        await response.write(b"{}")
        return response

    async with connected(handler, tmp_path, monkeypatch) as client:
        with pytest.raises(ApiError, match="exceeds 1 MiB"):
            await client.get("/api/v1/namespaces/team/events")
    assert sent < 1000 << 16


async def test_versions_are_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"": (["a", "b"], "next"), "next": (["c"], "last"), "last": (None, "")}
    accepted = []

    async def handler(request: web.Request) -> web.StreamResponse:
        accepted.append(request.headers["Accept"])
        uids, following = pages[request.query.get("continue", "")]
        items = [{"metadata": {"uid": uid, "resourceVersion": f"v-{uid}"}} for uid in uids] if uids else None
        return web.json_response({"metadata": {"continue": following}, "items": items})

    async with connected(handler, tmp_path, monkeypatch) as client:
        found = await client.versions("/api/v1/pods", labelSelector="a=b")
    assert found == {"a": "v-a", "b": "v-b", "c": "v-c"}
    assert all("PartialObjectMetadataList" in header for header in accepted)


async def test_objects_with_much_metadata_are_listed_in_smaller_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may create pods may give each 256 KiB of annotations, and would end the census of the whole cluster."""
    monkeypatch.setattr(client_module, "_ANSWER_BYTES", 1 << 20)
    uids = [f"uid-{number}" for number in range(600)]

    async def handler(request: web.Request) -> web.StreamResponse:
        first = int(request.query.get("continue") or 0)
        last = first + int(request.query["limit"])
        items = [
            {"metadata": {"uid": uid, "resourceVersion": "7", "annotations": {"a": "x" * (8 << 10)}}}
            for uid in uids[first:last]
        ]
        return web.json_response({"metadata": {"continue": str(last) if last < len(uids) else ""}, "items": items})

    async with connected(handler, tmp_path, monkeypatch) as client:
        assert await client.versions("/api/v1/pods") == dict.fromkeys(uids, "7")
        monkeypatch.setattr(client_module, "_ANSWER_BYTES", 1 << 10)
        with pytest.raises(ApiError, match="exceeds 1 KiB"):
            await client.versions("/api/v1/pods")
