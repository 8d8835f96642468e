"""A cut written by some servers, loaded by as many or others."""

from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, DamagedCheckpointError
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec, parse_manifest
from emberscale_api.routing import PsAddress, RoutingTable, buckets_of, spread_evenly
from emberscale_trainer.checkpoint import load_partition, write_snapshot
from emberscale_trainer.checkpoint.writer import WrittenFile
from emberscale_trainer.partition import AppliedBatches, DenseSlice, Partition
from emberscale_trainer.table import Reader, TableStore
from snapshots import drained

ADAM = OptimizerSpec(type=OptimizerType.ADAM, learning_rate=0.1)
SPECS = (
    TableSpec(0, "C1", 0, 4, OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD), InitializerSpec(), seed=3),
    TableSpec(1, "C2", 1, 8, ADAM, InitializerSpec(), seed=3),
)
PARAMETERS = 11


def routing(servers: int) -> RoutingTable:
    return RoutingTable(1, tuple(PsAddress(index, "i", "", "") for index in range(servers)), spread_evenly(servers))


def trained(servers: int, keys: list[int]) -> list[Partition]:
    """What `servers` servers hold after two batches over `keys`."""
    table = routing(servers)
    distinct = np.unique(np.array(keys, dtype=np.int64))
    partitions = []
    for index in range(servers):
        start, stop = table.dense_slice(index, PARAMETERS)
        dense = DenseSlice(np.arange(start, stop, dtype=np.float32), ADAM)
        tables, applied = TableStore(SPECS), AppliedBatches()
        mine = distinct[[table.owners[bucket] == index for bucket in buckets_of(distinct)]]
        for batch in range(2):
            counts = np.array([len(mine), len(mine)], dtype=np.uint32)
            tables.push(counts, np.concatenate([mine, mine]), np.full(len(mine) * 12, batch + 1, dtype=np.float32))
            dense.step(np.full(stop - start, batch + 1, dtype=np.float32))
            applied.record(0, batch)
        partitions.append(Partition(1, tables, dense, applied))
    return partitions


def save(partitions: list[Partition], folder: Path) -> str:
    """Writes a checkpoint as servers and master do together."""
    table = routing(len(partitions))
    files: list[WrittenFile] = []
    for index, partition in enumerate(partitions):
        snapshot = partition.snapshot(Reader.CHECKPOINT, nullcontext())
        files += write_snapshot(snapshot, str(folder), index, table, SPECS, PARAMETERS)
    return write_manifest(folder, len(partitions), files)


def write_manifest(folder: Path, servers: int, files: list[WrittenFile]) -> str:
    manifest = CheckpointManifest(
        id="00000001",
        cut=1,
        created=datetime.now(UTC),
        job_uid="u",
        job=parse_manifest(
            {
                "apiVersion": "emberscale.io/v1alpha1",
                "kind": "TrainingJob",
                "metadata": {"name": "job"},
                "spec": {"data": {"train": ["train.tsv"]}},
            }
        ),
        ps_count=servers,
        routing_epoch=1,
        epoch=0,
        batch_size=1,
        training_records=2,
        applied=(),
        evaluations=(),
        training_files=(),
        evaluation_files=(),
        training_seconds=1.0,
        files=tuple(CheckpointFile(path=file.path, bytes=file.bytes, crc32=file.crc32) for file in files),
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return str(folder)


def contents(tables: TableStore) -> dict[tuple[str, int], bytes]:
    """Every record by table and key."""
    snapshot = tables.snapshot(Reader.CHECKPOINT, nullcontext())
    return {
        (spec.name, int(record[:8].view(np.int64)[0])): record.tobytes()
        for number, spec in enumerate(SPECS)
        for chunk in snapshot.drain(number)
        for record in chunk
    }


@settings(max_examples=20)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), st.integers(1, 3), st.integers(1, 4))
def test_every_row_and_parameter_comes_back_with_any_number_of_servers(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], writers: int, readers: int
) -> None:
    partitions = trained(writers, keys)
    uri = save(partitions, tmp_path_factory.mktemp("checkpoint"))
    rows: dict[tuple[str, int], bytes] = {}
    dense = []
    for index in range(readers):
        tables = TableStore(SPECS)
        loaded = load_partition(uri, routing(readers), index, SPECS, tables, PARAMETERS)
        mine = contents(tables)
        assert not rows.keys() & mine.keys()
        assert all(routing(readers).owners[bucket_of(key)] == index for _, key in mine)
        rows |= mine
        dense.append(loaded.dense)
        assert loaded.applied.ranges(0) == [(0, 2)]
    assert rows == {key: record for partition in partitions for key, record in contents(partition.tables).items()}
    for name in ("values", "exp_avg", "exp_avg_sq"):
        np.testing.assert_array_equal(
            np.concatenate([state[name] for state in dense]),
            np.concatenate([partition.dense.state()[name] for partition in partitions]),
        )


def test_what_is_pushed_while_a_checkpoint_is_written_is_not_in_it(tmp_path: Path) -> None:
    (partition,) = trained(1, list(range(1000)))
    expected = contents(partition.tables)
    snapshot = partition.snapshot(Reader.CHECKPOINT, nullcontext())
    keys = np.concatenate([np.arange(500, 1500)] * 2)
    partition.tables.push(np.array([1000, 1000], np.uint32), keys, np.ones(12_000, np.float32))
    partition.tables.retire(1, np.arange(20))
    partition.dense.step(np.ones(PARAMETERS, np.float32))
    partition.applied.record(0, 2)
    files = write_snapshot(snapshot, str(tmp_path), 0, routing(1), SPECS, PARAMETERS)
    uri = write_manifest(tmp_path, 1, files)
    tables = TableStore(SPECS)
    loaded = load_partition(uri, routing(1), 0, SPECS, tables, PARAMETERS)
    assert contents(tables) == expected
    assert loaded.applied.ranges(0) == [(0, 2)]
    np.testing.assert_array_equal(loaded.dense["values"], snapshot.dense["values"])


def test_a_checkpoint_that_is_not_written_gives_its_changes_back(tmp_path: Path) -> None:
    (partition,) = trained(1, list(range(100)))
    partition.tables.track(Reader.CHECKPOINT)
    partition.tables.push(np.array([2, 0], np.uint32), np.array([7, 8]), np.ones(8, np.float32))
    (tmp_path / "ps-0").touch()  # where a folder is to be
    snapshot = partition.snapshot(Reader.CHECKPOINT, nullcontext())
    with pytest.raises(OSError, match="ps-0"):
        write_snapshot(snapshot, str(tmp_path), 0, routing(1), SPECS, PARAMETERS)
    taken = partition.tables.take(Reader.CHECKPOINT, nullcontext())
    assert set(drained(taken, 0)) == {7, 8}


def bucket_of(key: int) -> int:
    return int(buckets_of(np.array([key], dtype=np.int64))[0])


def damage_cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def damage_altered(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


def damage_longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


@pytest.mark.parametrize("damage", [damage_cut_short, damage_altered, damage_longer, Path.unlink])
@pytest.mark.parametrize("name", ["table-0.rows", "dense-values.npy", "applied.json", "partition.json"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: object, name: str) -> None:
    uri = save(trained(2, list(range(50))), tmp_path)
    damage(tmp_path / "ps-1" / name)  # type: ignore[operator]  # a function on paths, parametrised
    with pytest.raises(DamagedCheckpointError, match=f"ps-1/{name}"):
        load_partition(uri, routing(1), 0, SPECS, TableStore(SPECS), PARAMETERS)


def test_a_checkpoint_without_its_manifest_is_refused(tmp_path: Path) -> None:
    uri = save(trained(1, [1]), tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        load_partition(uri, routing(1), 0, SPECS, TableStore(SPECS), PARAMETERS)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    uri = save(trained(1, [1]), tmp_path)
    with pytest.raises(DamagedCheckpointError, match="another model"):
        load_partition(uri, routing(1), 0, SPECS[:1], TableStore(SPECS[:1]), PARAMETERS)
