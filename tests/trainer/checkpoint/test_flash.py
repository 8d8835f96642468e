"""Flash checkpoints against a real Redis: what they restore, and what happens to them when Redis fails."""

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from emberscale_api.checkpoint import (
    FLASH_KEPT_SECONDS,
    CheckpointFile,
    DamagedCheckpointError,
)
from emberscale_api.compatibility import FlashKeys
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import BUCKETS, DENSE_PIECES
from emberscale_trainer.checkpoint import (
    CheckpointFiles,
    FlashFiles,
    FlashUnusableError,
    FlashWriter,
    Share,
    Work,
    flash_redis,
    load_partition,
    owned_rows,
)
from emberscale_trainer.checkpoint.work import AbandonedError
from emberscale_trainer.partition import AppliedBatches, buckets_of
from emberscale_trainer.table import DensePieces, Reader, TableStore
from examples import examples
from master_stand_in import checkpoint_manifest, owned, write_manifest, write_snapshot
from redis_process import FlashServer
from snapshots import all_records_of, rows_of_bucket

SPECS = (
    TableSpec(0, "C1", 0, 4, OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD), InitializerSpec(), seed=3),
    TableSpec(1, "C2", 1, 8, OptimizerSpec(type=OptimizerType.ADAM), InitializerSpec(), seed=3),
)
INITIAL = np.arange(1000, dtype=np.float32)
DENSE = DensePieces.of(INITIAL, OptimizerSpec(type=OptimizerType.ADAM))
ROOM = 1 << 30
UID = "job"

Contents = dict[tuple[int, int], bytes]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlashServer]:
    with FlashServer(tmp_path_factory.mktemp("flash")) as server:
        yield server


class Trained:
    """A parameter server's rows and its writer of flash checkpoints."""

    def __init__(
        self, url: str, index: int = 0, servers: int = 1, room: int = ROOM, incarnation: str = "1-b43dc3c07b38"
    ) -> None:
        self.url, self.room = url, room
        self.lock = threading.RLock()
        self.tables = TableStore(SPECS, DENSE)
        self.writer = FlashWriter(url, UID, incarnation)
        self.share = Share(index, owned(servers, index), AppliedBatches(), len(INITIAL))

    def push(self, keys: list[int]) -> None:
        distinct = np.unique(np.array(keys, dtype=np.int64))
        mine = distinct[self.share.owned.buckets[buckets_of(distinct)]]
        pieces = np.flatnonzero(self.share.owned.pieces)
        counts = np.array([len(mine), len(mine), len(pieces)], dtype=np.uint32)
        gradients = np.ones(self.tables.values_per_request(counts), dtype=np.float32)
        with self.lock:
            self.tables.push(counts, np.concatenate([mine, mine, pieces]), gradients)

    def save(self, checkpoint: str, work: Work | None = None) -> list[CheckpointFile]:
        with self.lock:
            draft = self.writer.begin(self.tables, self.lock, self.room)
            share = replace(self.share, rows=owned_rows(self.tables, self.share.owned))
        return self.writer.write(draft, checkpoint, share, Work() if work is None else work)

    def contents(self) -> Contents:
        with self.lock:
            snapshot = self.tables.snapshot(Reader.CHECKPOINT, self.lock)
        return all_records_of(snapshot, len(SPECS) + 1)


def complete(server: FlashServer, checkpoint: str, servers: int, files: list[CheckpointFile]) -> None:
    manifest = checkpoint_manifest(files, id=checkpoint, job_uid=UID, ps_count=servers)
    server.client.set(FlashKeys.of(UID).manifest, manifest.to_json())


def restored(files: CheckpointFiles, servers: int = 1, index: int = 0) -> Contents:
    tables = TableStore(SPECS, DENSE)
    load_partition(files, owned(servers, index), tables, len(INITIAL))
    return all_records_of(tables.snapshot(Reader.CHECKPOINT, threading.RLock()), len(SPECS) + 1)


class KilledError(BaseException):
    """The process is killed; a BaseException, so that no handler of errors runs."""


class Interrupted(Work):
    """Calls `happens` after `files` files."""

    def __init__(self, files: int, happens: Callable[[], object]) -> None:
        super().__init__()
        self._left, self._happens = files, happens

    def advance(self, count: int) -> None:
        super().advance(count)
        self._left -= 1
        if self._left == 0:
            self._happens()


def kill() -> None:
    raise KilledError


def files_in(server: FlashServer) -> set[str]:
    """Returns the keys of all files of rows, retired keys and documents."""
    keys = {key.decode() for key in server.client.scan_iter()}
    return {key for key in keys if key.endswith((".rows", ".keys", ".json"))}


def rows_files(files: list[CheckpointFile]) -> set[str]:
    return {file.path for file in files if file.path.endswith(".rows")}


def files_of(checkpoint: str, files: list[CheckpointFile]) -> set[str]:
    return {FlashKeys.of(UID).of_file(checkpoint, file.path) for file in files}


def flash(server: FlashServer, checkpoint: str) -> FlashFiles:
    return FlashFiles(server.url, UID, checkpoint, Work())


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_both_tiers_restore_the_same_rows_on_any_number_of_servers(
    server: FlashServer, tmp_path: Path, readers: int
) -> None:
    trained = [Trained(server.url, index, 2) for index in range(2)]
    for one in trained:
        one.push(list(range(2000)))
        one.save("flash-00000001")
        one.push(list(range(1500, 3000)))
    complete(server, "flash-00000002", 2, [file for one in trained for file in one.save("flash-00000002")])
    persistent: list[CheckpointFile] = []
    for one in trained:
        snapshot = one.tables.snapshot(Reader.CHECKPOINT, one.lock)
        persistent += write_snapshot(snapshot, one.tables.specs, one.share, str(tmp_path), Work())
    write_manifest(tmp_path, persistent, id="00000003", ps_count=2)
    rows = 0
    for index in range(readers):
        from_flash = restored(flash(server, "flash-00000002"), readers, index)
        assert from_flash == restored(CheckpointFiles(str(tmp_path)), readers, index)
        rows += len(from_flash)
    assert rows == 2 * 3000 + DENSE_PIECES


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.integers(0, 300), min_size=1, max_size=40)),
        st.tuples(st.just("retire"), st.lists(st.integers(0, 300), min_size=1, max_size=40)),
        st.tuples(st.just("bucket"), st.integers(0, BUCKETS - 1)),
        st.tuples(st.just("save"), st.sampled_from(["whole", "unfinished", "refused", "emptied"])),
    ),
    max_size=25,
)


@settings(max_examples=examples(60), deadline=None)
@given(STEPS)
def test_a_chain_restores_the_rows_of_its_last_checkpoint_whatever_failed_before(
    server: FlashServer, steps: list[tuple[str, object]]
) -> None:
    """No row is lost by checkpoints without a manifest, or that Redis refuses, or of which it loses chunks."""
    server.client.flushall()
    trained, number = Trained(server.url), 0
    expected: tuple[str, Contents] | None = None
    for kind, value in [*steps, ("push", [1, 2]), ("save", "whole"), ("save", "whole")]:
        if kind == "push":
            assert isinstance(value, list)
            trained.push(value)
        elif kind == "retire":
            trained.tables.retire(0, np.unique(np.array(value, dtype=np.int64)))
        elif kind == "bucket":
            assert isinstance(value, int)
            trained.tables.remove_bucket(1, value)
        else:
            number += 1
            checkpoint = f"flash-{number:08d}"
            if value == "emptied":
                server.client.flushall()
                expected = None
            server.client.config_set("maxmemory", 1 if value == "refused" else 0)
            try:
                files = trained.save(checkpoint)
            except FlashUnusableError:
                # Redis may have dropped the last one for lack of room
                expected = None if value == "refused" else expected
                continue
            finally:
                server.client.config_set("maxmemory", 0)
            if value == "whole":
                complete(server, checkpoint, 1, files)
                expected = checkpoint, trained.contents()
        if expected is not None:
            assert restored(flash(server, expected[0])) == expected[1]
    assert expected is not None, "two in a row fail only where Redis does"


def test_increments_follow_rows_that_move_between_servers(server: FlashServer) -> None:
    """A bucket moves from one server to the other and back, with a checkpoint during and after each move."""
    one, two = trained = [Trained(server.url, index, 2) for index in range(2)]
    for part in trained:
        part.push(list(range(3000)))
        part.save("flash-00000001")
    bucket = int(np.flatnonzero(one.share.owned.buckets)[0])
    number = 1
    for giver, taker in ((one, two), (two, one), (one, two)):
        for table in range(len(SPECS)):
            taker.tables.load(table, rows_of_bucket(giver.tables, table, bucket))
        number += 1  # the taker has the rows, and the giver still owns them
        files = [file for part in trained for file in part.save(f"flash-{number:08d}")]
        complete(server, f"flash-{number:08d}", 2, files)
        within = restored(flash(server, f"flash-{number:08d}"))
        giver.share.owned.buckets[bucket], taker.share.owned.buckets[bucket] = False, True
        for table in range(len(SPECS)):
            giver.tables.remove_bucket(table, bucket)
        taker.push(list(range(3000)))
        number += 1
        files = [file for part in trained for file in part.save(f"flash-{number:08d}")]
        complete(server, f"flash-{number:08d}", 2, files)
        after = restored(flash(server, f"flash-{number:08d}"))
        assert within.keys() == after.keys()
        embeddings = {place: row for part in trained for place, row in part.contents().items() if place[0] < len(SPECS)}
        assert {place: row for place, row in after.items() if place[0] < len(SPECS)} == embeddings


def test_a_chain_is_replaced_when_its_increments_outweigh_its_base(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(1000)))
    base = trained.save("flash-00000001")
    sizes = []
    for number in range(2, 9):
        trained.push([(400 * number + key) % 1000 for key in range(400)])
        sizes.append(sum(file.bytes for file in trained.save(f"flash-{number:08d}")))
    assert max(sizes) < 3 * sum(file.bytes for file in base)
    assert min(sizes[1:]) < 1.1 * sum(file.bytes for file in base)


def test_increments_that_changed_again_are_replaced_and_the_base_stays(server: FlashServer) -> None:
    """A hot set that changes between all checkpoints is in Redis once, and never brings about a new base."""
    server.client.flushall()
    trained = Trained(server.url)
    trained.push(list(range(5000)))
    base = trained.save("flash-00000001")
    most, last = 0, base
    for number in range(2, 300):
        trained.push(list(range(400)))
        if number == 100:
            trained.tables.retire(0, np.arange(300, 400))
        last = trained.save(f"flash-{number:08d}")
        complete(server, f"flash-{number:08d}", 1, last)
        most = max(most, server.client.scard(FlashKeys.of(UID).inventory("ps-0")))
    assert sum(file.bytes for file in last) < 1.5 * sum(file.bytes for file in base)
    assert rows_files(base) <= rows_files(last), "the base was written again"
    assert most < 8 * len(last) + 300, "names of removed files are never struck off"
    assert restored(flash(server, "flash-00000299")) == trained.contents()


def test_retired_keys_do_not_pile_up_in_increments_that_replace_others(server: FlashServer) -> None:
    """New keys get the slots of evicted ones, so the same slots change between all checkpoints."""
    trained = Trained(server.url)
    trained.push(list(range(5000)))
    trained.save("flash-00000001")
    last: list[CheckpointFile] = []
    for number in range(2, 100):
        first = 100_000 + 300 * number
        for table in range(len(SPECS)):
            trained.tables.retire(table, np.arange(first - 300, first))
        trained.push(list(range(first, first + 300)))
        last = trained.save(f"flash-{number:08d}")
        rows = sum(file.bytes for file in last if file.path.endswith(".rows"))
        assert sum(file.bytes for file in last if file.path.endswith(".keys")) < rows / 3
    complete(server, "flash-00000099", 1, last)
    assert restored(flash(server, "flash-00000099")) == trained.contents()


def test_rows_that_seldom_change_again_are_not_written_again(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(10_000)))
    before = rows_files(trained.save("flash-00000001"))
    for number in range(2, 6):
        trained.push(list(range(1000 * number, 1000 * number + 1000)))
        after = rows_files(trained.save(f"flash-{number:08d}"))
        assert before < after
        before = after


def test_an_attempt_to_replace_increments_that_fails_loses_no_change(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(5000)))
    trained.save("flash-00000001")
    trained.push(list(range(400)))
    trained.save("flash-00000002")
    trained.push(list(range(390)))
    work = Work()
    work.abandon()
    with pytest.raises(AbandonedError):
        trained.save("flash-00000003", work)
    trained.push([4000])
    complete(server, "flash-00000004", 1, trained.save("flash-00000004"))
    assert restored(flash(server, "flash-00000004")) == trained.contents()


def test_replaced_increments_that_no_manifest_named_do_not_outgrow_the_limit(server: FlashServer) -> None:
    """The master removes only files of a manifest, and writes none while another server fails."""
    server.client.flushall()
    trained = Trained(server.url)
    trained.push(list(range(20_000)))
    base = trained.save("flash-00000001")
    complete(server, "flash-00000001", 1, base)
    trained.room = 2 * sum(file.bytes for file in base)
    for number in range(2, 14):
        trained.push(list(range(6000)))
        trained.save(f"flash-{number:08d}")
        assert sum(server.client.strlen(key) for key in files_in(server)) < 1.25 * trained.room


def test_a_superseded_draft_that_is_written_late_removes_nothing(server: FlashServer) -> None:
    server.client.flushall()
    trained = Trained(server.url)
    trained.push(list(range(1000)))
    with trained.lock:
        late = trained.writer.begin(trained.tables, trained.lock, ROOM)
    files = trained.save("flash-00000002")
    with pytest.raises(AbandonedError):
        trained.writer.write(late, "flash-00000001", trained.share, Work())
    complete(server, "flash-00000002", 1, files)
    assert restored(flash(server, "flash-00000002")) == trained.contents()


def test_a_failed_increment_gives_back_what_it_took_and_no_more(server: FlashServer) -> None:
    """Its changes join those of the chain for later; another draft may take them back at that very moment."""
    trained = Trained(server.url)
    trained.push(list(range(5000)))
    trained.save("flash-00000001")
    trained.push(list(range(1000)))
    before = rows_files(trained.save("flash-00000002"))
    trained.push([4000])
    with pytest.raises(KilledError):  # while it writes the documents
        trained.save("flash-00000003", Interrupted(len(SPECS) + 2, kill))
    trained.push([4001])
    fourth = trained.save("flash-00000004")
    assert before < rows_files(fourth), "the second increment was written again"
    complete(server, "flash-00000004", 1, fourth)
    assert restored(flash(server, "flash-00000004")) == trained.contents()


def test_the_next_incarnation_of_a_server_leaves_alone_what_the_one_before_wrote(server: FlashServer) -> None:
    before = Trained(server.url)
    before.push(list(range(1000)))
    complete(server, "flash-00000001", 1, before.save("flash-00000001"))
    after = Trained(server.url, incarnation="2-b43dc3c07b38")
    after.push(list(range(500)))
    after.save("flash-00000002")  # it dies before the manifest is written
    assert restored(flash(server, "flash-00000001")) == before.contents()


def test_the_rows_of_a_table_are_counted_once_however_often_the_chain_has_them(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(3000)))
    trained.save("flash-00000001")
    trained.push(list(range(2500)))
    trained.tables.retire(0, np.arange(2000))
    complete(server, "flash-00000002", 1, trained.save("flash-00000002"))
    files, fresh = flash(server, "flash-00000002"), TableStore(SPECS, DENSE)
    [part] = files.partitions(fresh.specs, len(INITIAL))
    assert [table.rows for table in part.stored] == [1000, 3000, DENSE_PIECES]
    load_partition(files, owned(1, 0), fresh, len(INITIAL))
    assert [slots.rows for slots in fresh.slots] == [1000, 3000, DENSE_PIECES]


def test_an_increment_writes_only_what_changed(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(5000)))
    base = trained.save("flash-00000001")
    trained.push([7])
    after = trained.save("flash-00000002")
    added = [file for file in after if file not in base and not file.path.endswith(".json")]
    assert 0 < sum(file.bytes for file in added) < sum(file.bytes for file in base) / 10


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
        complete(slow, "flash-00000003", 1, files)
        assert restored(flash(slow, "flash-00000003")) == trained.contents()


def test_a_redis_that_came_back_empty_gets_a_new_base(tmp_path: Path) -> None:
    with FlashServer(tmp_path / "redis") as lost:
        trained = Trained(lost.url)
        trained.push(list(range(1000)))
        trained.save("flash-00000001")
        lost.kill()
        lost.start()
        with pytest.raises(FlashUnusableError, match="lost"):
            trained.save("flash-00000002")
        complete(lost, "flash-00000003", 1, trained.save("flash-00000003"))
        assert restored(flash(lost, "flash-00000003")) == trained.contents()


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
    complete(server, "flash-00000003", 1, third)
    assert restored(flash(server, "flash-00000003")) == trained.contents()


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


def test_a_chain_without_one_of_its_links_is_refused_before_any_row_is_loaded(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(1000)))
    trained.save("flash-00000001")
    trained.push(list(range(100)))
    files = trained.save("flash-00000002")
    complete(server, "flash-00000002", 1, files)
    last = [file for file in files if file.path.endswith(".rows")][-1]
    server.client.delete(FlashKeys.of(UID).of_file("flash-00000002", last.path))
    with pytest.raises(DamagedCheckpointError, match=r"Redis has lost .*\.rows"):
        flash(server, "flash-00000002")


def test_a_chain_of_very_many_small_increments_begins_anew(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(20_000)))
    most = 0
    for number in range(1, 220):
        trained.push([number])
        most = max(most, len(trained.save(f"flash-{number:08d}")))
    assert most < 400


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
