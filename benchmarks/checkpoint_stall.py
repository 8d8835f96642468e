"""How long a checkpoint holds training, and what it takes of memory, over the size of a parameter server.

Each size is a process of its own: a partition of TABLES tables (dimension 16, row-wise Adagrad), whose lock two threads
take for one push after another, as fast as it goes, while a checkpoint is written to a folder in memory; then the next,
after as long a time without one. All pushes are of a tenth of the rows, which change so soon that nearly all of them
are saved before the read has passed them: a dirty rate of 10%, at its most expensive.

* Held: the time for which the lock is not to be had because of a checkpoint. It begins with the snapshot, which is what
  a barrier adds to its settling, and has a moment in each segment after that; the targets are for the sum of all.
* Memory: the most that the process gained from before its first checkpoint to the peak of this one, over the rows.
* Standstill: the longest time in which no push was finished, whatever the reason, beside that in the pause.
* Pushes: their rate while a checkpoint is written, over that in the pause after it. Writing takes a core of its own.
* Slowed: what a checkpoint of 1 GiB every 30 s takes of the time, as the paper counts it (Check-N-Run, section 3.2: the
  time that training stands still for a snapshot, 0.4% at 30 minutes), and as pushes lost where these and the checkpoint
  share the machine.

`--sizes 1` measures that alone.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from matplotlib.figure import Figure
from numpy.typing import NDArray

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.pictures import BLUE, GREEN, ORANGE
from emberscale_api.readable import bytes_text, duration_text
from emberscale_api.routing import DENSE_PIECES, piece_length
from emberscale_trainer.checkpoint import Share, Work
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.table import DensePieces, Reader, TableStore
from master_stand_in import owned, write_snapshot
from reporting import Ratio, arguments, report, say

TABLES, DIMENSION, DENSE = 8, 16, 10_000
KEYS_A_PUSH = 1024
"""The keys of a push for each table, as a batch of 2048 gives to one of two servers."""

PUSHERS = 2
DIRTY = 0.1
GIB = 1 << 30
SIZES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
CHECKPOINTS = 40
"""The number of checkpoints at 1 GiB; fewer for larger sizes, but at least MIN_CHECKPOINTS."""

MIN_CHECKPOINTS = 8
IN_MEMORY = Path("/dev/shm")
MEDIAN_SECONDS, P99_SECONDS = 0.020, 0.100
INTERVAL_SECONDS, ALLOWED_SHARE = 30.0, 0.004
"""The interval of checkpoints, and the share that a checkpoint may take of it (Check-N-Run, section 3.2: of 30 min)."""


class TimedLock:
    """The lock of the snapshot; records how long the checkpoint holds it each time."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self.held: list[float] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.held.append(time.perf_counter() - self._began)
        self._lock.release()


class Server:
    """A server's tables with `size` GiB of rows, and the threads that push to them."""

    def __init__(self, size: float) -> None:
        random = np.random.default_rng(0)
        optimizer = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=0.01)
        specs = tuple(
            TableSpec(number, f"C{number}", number, DIMENSION, optimizer, InitializerSpec(), seed=1)
            for number in range(TABLES)
        )
        dense = DensePieces.of(np.zeros(DENSE, np.float32), OptimizerSpec(type=OptimizerType.ADAM))
        self.dense = dense
        self.tables = TableStore(specs, dense)
        self.lock = threading.Condition()
        self.pushes, self.last, self.standstill = 0, time.perf_counter(), 0.0
        rows = int(size * GIB) // (TABLES * self.tables.layouts[0].stride)
        self.keys = random.integers(-(1 << 63), 1 << 63, (TABLES, rows), np.int64)
        for first in range(0, rows, 1 << 16):
            self.push(self.keys[:, first : first + (1 << 16)])
        self.dirty, self._first = int(rows * DIRTY), 0

    def push(self, keys: NDArray[np.int64]) -> None:
        """Pushes a batch: `keys: int64[TABLES, n]`, and all dense pieces."""
        counts = np.array([keys.shape[1]] * TABLES + [DENSE_PIECES], np.uint32)
        requested = np.concatenate([keys.reshape(-1), np.arange(DENSE_PIECES)])
        values = keys.size * DIMENSION + DENSE_PIECES * piece_length(DENSE)
        gradients = np.full(values, 0.01, np.float32)
        with self.lock:
            self.tables.reserve(counts, requested, gradients)
            self.tables.push(counts, requested, gradients)
            now = time.perf_counter()
            self.standstill = max(self.standstill, now - self.last)
            self.pushes, self.last = self.pushes + 1, now

    def train(self, seed: int) -> None:
        """Pushes to random rows of the dirty tenth, for ever."""
        random = np.random.default_rng(seed)
        batches = [random.integers(0, self.dirty, KEYS_A_PUSH) for _ in range(500)]
        while True:
            for batch in batches:
                self.push(self.keys[:, self._first + batch])

    def push_elsewhere(self) -> None:
        """Makes another tenth of the rows the dirty one."""
        self._first = (self._first + self.dirty) % (self.keys.shape[1] - self.dirty)

    def checkpoint(self, folder: Path, resident: int) -> dict[str, float]:
        """Writes and measures a checkpoint; `resident` is the memory of the process before the first one."""
        lock = TimedLock(self.lock)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        pushes, began, self.standstill = self.pushes, time.perf_counter(), 0.0
        with lock:
            snapshot = self.tables.readers.snapshot(Reader.CHECKPOINT, lock)
        share = Share(0, owned(1, 0), AppliedBatches(), DENSE)
        files = write_snapshot(snapshot, self.tables.specs, share, str(folder), Work())
        seconds, pushed, standstill = time.perf_counter() - began, self.pushes - pushes, self.standstill
        status = Path("/proc/self/status").read_text()
        peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
        shutil.rmtree(folder)
        pushes, began, self.standstill = self.pushes, time.perf_counter(), 0.0
        time.sleep(seconds)
        return {
            "begin": lock.held[0],
            "held": sum(lock.held),
            "longest": max(lock.held),
            "seconds": seconds,
            "bytes": (size := sum(file.bytes for file in files)),
            "memory": size + peak - resident,
            "pushes": pushed / seconds,
            "standstill": standstill,
            "standstill_undisturbed": self.standstill,
            "undisturbed": (self.pushes - pushes) / (time.perf_counter() - began),
        }


def measure(size: float, checkpoints: int) -> list[dict[str, float]]:
    """Measures checkpoints of a server of `size` GiB under full load."""
    server = Server(size)
    for seed in range(PUSHERS):
        threading.Thread(target=server.train, args=[seed + 1], daemon=True).start()
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        time.sleep(1)  # until the memory that pushes need is allocated
        resident = psutil.Process().memory_info().rss
        return [server.checkpoint(Path(folder) / str(number), resident) for number in range(checkpoints)]


def in_a_process(size: float, checkpoints: int) -> list[dict[str, float]]:
    """Runs `measure` in a new process."""
    done = subprocess.run(
        [sys.executable, __file__, "--size", str(size), "--checkpoints", str(checkpoints)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    measured: list[dict[str, float]] = json.loads(done.stdout)
    return measured


def draw(path: Path, sizes: dict[float, list[dict[str, float]]]) -> None:
    """Draws every checkpoint, over the size."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    held, memory = figure.subplots(1, 2)
    for field, colour, label in (
        ("held", BLUE, "all in all"),
        ("longest", ORANGE, "the longest time at once"),
        ("begin", GREEN, "at the barrier"),
    ):
        medians = [1e3 * float(np.median([run[field] for run in runs])) for runs in sizes.values()]
        held.plot(list(sizes), medians, color=colour, label=label)
        for size, runs in sizes.items():
            held.plot([size] * len(runs), [1e3 * run[field] for run in runs], ".", color=colour, alpha=0.3)
    held.axhline(1e3 * MEDIAN_SECONDS, linestyle="--", color="black", label="target of the median, all in all")
    held.set(
        xscale="log", yscale="log", xlabel="GiB of rows", ylabel="milliseconds for which a checkpoint holds pushes"
    )
    held.legend()
    for size, runs in sizes.items():
        memory.plot([size] * len(runs), [run["memory"] / run["bytes"] for run in runs], "k.", alpha=0.4)
    memory.axhline(1.15, linestyle="--", color="black", label="target")
    memory.set_xscale("log")
    memory.set_ylim(1)
    memory.set(xlabel="GiB of rows", ylabel="rows and what the process gains meanwhile / rows")
    memory.legend()
    figure.suptitle(f"Checkpoints under full push load, {DIRTY:.0%} of the rows changing")
    figure.savefig(path, dpi=120)


def lost_seconds(run: dict[str, float]) -> float:
    """Returns the seconds of undisturbed pushes that a checkpoint costs."""
    return run["seconds"] * max(0.0, 1 - run["pushes"] / run["undisturbed"])


def main() -> None:
    """Measures each size and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--size", type=float, help="measure a server of so many GiB in this process; prints JSON")
    parser.add_argument("--checkpoints", type=int, default=CHECKPOINTS)
    parser.add_argument("--sizes", type=float, nargs="+", help="measure servers of so many GiB; 1 must be among them")
    options = parser.parse_args()
    if options.size is not None:
        print(json.dumps(measure(options.size, options.checkpoints)))
        return
    sizes: dict[float, list[dict[str, float]]] = {}
    for size in options.sizes or (SIZES[:4] if options.quick else SIZES):
        runs = sizes[size] = in_a_process(size, max(MIN_CHECKPOINTS, int(options.checkpoints / max(1, size * size))))
        columns: dict[str, Any] = {name: np.array([run[name] for run in runs]) for name in runs[0]}
        middle = {name: duration_text(float(np.median(column))) for name, column in columns.items()}
        say(
            f"{bytes_text(size * GIB):>8}: {len(runs)} checkpoints of {middle['seconds']}; pushes held "
            f"{middle['begin']} at the barrier, {middle['held']} in all "
            f"(p99 {duration_text(float(np.quantile(columns['held'], 0.99)))}), {middle['longest']} at once; "
            f"the longest standstill {middle['standstill']}, {middle['standstill_undisturbed']} without; memory "
            f"{np.median(columns['memory'] / columns['bytes']):.3f}x; pushes "
            f"{np.median(columns['pushes'] / columns['undisturbed']):.2f}x"
        )
    if options.plot:
        draw(options.plot, sizes)
    runs = sizes[1.0]
    everything = [run for runs in sizes.values() for run in runs]
    p99 = float(np.quantile([run["held"] for run in runs], 0.99))
    report(
        "checkpoint_stall",
        {
            "pushes held a checkpoint at 1 GiB / 20 ms": Ratio(
                [(run["held"], MEDIAN_SECONDS) for run in runs], 1.0, "max"
            ),
            "its 99th percentile / 100 ms": Ratio([(p99, P99_SECONDS)], 1.0, "max"),
            "rows and memory gained meanwhile at 1 GiB / rows": Ratio(
                [(run["memory"], run["bytes"]) for run in runs], 1.15, "max"
            ),
            "share of 30 s that a checkpoint of 1 GiB holds pushes": Ratio(
                [(run["held"], INTERVAL_SECONDS) for run in runs], ALLOWED_SHARE, "max"
            ),
            "share of 30 s of pushes that it costs in all": Ratio(
                [(lost_seconds(run), INTERVAL_SECONDS) for run in runs], ALLOWED_SHARE, "max"
            ),
            "pushes/s during a checkpoint / without": Ratio(
                [(run["pushes"], run["undisturbed"]) for run in everything], 0.6, "min"
            ),
        },
        options.output,
    )


if __name__ == "__main__":
    main()
