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
from functools import partial
from pathlib import Path

import numpy as np

from emberscale_api.checkpoint import CheckpointFile
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.readable import bytes_text
from emberscale_trainer.checkpoint import CheckpointFiles, Share, Work, load_partition
from emberscale_trainer.partition import AppliedBatches, buckets_of
from emberscale_trainer.table import DensePieces, Reader, TableStore
from master_stand_in import owned, write_manifest, write_snapshot
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
PARAMETERS = 6
_STEP = 1 << 16


def store() -> TableStore:
    """Returns empty tables."""
    return TableStore(SPECS, DensePieces.of(np.zeros(PARAMETERS, np.float32), OptimizerSpec(type=OptimizerType.ADAM)))


def fill(index: int, keys: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[TableStore, Share]:
    """Returns the tables and the share of server `index` after pushes of all keys."""
    share = Share(index, owned(SERVERS, index), AppliedBatches(), PARAMETERS)
    mine = keys[share.owned.buckets[buckets_of(keys)]]
    tables = store()
    for start in range(0, len(mine), _STEP):
        part = mine[start : start + _STEP]
        tables.push(np.array([len(part), 0], np.uint32), part, np.full(len(part) * DIMENSION, 0.01, np.float32))
    return tables, share


def timed(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of `work`; wall-clock time would depend on other work on the machine."""
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(partitions: list[tuple[TableStore, Share]], folder: Path) -> dict[str, float]:
    """Measures one round: bytes/s of the first server's save and loads."""
    files: list[CheckpointFile] = []

    def save(index: int) -> None:
        tables, share = partitions[index]
        snapshot = tables.readers.snapshot(Reader.CHECKPOINT, nullcontext())
        files.extend(write_snapshot(snapshot, tables.specs, share, str(folder), Work()))

    saved = timed(lambda: save(0))
    size = sum(file.bytes for file in files if file.path.endswith(".rows"))
    for index in range(1, SERVERS):
        save(index)
    write_manifest(folder, files, ps_count=SERVERS)
    rates = {"save": size / saved}
    for label, servers in (("load", SERVERS), ("load_split", MORE_SERVERS)):
        load = partial(load_partition, CheckpointFiles(str(folder)), owned(servers, 0), store(), PARAMETERS)
        rates[label] = size * SERVERS / servers / timed(load)
    return rates


def main() -> None:
    """Measures, and prints the rates and the size of a server."""
    given = arguments(__doc__ or "", plot=False).parse_args()
    rows, rounds = (1_000_000, 3) if given.quick else (6_000_000, 7)
    random = np.random.default_rng(1)
    keys = random.integers(-(1 << 63), 1 << 63, rows, np.int64)
    partitions = [fill(index, keys) for index in range(SERVERS)]
    results = []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            rates = measure(partitions, Path(folder))
        if number:  # the first round compiles kernels
            results.append(rates)
            say(f"round {number}: " + ", ".join(f"{name} {bytes_text(rate)}/s" for name, rate in rates.items()))
    medians = {name: statistics.median(result[name] for result in results) for name in results[0]}
    if given.output == "json":
        print(json.dumps({"name": "mechanics", "rows": rows, "bytes_per_second": medians}))
    else:
        for name, rate in medians.items():
            print(f"{name:12} {bytes_text(rate):>8}/s a server (median of {rounds})")


if __name__ == "__main__":
    main()
