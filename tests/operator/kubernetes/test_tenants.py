"""Masters' states in a real redis-server: what a job's master may do there, and how much a job may store."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs
from tests.operator.kubernetes.redis_servers import StateRedis

from emberscale_api.compatibility import StateKeys
from emberscale_jobmaster import takeover
from emberscale_jobmaster.store import JobStore, StoreUnavailableError
from emberscale_operator.kubernetes.tenants import Tenants
from eventually import until, unwrap


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StateRedis]:
    with StateRedis(tmp_path) as started:
        yield started


async def test_a_masters_store_works_as_the_jobs_user(server: StateRedis) -> None:
    async with server.operator("job-1"):
        for term in (1, 2):
            store = JobStore(server.url_of("job-1"), "job-1")
            store.open()
            store.save_blocks("train", 0, b"blocks")
            store.add_bad_records([("file", 3)])
            store.save(takeover.initial(wall=1.0))
            store.confirm()
            assert store.term == term
            store.close()
        store = JobStore(server.url_of("job-1"), "job-1")
        store.open()
        server.admin.delete(*astuple(StateKeys.of("job-1")))
        store.save(takeover.initial(wall=1.0))  # restores what Redis lost
        assert server.admin.get(StateKeys.of("job-1").term) == "3"


async def test_a_new_job_gets_its_user_at_once(server: StateRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberscale_operator.kubernetes.tenants._LOOK_SECONDS", 3600.0)
    async with server.operator() as tenants:
        keeps = asyncio.create_task(tenants.keep())
        for job in ("job-1", "job-2"):
            tenants.admit(job, "ours", f"password-{job}")
            await until(partial(server.has_user_of, job))
        keeps.cancel()
        await asyncio.gather(keeps, return_exceptions=True)


@pytest.mark.parametrize("while_away", [True, False])
async def test_the_master_of_a_deleted_job_is_deposed(server: StateRedis, while_away: bool) -> None:
    async with server.operator("job-1") as tenants:
        store = JobStore(server.url_of("job-1"), "job-1")
        store.open()
        if while_away:
            async with server.operator() as other:
                await other.sweep({"ours": []})
        else:
            await tenants.remove("job-1")
        assert not server.has_user_of("job-1")
        assert server.admin.get(StateKeys.of("job-1").term) == "0"
        with pytest.raises(StoreUnavailableError):
            store.confirm()


def test_a_weak_or_odd_password_in_the_operators_url_is_no_part_of_the_jobs(server: StateRedis) -> None:
    assert server.url_of("job-1").endswith(f":password-job-1@127.0.0.1:{server.port}/0")
    assert "own" not in server.url_of("job-1")


async def test_a_job_that_fills_redis_is_expelled_and_the_others_go_on(server: StateRedis) -> None:
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", 24 << 20)
    async with server.operator("victim", "mallory") as tenants:
        victim = JobStore(server.url_of("victim"), "victim")
        victim.open()
        mallory = redis.Redis.from_url(server.url_of("mallory"))
        own = StateKeys.of("mallory").blocks
        for number in range(16):
            mallory.hset(own, str(number), bytes(3 << 18))
        with pytest.raises(redis.RedisError):  # refused like all writes, or disconnected
            mallory.hset(own, "more", bytes(16 << 20))
        await tenants.look()
        assert "a job may keep a quarter" in (tenants.expelled("mallory") or "")
        assert tenants.expelled("victim") is None
        victim.save_blocks("train", 0, b"there is room")
        victim.close()
        await until(lambda: server.used_bytes() < 12 << 20)  # Redis frees large values in the background
        tenants.admit("mallory", "ours", "password-mallory")
        await tenants.look()
        assert not server.has_user_of("mallory"), "it stays out"
        await tenants.remove("mallory")
        assert tenants.expelled("mallory") is None


async def test_a_redis_with_a_full_volume_which_refuses_all_writes_is_down(
    server: StateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with server.operator("job-1") as tenants:
        info = tenants._redis.info

        async def full(*sections: str) -> Any:
            return {**await info(*sections), "aof_last_write_status": "err"}

        with monkeypatch.context() as volume, capture_logs() as told:
            volume.setattr(tenants._redis, "info", full)
            tenants.admit("job-2", "ours", "password-job-2")
            await tenants.look()
            assert tenants.up is False
            assert server.has_user_of("job-2"), "it does what it still can"
        assert ["volume" in entry["problem"] for entry in told if entry["log_level"] == "warning"] == [True]
        await tenants.look()
        assert tenants.up is True


async def test_a_redis_whose_connections_somebody_holds_is_down(server: StateRedis) -> None:
    """The operator has its connection, but no new master gets one; it takes no token to hold them."""
    async with server.operator() as tenants:
        server.admin.config_set("maxclients", 40)
        with ExitStack() as held, capture_logs() as told:
            for _ in range(60):
                held.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            for _ in range(2):
                await tenants.look()
                assert tenants.up is False
        assert ["of 40 connections" in entry["problem"] for entry in told] == [True]
        await until(lambda: int(server.admin.info("clients")["connected_clients"]) < 20)
        await tenants.look()
        assert tenants.up is True


async def test_where_several_jobs_together_fill_redis_the_one_with_the_most_is_named(server: StateRedis) -> None:
    server.admin.config_set("maxmemory", 24 << 20)
    async with server.operator("a", "b", "c", "d") as tenants:
        for job, blocks in (("a", 6), ("b", 7), ("c", 6), ("d", 5)):
            for number in range(blocks):
                server.admin.hset(StateKeys.of(job).blocks, str(number), "x" * (3 << 18))
        await tenants.look()
        assert "this one has the most in it: 5." in (tenants.fills("b") or "")
        assert [tenants.fills(job) for job in "acd"] == [None] * 3
        assert sorted(tenants.sizes, key=lambda job: tenants.sizes[job])[-1] == "b"
        assert not [job for job in "abcd" if tenants.expelled(job)], "none has more than a quarter"
        for job in "abc":
            await tenants.remove(job)
        await until(lambda: server.used_bytes() < 12 << 20)  # Redis frees large values in the background
        await tenants.look()
        assert tenants.fills("b") is None
        assert tenants.sizes == {}


def failing_at_first(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has Redis not answer the first removal of a job; returns the jobs whose removal was tried."""
    remove, tried = Tenants._remove, list[str]()

    async def fails_at_first(tenants: Tenants, job_uid: str) -> None:
        tried.append(job_uid)
        if len(tried) == 1:
            raise redis.exceptions.TimeoutError("Redis is busy")
        await remove(tenants, job_uid)

    monkeypatch.setattr(Tenants, "_remove", fails_at_first)
    return tried


async def test_an_expulsion_that_redis_did_not_answer_is_tried_again(
    server: StateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.admin.config_set("maxmemory", 24 << 20)
    tried = failing_at_first(monkeypatch)
    async with server.operator("mallory") as tenants:
        for number in range(16):
            server.admin.hset(StateKeys.of("mallory").blocks, str(number), "x" * (3 << 18))
        await tenants.look()
        assert tenants.expelled("mallory") is None
        await tenants.look()
        assert tenants.expelled("mallory") is not None
        assert tried == ["mallory", "mallory"]
        assert not server.has_user_of("mallory")


async def test_nobody_is_expelled_from_a_redis_without_a_bound(server: StateRedis) -> None:
    async with server.operator("job-1") as tenants:
        JobStore(server.url_of("job-1"), "job-1").open()
        await tenants.look()
        assert tenants.expelled("job-1") is None
        assert server.has_user_of("job-1")


async def test_a_jobs_user_stores_nothing_that_the_operator_does_not_count(server: StateRedis) -> None:
    async with server.operator("job-1"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            redis.Redis.from_url(server.url_of("job-1")).set("emberscale:job-1:more", "x")


async def test_it_is_known_whether_redis_answers_and_how_full_it_is(server: StateRedis) -> None:
    async with server.operator("job-1") as tenants:
        assert (tenants.up, tenants.fill) == (True, None), "there is no maxmemory"
        server.admin.config_set("maxmemory", 64 << 20)
        await tenants.look()
        assert 0.0 < unwrap(tenants.fill) < 0.5
        server.kill()
        await tenants.look()
        assert not tenants.up
        server.start()
        await tenants.look()
        assert tenants.up


async def test_a_job_that_cannot_be_swept_is_told_of_and_keeps_no_other_job_from_being_swept(
    server: StateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {"gone-1", "gone-2", "gone-3"}
    async with server.operator(*gone):
        pass
    tried = failing_at_first(monkeypatch)
    async with server.operator() as tenants:
        with capture_logs() as logs:
            await tenants.sweep({"ours": []})
        told = {(entry["job_uid"], entry["problem"]) for entry in logs if entry["event"] == "redis_state_not_removed"}
        assert told == {(tried[0], "Redis is busy")}
        assert server.users() == {"default", server.user_of(tried[0])}
        await tenants.sweep({"ours": []})
        assert server.users() == {"default"}
