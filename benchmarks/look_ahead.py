"""What a look-ahead would fetch: the rival of hot rows (BagPipe, Agarwal et al., SOSP 2023).

A worker knows its next L batches, so it may keep the rows that these use again, and fetch the others only. That is
exact as long as no other worker uses the row in between: else the row must go back to its parameter server first. So a
row counts as kept if the worker's own last use was the last of all, at most L of its batches ago.

The second table is the bound of all that keeps rows in a worker for some batches and then writes them back: the rows
that several batches in a row access, each counted once, over those that each batch accesses. Less than this cannot be
fetched and written back, whether or not other workers use the rows in between.

Batches are given to the workers in turn, in a shuffled order. Workers that share one copy of the rows, on one machine,
are one worker here. Uses the product's synthetic data, whose exponents are assumptions, or any Criteo TSV files. Does
not measure time; `hot_embeddings.py` measures what the product does of this, rounds of batches.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset
from emberscale_trainer.hot.sampler import index_data
from reporting import arguments, say

DEPTHS = (1, 4, 16, 64, 256)
WORKERS = (1, 2, 4)
MERGED = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Kept:
    """The ratio of a batch's distinct rows that is fetched, for one number of workers and one look-ahead.

    `resident` is the mean number of rows that a worker keeps.
    """

    workers: int
    batches: int
    fetched: float
    resident: float


@dataclass(frozen=True)
class Merged:
    """The ratio of the distinct rows of `batches` batches together to the sum of the distinct rows of each."""

    batches: int
    rows: float


def read_ids(paths: Sequence[str], records: int) -> npt.NDArray[np.int64]:
    """Returns the ids of the first records, shuffled: int64[n, c]."""
    data = index_data(expand(paths), CriteoTSV(raw=True), lambda stage, done, total: None)
    parts, found = [], 0
    for part in data.read(data.blocks, []):
        parts.append(part.ids)
        found += len(part)
        if found >= records:
            break
    ids = np.concatenate(parts)[:records]
    return ids[np.random.default_rng(0).permutation(len(ids))]


def uses(ids: npt.NDArray[np.int64], batch_size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the distinct (row, batch) of a column, ordered by row and then batch, as two arrays."""
    batches = len(ids) // batch_size
    _, rows = np.unique(ids[: batches * batch_size], return_inverse=True)
    distinct = np.unique(rows.astype(np.int64) * batches + np.arange(rows.size) // batch_size)
    return distinct // batches, distinct % batches


def measure(ids: npt.NDArray[np.int64], batch_size: int) -> list[Kept]:
    """Measures all batches after the first quarter, which fills the kept rows."""
    batches = len(ids) // batch_size
    shape = (len(WORKERS), len(DEPTHS))
    kept, resident, total = np.zeros(shape), np.zeros(shape), 0
    for column in range(ids.shape[1]):
        rows, batch = uses(ids[:, column], batch_size)
        again = rows[1:] == rows[:-1]
        gap = (batch[1:] - batch[:-1])[again]
        later, before = batch[1:][again], batch[:-1][again]
        total += int((batch >= batches // 4).sum())
        for place, workers in enumerate(WORKERS):
            own = later % workers == before % workers
            for number, depth in enumerate(DEPTHS):
                stays = own & (gap <= depth * workers)
                kept[place, number] += (stays & (later >= batches // 4)).sum()
                resident[place, number] += gap[stays].sum() / batches / workers
    return [
        Kept(workers, depth, float(1 - kept[place, number] / total), float(resident[place, number]))
        for place, workers in enumerate(WORKERS)
        for number, depth in enumerate(DEPTHS)
    ]


def merge(ids: npt.NDArray[np.int64], batch_size: int) -> list[Merged]:
    """Merges consecutive batches, over all complete groups of the records."""
    found = []
    for together in MERGED:
        groups = len(ids) // (batch_size * together)
        if not groups:
            break
        used = ids[: groups * batch_size * together]
        alone, merged = 0, 0
        for column in range(ids.shape[1]):
            rows, batch = uses(used[:, column], batch_size)
            alone += rows.size
            merged += np.unique(rows * groups + batch // together).size
        found.append(Merged(together, merged / alone))
    return found


def main() -> None:
    """Prints tables, or one JSON object."""
    parser = arguments(__doc__, plot=False)
    parser.add_argument("--data", nargs="+", help="Criteo TSV files instead of synthetic data")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    options = parser.parse_args()
    records = options.records // 4 if options.quick else options.records
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            say(f"writing {records:,} synthetic records")
            write_dataset(Path(folder, "data"), DatasetSpec(records, seed=7, evaluation_fraction=0))
        ids = read_ids(options.data or [f"{folder}/data/*.tsv"], records)
    found, merged = measure(ids, options.batch_size), merge(ids, options.batch_size)
    if options.output == "json":
        document = {"kept": [asdict(one) for one in found], "merged": [asdict(one) for one in merged]}
        print(json.dumps({"name": "look_ahead", **document}))
        return
    print("workers  batches ahead  rows fetched  rows kept by a worker")
    for one in found:
        print(f"{one.workers:7} {one.batches:14} {one.fetched:13.1%} {one.resident:22,.0f}")
    print("batches together  rows fetched and written back")
    for group in merged:
        print(f"{group.batches:16} {group.rows:30.1%}")


if __name__ == "__main__":
    main()
