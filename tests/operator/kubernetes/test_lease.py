"""The operator's lease: who owns it, so that it is deleted with the installation, and how it is kept."""

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from api_server import api_server, never
from emberscale_operator.kubernetes.client import ApiClient
from emberscale_operator.kubernetes.lease import LeaderLease, LeaseLostError, account_owner


def write_token(path: Path, claims: object) -> Path:
    parts = ({"alg": "RS256"}, claims)
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    path.write_text(".".join([*encoded, "signature"]))
    return path


def test_the_lease_belongs_to_the_account_that_the_token_names(tmp_path: Path) -> None:
    claims = {"kubernetes.io": {"namespace": "system", "serviceaccount": {"name": "operator", "uid": "1234"}}}
    owner = account_owner(write_token(tmp_path / "token", claims))
    assert owner == {"apiVersion": "v1", "kind": "ServiceAccount", "name": "operator", "uid": "1234"}


@pytest.mark.parametrize("claims", [{}, {"kubernetes.io": {}}, ["none"]])
def test_a_token_that_names_no_account_leaves_it_without_an_owner(tmp_path: Path, claims: object) -> None:
    assert account_owner(write_token(tmp_path / "token", claims)) is None


def test_outside_of_a_pod_there_is_no_owner(tmp_path: Path) -> None:
    assert account_owner(tmp_path / "token") is None


class _LeaseServer:
    """Keeps one lease. It answers no other calls, and while `silent`, none about the lease.

    `renewed` and `waiting` are released with each renewal, and with each call that it does not answer.
    """

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.renewals = 0
        self.renewed, self.waiting = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.silent = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if "/leases" not in request.path or self.silent:
            self.waiting.release()
            return await never()
        if request.method in ("POST", "PUT"):
            self.lease = await request.json()
            self.lease["metadata"]["resourceVersion"] = str(self.renewals)
            self.renewals += 1
            self.renewed.release()
        if self.lease is None:
            return web.json_response({"reason": "NotFound"}, status=404)
        return web.json_response(self.lease)


async def test_a_renewal_waits_behind_no_other_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = _LeaseServer()
    async with api_server(server.answer, tmp_path, monkeypatch):
        client = await ApiClient.connect()
        calls = [asyncio.create_task(client.get("/api/v1/pods")) for _ in range(200)]
        for _ in range(64):
            await server.waiting.acquire()
        lease = await LeaderLease.connect("ops", "emberscale-operator", "op-1")
        await asyncio.wait_for(lease.acquire(), 30)
        assert server.lease is not None
        assert server.lease["spec"]["holderIdentity"] == "op-1"
        assert (server.lease["apiVersion"], server.lease["kind"]) == ("coordination.k8s.io/v1", "Lease")
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await lease.close()
        await client.close()


async def test_a_holder_that_is_not_heard_gives_up_before_another_may_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if the call itself hangs for longer."""
    server = _LeaseServer()
    async with api_server(server.answer, tmp_path, monkeypatch):
        client = await ApiClient.connect()
        lease = LeaderLease(client, "ops", "emberscale-operator", "op-1", renew=0.01, deadline=3.0)
        await lease.acquire()
        keeps = asyncio.create_task(lease.keep())
        for _ in range(3):
            await server.renewed.acquire()
        server.silent = True
        with pytest.raises(LeaseLostError, match="not renewed within 3s"):
            await asyncio.wait_for(keeps, 30)
        await client.close()


@pytest.mark.parametrize("holder", ["op-2", ""])
async def test_a_holder_stops_at_once_when_another_has_or_had_the_lease_meanwhile(
    holder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = _LeaseServer()
    async with api_server(server.answer, tmp_path, monkeypatch):
        client = await ApiClient.connect()
        lease = LeaderLease(client, "ops", "emberscale-operator", "op-1", renew=0.01, deadline=3600.0)
        await lease.acquire()
        assert server.lease is not None
        server.lease["spec"]["holderIdentity"] = holder
        with pytest.raises(LeaseLostError, match=f"is held by {holder or 'nobody'} now"):
            await asyncio.wait_for(lease.keep(), 30)
        assert server.lease["spec"]["holderIdentity"] == holder
        await client.close()
