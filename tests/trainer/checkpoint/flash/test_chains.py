"""Chains of flash checkpoints: what they restore, what they write, and when they begin anew."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from emberscale_api.checkpoint import CheckpointFile, DamagedCheckpointError
from emberscale_api.compatibility import FlashKeys
from emberscale_api.routing import BUCKETS, DENSE_PIECES
from emberscale_trainer.checkpoint import CheckpointFiles, FlashUnusableError, Work, load_partition
from emberscale_trainer.checkpoint import flash as flash_module
from emberscale_trainer.checkpoint.work import AbandonedError
from emberscale_trainer.table import Reader, TableStore
from examples import examples
from flash_checkpoints import (
    DENSE,
    INITIAL,
    ROOM,
    SPECS,
    UID,
    Contents,
    Interrupted,
    KilledError,
    Trained,
    complete,
    files_in,
    flash,
    kill,
    restored,
    restored_once_complete,
    rows_files,
)
from master_stand_in import owned, write_manifest, write_snapshot
from redis_process import FlashServer
from snapshots import rows_of_bucket


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
        snapshot = one.tables.readers.snapshot(Reader.CHECKPOINT, one.lock)
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


@pytest.mark.parametrize("most_increments", [100, 1], ids=["base stays", "base goes"])
@settings(max_examples=examples(60), deadline=None)
@given(steps=STEPS)
def test_a_chain_restores_the_rows_of_its_last_checkpoint_whatever_failed_before(
    server: FlashServer, most_increments: int, steps: list[tuple[str, object]]
) -> None:
    """No row is lost by checkpoints without a manifest, or that Redis refuses, or of which it loses chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_module, "_MOST_INCREMENTS", most_increments)
        patch.setattr(flash_module, "_MOST_COPIES", 10)  # so that no new base is worth more
        _save_and_restore(server, steps)


def _save_and_restore(server: FlashServer, steps: list[tuple[str, object]]) -> None:
    server.client.flushall()
    trained, number = Trained(server.url), 0
    expected: tuple[str, Contents] | None = None
    ending = [("push", [1, 2]), ("save", "whole"), ("push", [2, 3]), ("save", "whole"), ("save", "whole")]
    for kind, value in [*steps, *ending]:
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


def test_a_base_whose_rows_have_changed_goes_without_a_new_one(server: FlashServer) -> None:
    """Another tenth of the rows changes before each checkpoint, some rows go, and others come."""
    server.client.flushall()
    trained = Trained(server.url)
    trained.push(list(range(10_000)))
    base = trained.save("flash-00000001")
    base_bytes, before = sum(file.bytes for file in base), set(base)
    last: list[CheckpointFile] = []
    for number in range(2, 60):
        trained.tables.retire(0, np.arange(10 * number, 10 * number + 5))
        trained.push([(1000 * number + key) % 10_000 for key in range(1000)] + [10_000 + number])
        last = trained.save(f"flash-{number:08d}")
        assert sum(file.bytes for file in last if file not in before) < 0.3 * base_bytes
        assert sum(file.bytes for file in last) < 2.3 * base_bytes
        assert restored_once_complete(server, f"flash-{number:08d}", last) == trained.contents()
        before = set(last)
    assert not rows_files(base) & rows_files(last), "the first base is still there"


def test_a_base_that_fails_to_go_stays_and_no_row_is_lost(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(10_000)))
    base = rows_files(trained.save("flash-00000001"))
    last: list[CheckpointFile] = []
    for number in range(2, 16):
        trained.push([(800 * number + key) % 10_000 for key in range(800)])
        work = Work()
        work.abandon()
        with pytest.raises(AbandonedError):
            trained.save(f"flash-{number:08d}", work)
        trained.push([number])
        last = trained.save(f"flash-{number:08d}")
    assert not base & rows_files(last)
    assert restored_once_complete(server, "flash-00000015", last) == trained.contents()


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
    assert restored_once_complete(server, "flash-00000099", last) == trained.contents()


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
    assert restored_once_complete(server, "flash-00000004", trained.save("flash-00000004")) == trained.contents()


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


@pytest.mark.parametrize("copies", [2.5, 4])
@pytest.mark.parametrize("complete_ones", [1, 7])
def test_a_chain_that_is_replaced_beside_the_one_of_the_manifest_does_not_outgrow_the_limit(
    server: FlashServer, complete_ones: int, copies: float
) -> None:
    """Another server fails for long, so that the manifest still names rows that the chain no longer has."""
    server.client.flushall()
    trained = Trained(server.url)
    trained.push(list(range(20_000)))
    files = trained.save("flash-00000001")
    trained.room = int(copies * sum(file.bytes for file in files))
    for number in range(2, 40):
        if number <= complete_ones + 1:
            complete(server, f"flash-{number - 1:08d}", 1, files)
        trained.push([(2000 * number + key) % 20_000 for key in range(2000)])
        files = trained.save(f"flash-{number:08d}")
        assert sum(server.client.strlen(key) for key in files_in(server)) < 1.05 * trained.room
    assert restored_once_complete(server, "flash-00000039", files) == trained.contents()


def test_a_superseded_draft_that_is_written_late_removes_nothing(server: FlashServer) -> None:
    server.client.flushall()
    trained = Trained(server.url)
    trained.push(list(range(1000)))
    with trained.lock:
        late = trained.writer.begin(trained.tables, trained.lock, ROOM)
    files = trained.save("flash-00000002")
    with pytest.raises(AbandonedError):
        trained.writer.write(late, "flash-00000001", trained.share, Work())
    assert restored_once_complete(server, "flash-00000002", files) == trained.contents()


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
    assert restored_once_complete(server, "flash-00000004", fourth) == trained.contents()


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


def test_a_chain_without_one_of_its_links_is_refused_before_any_row_is_loaded(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(1000)))
    trained.save("flash-00000001")
    trained.push(list(range(100)))
    files = trained.save("flash-00000002")
    complete(server, "flash-00000002", 1, files)
    last = [file for file in files if file.path.endswith(".rows")][-1]
    server.client.delete(FlashKeys.of(UID).of_file("flash-00000002", last.path))
    with pytest.raises(DamagedCheckpointError, match=rf"Redis has lost 1 of {len(files)} chunks, first .*\.rows$"):
        flash(server, "flash-00000002")


def test_a_chain_of_very_many_small_increments_begins_anew(server: FlashServer) -> None:
    trained = Trained(server.url)
    trained.push(list(range(20_000)))
    most = 0
    for number in range(1, 220):
        trained.push([number])
        most = max(most, len(trained.save(f"flash-{number:08d}")))
    assert most < 400
