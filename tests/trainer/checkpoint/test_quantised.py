"""Checkpoints with quantised weights: what is restored, what stays exact, and what cannot be quantised."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from emberscale_api.checkpoint import CheckpointFile, DamagedCheckpointError, weight_bits_of
from emberscale_api.errors import InvalidError
from emberscale_api.job import AdmissionSpec, InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_trainer.checkpoint import (
    CheckpointFiles,
    Share,
    Work,
    load_partition,
    read_dense,
    writer,
)
from emberscale_trainer.partition import AppliedBatches, buckets_of
from emberscale_trainer.table import DensePieces, PackedRows, Reader, RowLayout, TableStore
from master_stand_in import owned, write_manifest, write_snapshot
from packed_rows import unpacked
from snapshots import all_records_of, records_of

ADAGRAD = OptimizerSpec(type=OptimizerType.ADAGRAD, learning_rate=0.1)
SPECS = (
    TableSpec(0, "C1", 0, 16, OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD), InitializerSpec(), seed=3),
    TableSpec(1, "C2", 1, 5, ADAGRAD, InitializerSpec(), seed=3),
)
INITIAL = np.arange(1000, dtype=np.float32)
DENSE = DensePieces.of(INITIAL, ADAGRAD)
KEYS = np.random.default_rng(5).integers(-(2**62), 2**62, 3000)

Contents = dict[tuple[int, int], bytes]


def trained(servers: int, keys: NDArray[np.int64] = KEYS, scale: float = 1.0) -> list[tuple[TableStore, Share]]:
    """Returns servers that have applied a batch of random gradients to rows of all keys and to all dense pieces."""
    random = np.random.default_rng(0)
    partitions = []
    for index in range(servers):
        share = Share(index, owned(servers, index), AppliedBatches(), len(INITIAL))
        tables = TableStore(SPECS, DENSE)
        mine = keys[share.owned.buckets[buckets_of(keys)]]
        pieces = np.flatnonzero(share.owned.pieces)
        counts = np.array([len(mine), len(mine), len(pieces)], np.uint32)
        gradients = random.normal(0, scale, tables.values_per_request(counts)).astype(np.float32)
        tables.push(counts, np.concatenate([mine, mine, pieces]), gradients)
        partitions.append((tables, share))
    return partitions


def save(partitions: list[tuple[TableStore, Share]], folder: Path, weight_bits: int) -> str:
    files: list[CheckpointFile] = []
    for tables, share in partitions:
        snapshot = tables.readers.snapshot(Reader.CHECKPOINT, nullcontext())
        files += write_snapshot(snapshot, tables.specs, share, str(folder), Work(), weight_bits)
    return write_manifest(folder, files, ps_count=len(partitions))


def contents(tables: TableStore) -> Contents:
    return all_records_of(tables.readers.snapshot(Reader.CHECKPOINT, nullcontext()), len(tables.specs))


def load(uri: str, servers: int = 1) -> Contents:
    rows: Contents = {}
    for index in range(servers):
        tables = TableStore(SPECS, DENSE)
        load_partition(CheckpointFiles(uri), owned(servers, index), tables, len(INITIAL))
        rows |= contents(tables)
    return rows


def quantised(number: int, record: bytes, bits: int) -> bytes:
    """Returns the expected restored form of a record of a table."""
    packed = PackedRows.of(RowLayout.of(SPECS[number]), bits)
    return unpacked(packed, packed.pack(np.frombuffer(record, np.uint8).copy()[None])).tobytes()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 3), (3, 1)])
def test_weights_come_back_quantised_and_all_else_exactly_with_any_number_of_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, writers: int, readers: int
) -> None:
    monkeypatch.setattr(writer, "_PART_BYTES", 4096)
    partitions = trained(writers)
    rows = load(save(partitions, tmp_path, bits), readers)
    saved = {key: record for tables, _ in partitions for key, record in contents(tables).items()}
    assert len(rows) == 2 * len(KEYS) + 64
    assert rows == {
        (number, key): record if number == 2 else quantised(number, record, bits)
        for (number, key), record in saved.items()
    }


def test_files_say_by_their_names_how_they_are_encoded(tmp_path: Path) -> None:
    uri = save(trained(2), tmp_path, 4)
    files = CheckpointFiles(uri).manifest.files
    assert {weight_bits_of(file.path) for file in files if "table-" in file.path} == {4}
    assert not any(weight_bits_of(file.path) for file in files if "table-" not in file.path)
    assert CheckpointFiles(uri).manifest.weight_bits == 4


def test_a_row_takes_the_bytes_that_the_format_says(tmp_path: Path) -> None:
    save(trained(1), tmp_path, 2)
    header = 24
    of_16_weights = 8 + 4 + 4 + 4 + 1  # key, range, codes, one float of state, pushes
    assert sum(file.stat().st_size for file in tmp_path.rglob("table-0-*")) == header + of_16_weights * len(KEYS)
    of_5_weights = 8 + 4 + 2 + 4 * 5 + 1
    assert sum(file.stat().st_size for file in tmp_path.rglob("table-1-*")) == header + of_5_weights * len(KEYS)


def test_dense_parameters_are_exact(tmp_path: Path) -> None:
    partitions = trained(2)
    exact, coarse = (CheckpointFiles(save(partitions, tmp_path / str(bits), bits)) for bits in (0, 2))
    values = [read_dense(files, files.partitions(partitions[0][0].specs, 1000), INITIAL) for files in (exact, coarse)]
    assert values[0].tobytes() == values[1].tobytes()


def test_an_exact_checkpoint_is_as_it_was_before_there_were_quantised_ones(tmp_path: Path) -> None:
    manifest = CheckpointFiles(save(trained(1), tmp_path, 0)).manifest
    assert manifest.weight_bits == 0
    assert {file.path.rpartition(".")[2] for file in manifest.files} == {"rows", "json"}


def test_counts_of_keys_without_rows_are_exact(tmp_path: Path) -> None:
    admitted = TableSpec(0, "C1", 0, 16, ADAGRAD, InitializerSpec(), seed=3, admission=AdmissionSpec(min_count=3))
    tables = TableStore([admitted], DENSE)
    tables.push(np.array([len(KEYS), 0], np.uint32), KEYS, np.ones(16 * len(KEYS), np.float32))
    share = Share(0, owned(1, 0), AppliedBatches(), len(INITIAL))
    snapshot = tables.readers.snapshot(Reader.CHECKPOINT, nullcontext())
    files = write_snapshot(snapshot, tables.specs, share, str(tmp_path), Work(), 2)
    of_sketches = [file for file in files if "sketches" in file.path]
    assert sum(file.bytes for file in of_sketches) > 0
    assert not any(weight_bits_of(file.path) for file in of_sketches)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_file_of_quantised_rows_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    uri = save(trained(1), tmp_path, 3)
    file = next(tmp_path.rglob("table-0-0.b3"))
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content if damage == "flip" else content[:-1])
    with pytest.raises(DamagedCheckpointError, match=r"table-0-0\.b3"):
        load(uri)


def test_a_file_that_ends_within_a_block_is_refused(tmp_path: Path) -> None:
    ((tables, share),) = trained(1)
    written = write_snapshot(
        tables.readers.snapshot(Reader.CHECKPOINT, nullcontext()), tables.specs, share, str(tmp_path), Work(), 3
    )
    next(tmp_path.rglob("table-0-0.b3")).write_bytes(b"123")
    shorter = CheckpointFile(path="ps-0/table-0-0.b3", bytes=3, crc32=0x884863D2)
    listed = [shorter if file.path == shorter.path else file for file in written]
    with pytest.raises(DamagedCheckpointError, match=r"table-0-0\.b3: it ends within the header"):
        load(write_manifest(tmp_path, listed))


def test_weights_that_are_not_finite_keep_a_quantised_checkpoint_from_being_written(tmp_path: Path) -> None:
    ((tables, share),) = trained(1, KEYS[:10])
    tables.readers.track(Reader.CHECKPOINT)
    tables.push(np.array([1, 0, 0], np.uint32), KEYS[:1], np.full(16, np.nan, np.float32))
    snapshot = tables.readers.snapshot(Reader.CHECKPOINT, nullcontext())
    with pytest.raises(InvalidError, match=r"table C1: .*quantization"):
        write_snapshot(snapshot, tables.specs, share, str(tmp_path), Work(), 4)
    assert set(records_of(tables.readers.take(Reader.CHECKPOINT, nullcontext()))) == {int(KEYS[0])}
    save([(tables, share)], tmp_path / "exact", 0)


def test_a_width_of_another_version_is_refused(tmp_path: Path) -> None:
    ((tables, share),) = trained(1, KEYS[:10])
    with pytest.raises(InvalidError, match="5 bits"):
        write_snapshot(
            tables.readers.snapshot(Reader.CHECKPOINT, nullcontext()), tables.specs, share, str(tmp_path), Work(), 5
        )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_reader_in_the_documentation_reads_quantised_weights(tmp_path: Path, bits: int) -> None:
    page = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    uri = save(trained(2), tmp_path, bits)
    rows = load(uri)
    for number, spec in enumerate(SPECS):
        layout = RowLayout.of(spec)
        found = names["rows_of"](uri, number)
        expected = {
            key: layout.fields(np.frombuffer(record, np.uint8)[None].copy())["weights"][0]
            for (table, key), record in rows.items()
            if table == number
        }
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[key], weights) for key, weights in expected.items())
