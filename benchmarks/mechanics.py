"""What reloads and changes of the number of parameter servers (PS) cost a PS, in bytes a second.

The simulator's scenarios name these numbers (`mechanics`). One table (dimension 16, row-wise Adagrad) is spread over
servers as a job spreads it, and each of two steps is timed for one server:

* save: the files of a snapshot, written and flushed;
* load: the same rows back into an empty server, and into one of as many and a half, which has to pick them out.

A rate is the server's bytes of rows over seconds of processor time; a slower disk or network adds to it. Medians of
several rounds.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec, parse_manifest
from emberscale_api.routing import BUCKETS, DENSE_PIECES, PsAddress, RoutingTable, buckets_of, spread_evenly
from emberscale_trainer.checkpoint import Share, Work, load_partition, write_snapshot
from emberscale_trainer.partition import AppliedBatches, Ownership
from emberscale_trainer.table import DensePieces, Reader, TableStore
from reporting import arguments, say

DIMENSION = 16
SERVERS, MORE_SERVERS = 2, 3
SPECS = (
    TableSpec(
        number=0,
        name="ids",
        column=0,
        dimension=DIMENSION,
        optimizer=OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=0.01),
        initializer=InitializerSpec(),
        seed=1,
    ),
)
PARAMETERS = SERVERS * MORE_SERVERS
_STEP = 1 << 16
_MANIFEST = parse_manifest(
    {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "mechanics"},
        "spec": {"data": {"train": ["train.tsv"]}},
    }
)


def routing(servers: int) -> RoutingTable:
    """A job's routing table over so many servers."""
    return RoutingTable(
        generation=1,
        version=1,
        servers=tuple(PsAddress(index, "i", "", "") for index in range(servers)),
        bucket_owners=spread_evenly(BUCKETS, servers),
        piece_owners=spread_evenly(DENSE_PIECES, servers),
    )


def empty() -> TableStore:
    """The tables of a server without rows."""
    dense = np.zeros(PARAMETERS, np.float32)
    return TableStore(SPECS, DensePieces.of(dense, OptimizerSpec(type=OptimizerType.ADAM)))


def fill(index: int, keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> TableStore:
    """What server `index` holds of the keys."""
    mine = keys[np.array(routing(SERVERS).bucket_owners)[buckets_of(keys)] == index]
    tables = empty()
    for start in range(0, len(mine), _STEP):
        part = mine[start : start + _STEP]
        request = np.array([len(part), 0], np.uint32), part, np.full(len(part) * DIMENSION, 0.01, np.float32)
        tables.reserve(*request)
        tables.push(*request)
    return tables


def timed(work: Callable[[], object]) -> float:
    """Seconds of processor time that it takes: what the wall clock says depends on who else computes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def write_manifest(folder: Path, files: list[CheckpointFile]) -> None:
    """What the master writes last."""
    manifest = CheckpointManifest(
        id="00000001",
        number=1,
        created=datetime.now(UTC),
        job_uid="u",
        job=_MANIFEST,
        ps_count=SERVERS,
        generation=1,
        routing_version=1,
        epoch=0,
        batch_size=1,
        training_records=1,
        applied=(),
        evaluations=(),
        training_files=(),
        evaluation_files=(),
        training_seconds=1.0,
        files=tuple(files),
    )
    (folder / "manifest.json").write_text(manifest.to_json())


def measure(servers_tables: list[TableStore], folder: Path) -> dict[str, float]:
    """One round: bytes a second of the first server's save and loads."""
    files: list[CheckpointFile] = []

    def save(index: int) -> None:
        tables = servers_tables[index]
        share = Share(index, Ownership.of(routing(SERVERS), index), AppliedBatches(), PARAMETERS)
        snapshot = tables.snapshot(Reader.CHECKPOINT, nullcontext())
        written = write_snapshot(snapshot, tables.specs, share, str(folder), Work())
        files.extend(CheckpointFile(path=file.path, bytes=file.bytes, crc32=file.crc32) for file in written)

    saved = timed(lambda: save(0))
    for index in range(1, SERVERS):
        save(index)
    write_manifest(folder, files)
    size = sum(file.bytes for file in files if file.path.startswith("ps-0/table-0-"))
    rates = {"save": size / saved}
    for label, servers in (("load", SERVERS), ("load_split", MORE_SERVERS)):
        owned, tables = Ownership.of(routing(servers), 0), empty()
        seconds = timed(partial(load_partition, str(folder), owned, tables, PARAMETERS, Work()))
        rates[label] = size * SERVERS / servers / seconds
    return rates


def main() -> None:
    """Measures, and prints the rates and the size of a server."""
    given = arguments(__doc__ or "", plot=False).parse_args()
    rows, rounds = (1_000_000, 3) if given.quick else (6_000_000, 7)
    random = np.random.default_rng(1)
    keys = random.integers(-(1 << 63), 1 << 63, rows, np.int64)
    servers_tables = [fill(index, keys) for index in range(SERVERS)]
    results = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            rates = measure(servers_tables, Path(folder))
        if number:  # the first compiles
            results.append(rates)
            say(f"round {number}: " + ", ".join(f"{name} {rate / 1e6:.0f} MB/s" for name, rate in rates.items()))
    medians = {name: statistics.median(result[name] for result in results) for name in results[0]}
    if given.output == "json":
        print(json.dumps({"name": "mechanics", "rows": rows, "bytes_per_second": medians}))
    else:
        for name, rate in medians.items():
            print(f"{name:12} {rate / 1e6:8.0f} MB/s a server (median of {rounds})")


if __name__ == "__main__":
    main()
