import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import redis
from tests.jobmaster.small_job import job

from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.compatibility import StateKeys
from emberscale_api.dataset import DataFile
from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.routing import PsAddress
from emberscale_jobmaster import takeover
from emberscale_jobmaster.barrier import BarrierPhase, DrivenBarrier
from emberscale_jobmaster.events import SuspensionWanted
from emberscale_jobmaster.ledger import Ledger
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.operations import (
    STORAGE,
    Checkpointing,
    CheckpointPhase,
    CheckpointPurpose,
    Image,
    Pruning,
    Restore,
    Restored,
    RestorePhase,
    Source,
)
from emberscale_jobmaster.retry import Trouble
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.statistics import Tally
from emberscale_jobmaster.store import DeposedError, JobStore, StoreUnavailableError, UnreadableStateError, redacted
from eventually import eventually, unwrap
from ports import free_port
from redis_process import RedisProcess


def rich_state() -> JobState:
    """A state in which no field has its default."""
    member = MemberId(Role.WORKER, 3, "w")
    granted = unwrap(Ledger.fresh(50, done=((4, 6),)).grant(member, 17, 4))
    state = takeover.initial(wall=12.5)
    return replace(
        state,
        stage=Stage.EVALUATE,
        ledger=granted[0].commit(17, 2),
        next_token=18,
        members=state.members.register(Role.WORKER, 3, Process("w", "tcp://a", "b:1", "c:2")),
        training_files=(DataFile("/d/0", 9, 500),),
        restored=Restored({0: ((0, 4), (9, 50))}, (Tally(samples=1).result(1),), (("/d/0", 9),)),
        evaluations=(Tally(samples=4, loss_sum=1.0, label_sum=1).result(1),),
        tally=Tally(samples=2, positives=(1,), negatives=(1,)),
        bad_record_samples=(BadRecord("/d/0", 7, "no label"),),
        restore=_restore(),
        checkpointings=(_checkpointing(),),
        prunings=(Pruning(3, deadline=4.5, pending={STORAGE: 10}),),
        troubles={"Restore": Trouble("CheckpointUnreachable", "EIO", 1.5, 2.5, 2, "00000003")},
        damaged={"00000001": "checksum differs"},
        damaged_files={"00000001": "/checkpoints/00000001/ps-0/rows"},
        ends_with=CheckpointPurpose.FINAL,
    )


def _restore() -> Restore:
    restored = Restored({0: ((0, 4),)}, (), (("/d/0", 9),), 3.5)
    return Restore(
        1,
        RestorePhase.LOAD,
        deadline=60.5,
        pending={0: 7, 1: 8},
        source=Source("00000002", restored),
        loaded={0: 5},
        applied={1: {0: ((0, 4),)}},
        again_at={1: 3.5},
    )


def _checkpointing() -> Checkpointing:
    barrier = DrivenBarrier(
        number=12500,
        generation=2,
        servers=(PsAddress(0, "p", "tcp://a", "b:1"),),
        phase=BarrierPhase.SETTLE,
        held={0: {0: ((0, 4),)}},
        said={},
        settled={1: ((2, 3),)},
    )
    return Checkpointing(
        id=2,
        checkpoint="00000003",
        purpose=CheckpointPurpose.FINAL,
        phase=CheckpointPhase.SAVE,
        began_at=1.5,
        deadline=9.5,
        barrier=barrier,
        image=Image(0, (Tally(samples=1).result(1),), 2.5, 2, 3),
        pending={STORAGE: 9},
        written={0: 4},
        problems={0: "EIO"},
        files={0: (CheckpointFile(path="ps-0/rows", bytes=4, crc32=9),)},
    )


def test_a_state_reads_back_as_it_was_saved(redis_server: RedisProcess) -> None:
    uid = uuid.uuid4().hex
    first, second = JobStore(redis_server.url, uid), JobStore(redis_server.url, uid)
    assert first.open() is None
    first.save(rich_state())
    # NaN differs from itself; everything else must not.
    assert repr(second.open()) == repr(rich_state())


def test_of_two_masters_only_the_newer_writes(redis_server: RedisProcess) -> None:
    uid = uuid.uuid4().hex
    old, new = JobStore(redis_server.url, uid), JobStore(redis_server.url, uid)
    old.open()
    old.save(takeover.initial(wall=1.0))
    new.open()
    with pytest.raises(DeposedError):
        old.save(takeover.initial(wall=2.0))
    with pytest.raises(DeposedError, match="term 2"):
        old.confirm()
    new.save(takeover.initial(wall=3.0))
    new.confirm()
    found = unwrap(JobStore(redis_server.url, uid).open())
    assert found.next_token == 3_000_000


def test_a_master_that_is_deposed_at_any_point_of_a_save_writes_nothing(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    interrupt: dict[int, Callable[[], object]] = {}
    send = redis.Connection.send_packed_command

    def send_after_others(connection: redis.Connection, *command: Any, **options: Any) -> None:
        sent.append(len(sent))
        interrupt.pop(sent[-1], lambda: None)()
        send(connection, *command, **options)  # type: ignore[no-untyped-call]  # so it is in redis-py

    monkeypatch.setattr(redis.Connection, "send_packed_command", send_after_others)
    uid = uuid.uuid4().hex
    only = JobStore(redis_server.url, uid)
    only.open()
    sent.clear()
    only.save(takeover.initial(wall=1.0))
    commands = len(sent)
    assert commands >= 2, "a save reads before it writes"
    for moment in range(commands):
        old, new = JobStore(redis_server.url, uid), JobStore(redis_server.url, uid)
        old.open()
        interrupt[moment] = new.open
        sent.clear()
        with pytest.raises(DeposedError):
            old.save(takeover.initial(wall=2.0))
        assert not interrupt
        assert JobStore(redis_server.url, uid).open() == takeover.initial(wall=1.0)


def test_a_deposed_master_says_so_and_answers_nobody_any_more(redis_server: RedisProcess) -> None:
    uid = uuid.uuid4().hex
    deposed: list[bool] = []
    runtime = JobRuntime(job(), uid, JobStore(redis_server.url, uid), on_deposed=lambda: deposed.append(True))
    runtime.take_over()
    runtime.start()
    JobStore(redis_server.url, uid).open()

    with pytest.raises(Exception, match="the master is stopping"):
        runtime.handle(SuspensionWanted(now=1.0))

    eventually(lambda: deposed, "the deposed master's notice")
    runtime.close()


def test_what_was_written_ahead_reads_back(redis_server: RedisProcess) -> None:
    uid = uuid.uuid4().hex
    store = JobStore(redis_server.url, uid)
    store.open()
    store.save_blocks("Training", 11, b"\x00blocks\xff")
    store.add_bad_records([("s3://bucket/day:1", 7), ("/day", 9)])
    again = JobStore(redis_server.url, uid)
    again.open()
    assert again.blocks() == {("Training", 11): b"\x00blocks\xff"}
    assert again.bad_records() == {("s3://bucket/day:1", 7), ("/day", 9)}


def test_a_redis_that_lost_everything_gets_it_back(own_redis: RedisProcess) -> None:
    store = JobStore(own_redis.url, "uid")
    store.open()
    store.save_blocks("Training", 0, b"blocks")
    store.add_bad_records([("/day", 9)])
    redis.Redis.from_url(own_redis.url).flushall()

    store.save(takeover.initial(wall=5.0))

    again = JobStore(own_redis.url, "uid")
    assert again.open() == takeover.initial(wall=5.0)
    assert (again.term, again.blocks(), again.bad_records()) == (2, {("Training", 0): b"blocks"}, {("/day", 9)})


def test_a_redis_that_lost_its_last_writes_gets_blocks_and_bad_records_back(redis_server: RedisProcess) -> None:
    uid = uuid.uuid4().hex
    client, keys = redis.Redis.from_url(redis_server.url), StateKeys.of(uid)
    store = JobStore(redis_server.url, uid)
    store.open()
    store.save_blocks("Training", 0, b"early")
    store.add_bad_records([("/day", 9)])
    kept = {key: cast(bytes, client.dump(key)) for key in (keys.blocks, keys.bad)}
    store.save_blocks("Training", 1, b"late")
    store.add_bad_records([("/day", 11)])
    for key, content in kept.items():
        client.restore(key, 0, content, replace=True)

    store.save(takeover.initial(wall=5.0))

    again = JobStore(redis_server.url, uid)
    assert again.open() == takeover.initial(wall=5.0)
    assert again.blocks() == {("Training", 0): b"early", ("Training", 1): b"late"}
    assert again.bad_records() == {("/day", 9), ("/day", 11)}


def test_a_redis_that_lost_nothing_is_written_the_state_alone(
    redis_server: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(redis_server.url, uuid.uuid4().hex)
    store.open()
    store.save_blocks("Training", 0, b"blocks")
    store.add_bad_records([("/day", 9)])
    rewritten: list[object] = []
    for write in ("hset", "sadd"):
        monkeypatch.setattr(redis.client.Pipeline, write, lambda _, *command: rewritten.append(command))

    store.save(takeover.initial(wall=5.0))

    assert not rewritten


def test_blocks_that_arrive_while_others_are_rewritten_are_kept(
    own_redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = JobStore(own_redis.url, "uid")
    store.open()
    store.save_blocks("Training", 0, b"early")
    redis.Redis.from_url(own_redis.url).flushall()
    rewrite = redis.client.Pipeline.hset

    def rewrite_after_a_call(pipeline: Any, *command: Any) -> Any:
        store.save_blocks("Training", 1, b"late")
        store.add_bad_records([("/day", 9)])
        return rewrite(pipeline, *command)

    monkeypatch.setattr(redis.client.Pipeline, "hset", rewrite_after_a_call)
    store.save(takeover.initial(wall=5.0))

    again = JobStore(own_redis.url, "uid")
    again.open()
    assert again.blocks() == {("Training", 0): b"early", ("Training", 1): b"late"}
    assert again.bad_records() == {("/day", 9)}


def test_a_redis_that_is_away_is_named_without_its_password() -> None:
    port = free_port()
    store = JobStore(f"redis://:secret@127.0.0.1:{port}/0", "uid")
    with pytest.raises(StoreUnavailableError, match=f"Redis at redis://.*127.0.0.1:{port}/0 cannot be used") as raised:
        store.open()
    assert "secret" not in str(raised.value)


def test_a_state_of_something_else_is_not_taken_for_ours(redis_server: RedisProcess) -> None:
    uid = uuid.uuid4().hex
    redis.Redis.from_url(redis_server.url).set(f"emberscale:{uid}:state", '{"clock": "noon"}')
    with pytest.raises(UnreadableStateError, match=f"emberscale:{uid}:state"):
        JobStore(redis_server.url, uid).open()


def test_passwords_are_not_shown() -> None:
    assert redacted("rediss://user:secret@host:1/0") == "rediss://***@host:1/0"
    assert redacted("redis://host:1/0") == "redis://host:1/0"
