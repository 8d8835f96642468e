"""The jobs in a real Redis for flash checkpoints: each reaches its own keys with the commands that it needs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.operator.kubernetes.test_tenants import INSTALLATION, Server, meanwhile

from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.job import InitializerSpec, OptimizerSpec, TableSpec
from emberscale_api.routing import BUCKETS, DENSE_PIECES
from emberscale_jobmaster.flash_manifests import FlashManifests
from emberscale_operator.kubernetes.flash_tenants import FlashTenants, flash_password, flash_user
from emberscale_operator.kubernetes.tenants import user_url
from emberscale_trainer.checkpoint import FlashWriter, Share, Work
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.table import DensePieces, TableStore
from eventually import until
from master_stand_in import checkpoint_manifest
from redis_attacker import outcomes, refused

NAMESPACES = f"{flash_user(INSTALLATION, '')}namespaces"


def url_of(server: Server, job: str) -> str:
    return user_url(server.url, flash_user(INSTALLATION, job), flash_password(f"password-{job}"))


def users(server: Server) -> set[str]:
    return {str(user) for user in server.admin.acl_users()}


@asynccontextmanager
async def operator(server: Server, *jobs: str) -> AsyncIterator[FlashTenants]:
    """Yields the tenants of an operator that has made the users of these jobs."""
    tenants = FlashTenants(server.url, INSTALLATION)
    for job in jobs:
        tenants.admit(job, "ours", f"password-{job}")
    try:
        await tenants.look()
        yield tenants
    finally:
        await tenants.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    started.end()


def save(url: str, job: str) -> None:
    """Takes three flash checkpoints of a small table, as a parameter server and a master do."""
    spec = TableSpec(0, "C1", 0, 4, OptimizerSpec(), InitializerSpec(), seed=3)
    tables = TableStore([spec], DensePieces.of(np.zeros(64, np.float32), OptimizerSpec()))
    writer, lock = FlashWriter(url, job, "incarnation"), threading.RLock()
    for number in range(3):
        counts = np.array([10, 0], np.uint32)
        tables.push(counts, np.arange(10), np.ones(tables.values_per_request(counts), np.float32))
        draft = writer.begin(tables, lock, 1 << 30)
        owned = Ownership(np.ones(BUCKETS, np.bool_), np.ones(DENSE_PIECES, np.bool_))
        share = Share(0, owned, AppliedBatches(), 64)
        files = writer.write(draft, f"flash-{number:08d}", share, Work())
        complete(url, job, number, files)
        tables.remove_bucket(0, number)


def complete(url: str, job: str, number: int, files: list[CheckpointFile]) -> None:
    manifests = FlashManifests(url, job)
    written = checkpoint_manifest(files, id=f"flash-{number:08d}", number=number, job_uid=job)
    before = manifests.write(written, lambda: None)
    if before is not None:
        manifests.remove_replaced(before, written)


async def test_servers_and_masters_work_as_the_jobs_user(server: Server) -> None:
    async with operator(server, "job-1"):
        await asyncio.to_thread(save, url_of(server, "job-1"), "job-1")
        newest = FlashManifests(url_of(server, "job-1"), "job-1").newest()
        assert newest is not None
        assert newest.id == "flash-00000002"
        assert server.admin.dbsize() > 3


async def test_a_server_sweeps_what_the_one_before_left_as_the_jobs_user(server: Server) -> None:
    async with operator(server, "job-1"):
        left = "emberscale:job-1:flash:ps-0/left.rows"
        server.admin.set(left, b"x")
        server.admin.sadd("emberscale:job-1:flash:ps-0/inventory", left)
        await asyncio.to_thread(save, url_of(server, "job-1"), "job-1")
        assert not server.admin.exists(left)


async def test_no_job_reaches_the_rows_of_another(server: Server) -> None:
    async with operator(server, "job-1", "job-2"):
        await asyncio.to_thread(save, url_of(server, "job-1"), "job-1")
        before = server.admin.dbsize()
        for what, outcome in outcomes(url_of(server, "job-2"), "job-1:flash", "job-2:flash").items():
            assert refused(outcome), (what, outcome)
        assert server.admin.dbsize() == before


async def test_a_redis_that_was_started_anew_gets_its_users_back(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberscale_operator.kubernetes.flash_tenants._LOOK_SECONDS", 0.01)
    async with operator(server, "job-1") as tenants:
        keeps = asyncio.create_task(tenants.keep())
        server.end()
        server.start()
        await until(lambda: flash_user(INSTALLATION, "job-1") in users(server))
        keeps.cancel()
        await asyncio.gather(keeps, return_exceptions=True)


@pytest.mark.parametrize("while_away", [True, False])
async def test_what_a_deleted_job_left_is_removed(server: Server, while_away: bool) -> None:
    async with operator(server, "job-1") as tenants:
        await asyncio.to_thread(save, url_of(server, "job-1"), "job-1")
        if while_away:
            async with operator(server) as other:
                await other.sweep({"ours": ["job-2"]})
                await other.look()
        else:
            tenants.remove("job-1")
            await tenants.look()
        assert server.admin.dbsize() == 0
        assert flash_user(INSTALLATION, "job-1") not in users(server)


async def test_rows_of_a_job_stay_if_the_operator_no_longer_watches_its_namespace(server: Server) -> None:
    async with operator(server, "job-1", "job-2") as tenants:
        tenants.admit("job-2", "theirs", "password-job-2")
        await tenants.look()
        for job in ("job-1", "job-2"):
            await asyncio.to_thread(save, url_of(server, job), job)
    async with operator(server) as tenants:
        await tenants.sweep({"ours": []})
        await tenants.look()
        assert server.admin.hgetall(NAMESPACES) == {"job-2": "theirs"}
        assert not server.admin.keys("emberscale:job-1:*")
        assert users(server) == {"default", flash_user(INSTALLATION, "job-2")}
        assert server.admin.keys("emberscale:job-2:*")


async def test_a_job_whose_admission_changes_while_its_user_is_made_gets_the_later_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(server) as tenants:

        async def change() -> None:
            tenants.admit("job-1", "theirs", "password-job-1")

        meanwhile(monkeypatch, change)
        tenants.admit("job-1", "ours", "password-job-1")
        await tenants.look()
        assert server.admin.hgetall(NAMESPACES) == {"job-1": "ours"}
        await tenants.look()
        assert server.admin.hgetall(NAMESPACES) == {"job-1": "theirs"}


async def test_a_full_redis_for_rows_gets_users_and_loses_what_is_gone(server: Server) -> None:
    async with operator(server, "gone"):
        await asyncio.to_thread(save, url_of(server, "gone"), "gone")
    server.admin.config_set("maxmemory", 1)
    async with operator(server, "job-1") as tenants:
        await tenants.sweep({"ours": ["job-1"]})
        await tenants.look()
        assert users(server) == {"default", flash_user(INSTALLATION, "job-1")}
        server.admin.config_set("maxmemory", 0)
        await tenants.sweep({"ours": ["job-1"]})
        await tenants.look()
        assert server.admin.hgetall(NAMESPACES) == {"job-1": "ours"}
