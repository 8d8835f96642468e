"""What incremental and quantised checkpoints write and keep, beside figures 8, 9 and 11 of Check-N-Run (section 5).

A parameter server trains on ids of a power law for WINDOWS intervals, and a checkpoint is taken after each by each mode
of `spec.checkpoint.incremental`, from the same pushes, with the product's own rules and files. The law is fitted to the
dirty rates of the paper: 26% of the rows change in one interval (section 4.1), and above 50% in ten (figure 8), taken
as the 52% that figure 3 reaches after 11 billion records.

* Bandwidth (figure 8): the bytes that a checkpoint writes, over those of all rows.
* Capacity (figure 9): the bytes that must stay so that the newest checkpoint can be restored, over those of all rows.
* Reduction (figure 11): both again, with weights of a few bits, as the bytes of full float32 checkpoints over them. The
  paper's go from more than 20 restores (8 bits) to one (2 bits), and are both of intermittent increments. What any mode
  reaches at best is of two modes: the one that writes least keeps most.
* Exact: the newest checkpoint of each mode is restored at the end and compared with the rows, byte by byte; with
  quantised weights, all but these.

It shows nothing of the time that a checkpoint holds training (`checkpoint_stall.py`) or that a restore takes
(`restore_rate.py`), nor what quantised weights cost in accuracy (`quantised_training.py`).
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from emberscale_api.job import IncrementalMode, InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_jobmaster.chains import Chain, builds_on
from emberscale_trainer.checkpoint import ChainWriter, CheckpointFiles, Share, Work, load_partition, owned_rows
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.table import DensePieces, Reader, TableStore
from master_stand_in import owned, write_manifest
from reporting import Ratio, arguments, report, say

ROWS, DIMENSION, DENSE = 300_000, 64, 10_000
"""The rows of the table, the dimension of the paper's vectors (section 2.1), and the dense parameters."""
WINDOWS = 12
"""The number of checkpoints; the paper shows as many intervals of 30 minutes."""
DIRTY_ONE, DIRTY_TEN = 0.26, 0.52
"""The share of rows that change in one interval and in ten."""
SPLITS = 20
"""The pushes of a window."""
MODES = (IncrementalMode.FULL, IncrementalMode.ONE_SHOT, IncrementalMode.CONSECUTIVE, IncrementalMode.INTERMITTENT)
BITS = (8, 4, 2)
QUANTISED_MODES = (IncrementalMode.FULL, IncrementalMode.CONSECUTIVE, IncrementalMode.INTERMITTENT)
Setting = tuple[IncrementalMode, int]
"""A mode, and the bits of a weight; 0: float32."""

SETTINGS = (*((mode, 0) for mode in MODES), *((mode, bits) for mode in QUANTISED_MODES for bits in BITS))
PAPER_BANDWIDTH, PAPER_CAPACITY = {2: 17.0, 8: 6.0}, {2: 8.0, 8: 2.5}
"""Section 5.3: the factors by which intermittent increments reduce the bytes written and kept, by bits."""
PAPER_ONE_SHOT = {2: 0.25, 11: 0.50}
"""Figure 8: an increment is 25% of the model at first, and above 50% after 10 intervals."""
PAPER_INTERMITTENT_ANEW = 8
"""Figure 8: the interval whose checkpoint is full again."""
PAPER_CONSECUTIVE_SAVING = 0.67
"""Section 5.1: the average bytes of consecutive increments over 12 intervals, relative to the other modes."""
PAPER_CONSECUTIVE_CAPACITY = {11: 4.0}
"""Section 5.1: consecutive increments keep almost 4 times the model after 11 intervals."""
PAPER_SAVING = 0.5
"""Section 1: increments write less than half of the bytes of full checkpoints."""


def dirty(weights: NDArray[np.float64], draws: float) -> float:
    """Returns the expected share of rows that this many draws touch."""
    return float(np.mean(-np.expm1(-draws * weights)))


def law(rows: int, one: float, ten: float) -> tuple[NDArray[np.float64], int]:
    """Returns the probabilities of rows, float64 [rows], and the draws of a window, for these shares in 1 and in 10."""
    ranks = np.arange(1, rows + 1, dtype=np.float64)
    low, high = 0.2, 4.0
    for _ in range(40):
        exponent = (low + high) / 2
        weights = ranks**-exponent
        weights /= weights.sum()
        fewest, most = 1.0, 1e15
        for _ in range(100):
            draws = (fewest * most) ** 0.5
            fewest, most = (draws, most) if dirty(weights, draws) < one else (fewest, draws)
        low, high = (exponent, high) if dirty(weights, 10 * draws) > ten else (low, exponent)
    return weights, round(draws)


def touched(weights: NDArray[np.float64], draws: int, random: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    """Yields the distinct rows of each push of a window, int64 [n]."""
    for _ in range(SPLITS):
        yield np.flatnonzero(random.random(len(weights)) < -np.expm1(-draws / SPLITS * weights))


@dataclass
class Taken:
    """The checkpoints of one mode: the bytes `written` and `kept` for each, and the numbers of the `bases`."""

    folder: Path
    written: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    chain: Chain = field(default_factory=Chain)


class Server:
    """A parameter server whose checkpoints are of one mode. `keys`: those of each of its tables."""

    def __init__(self, mode: IncrementalMode, folder: Path, keys: Sequence[NDArray[np.int64]], bits: int = 0) -> None:
        optimizer = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD)
        self._specs = tuple(
            TableSpec(number, f"C{1 + number}", number, DIMENSION, optimizer, InitializerSpec(), seed=1)
            for number in range(len(keys))
        )
        self._dense = DensePieces.of(np.zeros(DENSE, np.float32), OptimizerSpec())
        self._mode, self._bits = mode, bits
        self._writer = ChainWriter()
        floats = sum(map(len, keys)) * DIMENSION + 2 * DENSE
        self._gradients = np.random.default_rng(2).normal(0, 0.01, floats).astype(np.float32)
        self.tables = self.empty()
        self.taken = Taken(folder)
        self.push(keys)

    def empty(self) -> TableStore:
        """Returns its tables without rows."""
        return TableStore(self._specs, self._dense)

    def push(self, keys: Sequence[NDArray[np.int64]]) -> None:
        """Steps these rows of each table and all dense pieces."""
        counts = np.array([*map(len, keys), 64], np.uint32)
        values = self._gradients[: self.tables.values_per_request(counts)]
        self.tables.push(counts, np.concatenate([*keys, np.arange(64)]), values)

    def save(self, number: int) -> None:
        """Takes a checkpoint, and removes what the newest does not need."""
        since = builds_on(self.taken.chain, self._mode, self._bits)
        everything, lock = owned(1, 0), nullcontext()
        tracked = self._mode is not IncrementalMode.FULL
        draft = self._writer.begin(self.tables, lock, everything, tracked=tracked, since=since)
        share = Share(0, everything, AppliedBatches(), DENSE, owned_rows(self.tables, everything))
        folder = self.taken.folder / f"{number:08}"
        files = self._writer.write(draft, self.tables.specs, share, str(folder), Work(), self._bits)
        write_manifest(folder, files, id=folder.name, number=number)
        self.taken.chain = self.taken.chain.followed_by(folder.name, files)
        manifest = self.newest().manifest
        for other in self.taken.folder.iterdir():
            if other.name not in (folder.name, *manifest.builds_on):
                shutil.rmtree(other)
        self.taken.written.append(size_of(folder))
        self.taken.kept.append(sum(size_of(one) for one in self.taken.folder.iterdir()))
        if not manifest.builds_on:
            self.taken.bases.append(number)

    def newest(self) -> CheckpointFiles:
        """Returns the newest checkpoint."""
        return CheckpointFiles(str(max(self.taken.folder.iterdir())))

    def restores(self) -> bool:
        """Whether the newest checkpoint restores every row exactly, apart from quantised weights."""
        restored = self.empty()
        load_partition(self.newest(), owned(1, 0), restored, DENSE)
        return contents(restored, self._bits > 0) == contents(self.tables, self._bits > 0)


def contents(tables: TableStore, without_weights: bool) -> list[list[bytes]]:
    """Returns the sorted records of each table, on request without the weights of embedding rows."""
    snapshot, found = tables.readers.snapshot(Reader.FLASH, nullcontext()), []
    for number, (spec, layout) in enumerate(zip(tables.specs, tables.layouts, strict=True)):
        records = [part.copy() for part in snapshot.read(number)]
        for part in records if without_weights and spec.column >= 0 else ():
            layout.fields(part)["weights"] = 0
        found.append(sorted(record.tobytes() for part in records for record in part))
    return found


def size_of(folder: Path) -> int:
    """Returns the bytes of all files in a folder, including the manifest."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def measure(rows: int, folder: Path) -> dict[Setting, Taken]:
    """Trains, and takes a checkpoint by each mode after each window."""
    weights, draws = law(rows, DIRTY_ONE, DIRTY_TEN)
    say(f"one window touches {dirty(weights, draws):.1%} of {rows:,} rows, ten {dirty(weights, 10 * draws):.1%}")
    all_keys = np.random.default_rng(0).integers(-(2**63), 2**63, rows)  # like hashed ids, which do not compress
    servers = {(mode, bits): Server(mode, folder / f"{mode}-{bits}", [all_keys], bits) for mode, bits in SETTINGS}
    random = np.random.default_rng(1)
    for number in range(1, WINDOWS + 1):
        for keys in touched(weights, draws, random) if number > 1 else ():
            for server in servers.values():
                server.push([all_keys[keys]])
        for server in servers.values():
            server.save(number)
    for setting, server in servers.items():
        if not server.restores():
            raise SystemExit(f"{_named(setting)}: the newest checkpoint does not restore what was there")
    return {setting: server.taken for setting, server in servers.items()}


def _named(setting: Setting) -> str:
    mode, bits = setting
    return f"{mode}, {bits} bits" if bits else mode


def bandwidth(taken: Taken, whole: int) -> float:
    """Returns the bytes that full float32 checkpoints write, over those written."""
    return whole * WINDOWS / sum(taken.written)


def capacity(taken: Taken, whole: int) -> float:
    """Returns the bytes of a full float32 checkpoint, over the most bytes kept."""
    return whole / max(taken.kept)


def draw(path: Path, found: dict[Setting, Taken], whole: int) -> None:
    """Draws the three figures, with the paper's numbers as crosses."""
    figure = Figure(figsize=(16, 4.6), layout="constrained")
    written, kept, reduced = figure.subplots(1, 3)
    intervals = range(1, WINDOWS + 1)
    for mode in MODES:
        taken = found[mode, 0]
        written.plot(intervals, [size / whole for size in taken.written], marker=".", label=mode)
        kept.plot(intervals, [size / whole for size in taken.kept], marker=".", label=mode)
    written.plot(*zip(*PAPER_ONE_SHOT.items(), strict=True), "kx", label="paper: OneShot")
    written.plot([PAPER_INTERMITTENT_ANEW], [1.0], "k+", markersize=10, label="paper: Intermittent anew")
    kept.plot(*zip(*PAPER_CONSECUTIVE_CAPACITY.items(), strict=True), "kx", label="paper: Consecutive")
    written.set(xlabel="checkpoint", ylabel="bytes written / bytes of all rows", ylim=(0, 1.1))
    kept.set(xlabel="checkpoint", ylabel="bytes kept / bytes of all rows", ylim=(0, 5))
    places = np.arange(len(BITS))
    for number, mode in enumerate(QUANTISED_MODES):
        pairs = [(bandwidth(found[mode, bits], whole), capacity(found[mode, bits], whole)) for bits in BITS]
        across = places + 0.25 * (number - 1)
        reduced.bar(across - 0.06, [one for one, _ in pairs], 0.11, color=f"C{number}", label=f"{mode}: written")
        reduced.bar(
            across + 0.06, [one for _, one in pairs], 0.11, color=f"C{number}", alpha=0.4, label=f"{mode}: kept"
        )
    for bits in PAPER_BANDWIDTH:
        place = places[BITS.index(bits)]
        reduced.plot([place + 0.19], [PAPER_BANDWIDTH[bits]], "kx", label="paper: written" if bits == 2 else None)
        reduced.plot([place + 0.31], [PAPER_CAPACITY[bits]], "k+", label="paper: kept" if bits == 2 else None)
    reduced.set_xticks(places, [f"{bits} bits" for bits in BITS])
    reduced.set(ylabel="bytes of full float32 checkpoints / bytes")
    for axes in (written, kept, reduced):
        axes.legend(fontsize="small")
    figure.suptitle(f"Increments with {DIRTY_ONE:.0%} of the rows changing between two, vectors of {DIMENSION}")
    figure.savefig(path, dpi=120)


def mean(sizes: Sequence[int], whole: int) -> float:
    """The mean over all checkpoints, as a share of all rows."""
    return statistics.mean(sizes) / whole


def main() -> None:
    """Measures all modes and reports."""
    options = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(ROWS // 10 if options.quick else ROWS, Path(folder))
    whole = found[IncrementalMode.FULL, 0].written[0]
    for setting, taken in found.items():
        shares = " ".join(f"{size / whole:.2f}" for size in taken.written)
        say(
            f"{_named(setting):20} written {shares}; mean {mean(taken.written, whole):.3f}; kept at most "
            f"{max(taken.kept) / whole:.2f}; all rows in {taken.bases}; {bandwidth(taken, whole):.1f} times less "
            f"written, {capacity(taken, whole):.1f} times less kept"
        )
    if options.plot:
        draw(options.plot, found, whole)
    one_shot, consecutive = found[IncrementalMode.ONE_SHOT, 0], found[IncrementalMode.CONSECUTIVE, 0]
    intermittent = found[IncrementalMode.INTERMITTENT, 0]
    written = {setting: bandwidth(taken, whole) for setting, taken in found.items()}
    kept = {setting: capacity(taken, whole) for setting, taken in found.items()}
    report(
        "checkpoint_bytes",
        {
            "first increment / all rows (paper 0.25)": Ratio([(one_shot.written[1], whole)], 0.28, "max"),
            "increment after ten intervals / all rows (0.5)": Ratio([(one_shot.written[10], whole)], 0.56, "max"),
            "Intermittent written / Full (paper < 0.5)": Ratio(
                [(sum(intermittent.written), whole * WINDOWS)], PAPER_SAVING, "max"
            ),
            "Consecutive written / Intermittent (paper 0.67)": Ratio(
                [(sum(consecutive.written), sum(intermittent.written))], PAPER_CONSECUTIVE_SAVING + 0.1, "max"
            ),
            "Intermittent kept at most / all rows": Ratio([(max(intermittent.kept), whole)], 1.6, "max"),
            "times less written by any mode (paper 17)": Ratio(
                [(max(written.values()), 1.0)], PAPER_BANDWIDTH[2], "min"
            ),
            "times less kept by any mode (paper 8)": Ratio([(max(kept.values()), 1.0)], PAPER_CAPACITY[2], "min"),
            "Intermittent, 2 bits, times less written (17)": Ratio(
                [(written[IncrementalMode.INTERMITTENT, 2], 1.0)], PAPER_BANDWIDTH[2], "min"
            ),
            "Intermittent, 2 bits, times less kept (8)": Ratio(
                [(kept[IncrementalMode.INTERMITTENT, 2], 1.0)], PAPER_CAPACITY[2], "min"
            ),
        },
        options.output,
    )


if __name__ == "__main__":
    main()
