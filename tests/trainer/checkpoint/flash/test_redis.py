"""What flash checkpoints do to Redis, and what becomes of them when Redis or a server fails."""

import signal
from pathlib import Path

import numpy as np
import pytest

from emberscale_api.checkpoint import FLASH_KEPT_SECONDS, DamagedCheckpointError
from emberscale_api.compatibility import FlashKeys
from emberscale_trainer.checkpoint import FlashUnusableError, Work, flash_redis
from flash_checkpoints import (
    ROOM,
    UID,
    Interrupted,
    KilledError,
    Trained,
    complete,
    files_in,
    files_of,
    flash,
    kill,
    restored,
    restored_once_complete,
)
from redis_process import FlashServer


def test_the_next_incarnation_of_a_server_leaves_alone_what_the_one_before_wrote(server: FlashServer) -> None:
    before = Trained(server.url)
    before.push(list(range(1000)))
    complete(server, "flash-00000001", 1, before.save("flash-00000001"))
    after = Trained(server.url, incarnation="2-b43dc3c07b38")
    after.push(list(range(500)))
    after.save("flash-00000002")  # it dies before the manifest is written
    assert restored(flash(server, "flash-00000001")) == before.contents()


@pytest.mark.parametrize("damage", ["missing", "altered", "manifest"])
def test_what_redis_lost_or_altered_is_named_as_damaged(server: FlashServer, damage: str) -> None:
    trained = Trained(server.url)
    trained.push(list(range(100)))
    files = trained.save("flash-00000001")
    complete(server, "flash-00000001", 1, files)
    keys = FlashKeys.of(UID)
    victim = keys.of_file("flash-00000001", files[0].path)
    if damage == "missing":
        server.client.delete(victim)
    elif damage == "altered":
        server.client.setrange(victim, 10, b"garbage")
    else:
        server.client.set(keys.manifest, "garbage")
    with pytest.raises(DamagedCheckpointError, match=r"flash-00000001"):
        restored(flash(server, "flash-00000001"))


def test_every_key_has_the_prefix_of_the_job_and_expires(server: FlashServer) -> None:
    server.client.flushall()
    trained = Trained(server.url)
    trained.push([1, 2, 3])
    trained.save("flash-00000001")
    keys = list(server.client.scan_iter())
    assert keys
    for key in keys:
        assert key.startswith(f"emberscale:{UID}:flash:".encode())
        assert 0 < server.client.ttl(key) <= FLASH_KEPT_SECONDS


def test_rows_beyond_max_bytes_are_refused_with_the_field_to_raise(server: FlashServer) -> None:
    server.client.flushall()
    trained = Trained(server.url, room=1000)
    trained.push(list(range(1000)))
    with pytest.raises(FlashUnusableError, match=r"spec.checkpoint.flash.maxBytes"):
        trained.save("flash-00000001")
    assert server.client.dbsize() == 0


def test_a_full_redis_keeps_nothing_of_what_it_refused(tmp_path: Path) -> None:
    with FlashServer(tmp_path / "redis", maxmemory=6 << 20) as small:
        trained = Trained(small.url)
        trained.push(list(range(200_000)))
        with pytest.raises(FlashUnusableError, match="full"):
            trained.save("flash-00000001")
        assert small.client.dbsize() == 0
        trained.tables.retire(0, np.arange(1000, 200_000))
        trained.tables.retire(1, np.arange(1000, 200_000))
        assert trained.save("flash-00000002")


def test_a_redis_that_hangs_is_given_up_and_used_again_once_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_redis, "PATIENCE_SECONDS", 0.5)
    with FlashServer(tmp_path / "redis") as slow:
        trained = Trained(slow.url)
        trained.push(list(range(1000)))
        trained.save("flash-00000001")
        slow.process.send_signal(signal.SIGSTOP)
        trained.push([1])
        with pytest.raises(FlashUnusableError, match="does not answer"):
            trained.save("flash-00000002")
        slow.process.send_signal(signal.SIGCONT)
        files = trained.save("flash-00000003")
        assert restored_once_complete(slow, "flash-00000003", files) == trained.contents()


def test_a_redis_that_came_back_empty_gets_a_new_base(tmp_path: Path) -> None:
    with FlashServer(tmp_path / "redis") as lost:
        trained = Trained(lost.url)
        trained.push(list(range(1000)))
        trained.save("flash-00000001")
        lost.kill()
        lost.start()
        with pytest.raises(FlashUnusableError, match="lost"):
            trained.save("flash-00000002")
        assert restored_once_complete(lost, "flash-00000003", trained.save("flash-00000003")) == trained.contents()


def test_what_a_broken_connection_left_is_swept_with_the_next_checkpoint(server: FlashServer) -> None:
    server.client.flushall()
    trained = Trained(server.url)
    trained.push(list(range(2000)))
    first = trained.save("flash-00000001")
    complete(server, "flash-00000001", 1, first)
    trained.push(list(range(1000)))
    with pytest.raises(FlashUnusableError):
        trained.save("flash-00000002", Interrupted(2, lambda: server.client.client_kill_filter(_type="normal")))
    trained.push([1])
    third = trained.save("flash-00000003")
    named = files_of("flash-00000001", first) | files_of("flash-00000003", third)
    assert files_in(server) == named
    assert restored_once_complete(server, "flash-00000003", third) == trained.contents()


def test_what_a_hung_redis_takes_in_after_all_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once Redis runs again, it reads what was sent before it hung, although the sender gave up long ago."""
    monkeypatch.setattr(flash_redis, "PATIENCE_SECONDS", 0.5)
    with FlashServer(tmp_path / "redis") as slow:
        trained = Trained(slow.url)
        trained.push(list(range(1000)))
        first = trained.save("flash-00000001")
        complete(slow, "flash-00000001", 1, first)
        trained.push(list(range(500)))
        hangs = Interrupted(1, lambda: slow.process.send_signal(signal.SIGSTOP))
        with pytest.raises(FlashUnusableError, match="does not answer"):
            trained.save("flash-00000002", hangs)
        slow.process.send_signal(signal.SIGCONT)
        third = trained.save("flash-00000003")
        assert files_in(slow) == files_of("flash-00000001", first) | files_of("flash-00000003", third)


@pytest.mark.parametrize("files", [1, 2, 3, 4])
def test_what_a_killed_server_left_is_swept_by_the_next_incarnation(server: FlashServer, files: int) -> None:
    server.client.flushall()
    before = Trained(server.url)
    before.push(list(range(1000)))
    first = before.save("flash-00000001")
    complete(server, "flash-00000001", 1, first)
    before.push(list(range(500)))
    with pytest.raises(KilledError):
        before.save("flash-00000002", Interrupted(files, kill))
    after = Trained(server.url, incarnation="2-b43dc3c07b38")
    after.push(list(range(500)))
    third = after.save("flash-00000003")
    assert files_in(server) == files_of("flash-00000001", first) | files_of("flash-00000003", third)
    assert restored(flash(server, "flash-00000001")) != {}


def test_a_sweep_leaves_the_files_of_other_servers_alone(server: FlashServer) -> None:
    server.client.flushall()
    one, two = (Trained(server.url, index, 2) for index in range(2))
    for part in (one, two):
        part.push(list(range(1000)))
    others = files_of("flash-00000001", two.save("flash-00000001"))
    mine = files_of("flash-00000001", one.save("flash-00000001"))
    assert files_in(server) == mine | others


def test_nothing_goes_that_a_manifest_names_before_the_manifest_goes(server: FlashServer) -> None:
    """The limit leaves no room for two bases, so the old one is removed before the new one is written."""
    server.client.flushall()
    trained = Trained(server.url)
    trained.push(list(range(2000)))
    named = trained.save("flash-00000001")
    complete(server, "flash-00000001", 1, named)
    after = Trained(server.url, room=sum(file.bytes for file in named), incarnation="2-b43dc3c07b38")
    after.push(list(range(1900)))
    with server.client.monitor() as monitor:  # type: ignore[no-untyped-call]  # so it is in redis-py
        after.save("flash-00000002")
        server.client.execute_command("PING", "the end")  # type: ignore[no-untyped-call]
        seen = []
        for event in monitor.listen():
            if "the end" in event["command"]:
                break
            seen.append(event["command"])
    removals = [command.partition(" ")[2].strip('"') for command in seen if command.upper().startswith("UNLINK")]
    assert removals[0] == FlashKeys.of(UID).manifest
    assert files_of("flash-00000001", named) <= set(removals)
    with pytest.raises(DamagedCheckpointError):
        flash(server, "flash-00000001")


def test_a_full_redis_keeps_the_last_checkpoint_until_a_base_needs_its_room(tmp_path: Path) -> None:
    with FlashServer(tmp_path / "redis", maxmemory=8 << 20) as small:
        trained = Trained(small.url)
        trained.push(list(range(20_000)))
        complete(small, "flash-00000001", 1, trained.save("flash-00000001"))
        kept = trained.contents()
        trained.push(list(range(120_000)))
        for number in (2, 3):
            assert restored(flash(small, "flash-00000001")) == kept
            with pytest.raises(FlashUnusableError, match="full"):
                trained.save(f"flash-{number:08d}")
        assert small.client.dbsize() == 0


def test_an_increment_has_its_base_kept_for_as_long_as_itself(server: FlashServer) -> None:
    server.client.flushall()
    trained = Trained(server.url)
    trained.push(list(range(1000)))
    trained.save("flash-00000001")
    for key in server.client.scan_iter():
        server.client.expire(key, 60)
    trained.push([1])
    files = trained.save("flash-00000002")
    for key in files_of("flash-00000002", files):
        assert server.client.ttl(key) > FLASH_KEPT_SECONDS - 300


def test_a_redis_that_is_gone_leaves_no_snapshot_open(tmp_path: Path) -> None:
    """An open snapshot would copy the old bytes of every row that changes, until the next attempt."""
    with FlashServer(tmp_path / "redis") as gone:
        trained = Trained(gone.url)
        trained.push(list(range(100)))
    with trained.lock:
        draft = trained.writer.begin(trained.tables, trained.lock, ROOM)
    with pytest.raises(FlashUnusableError):
        trained.writer.write(draft, "flash-00000001", trained.share, Work())
    assert draft.snapshot.ended
