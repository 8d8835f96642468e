"""Whether training gains where the writer of a checkpoint rests after each chunk, and so spreads its work over time.

One process is a server of `--size` GiB as `checkpoint_stall.py` has it, with two threads that push as fast as it goes,
all to a tenth of the rows. Windows of equal length take turns: without a checkpoint, with one that is written at full
speed, and with one whose writer rests after each chunk for `--rest` times the CPU that the chunk took. Each window
lasts longer than either checkpoint, so that all work for a checkpoint is within its own.

What counts is the pushes of a window over the CPU that the process got in it, the writer's included: it tells what a
checkpoint costs where training and writer share cores, and does not follow what else computes on the machine. Pushes
save the old bytes of rows that the writer has not come to; a writer that rests has them save more.

It shows nothing of a server with idle cores and a slow disk, of quantisation, or of workers, which wait for several
servers at once.
"""

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from checkpoint_stall import DENSE, IN_MEMORY, PUSHERS, Server
from emberscale_api.job import TableSpec
from emberscale_api.readable import duration_text
from emberscale_trainer.checkpoint import Share, Work
from emberscale_trainer.checkpoint.writer import Seen, write_part
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.table import Reader
from master_stand_in import owned
from reporting import Ratio, arguments, report, say

GAIN = 1.05
"""The least gain for which a resting writer pays; below it, rests only lengthen checkpoints."""
COST = 0.6
"""The target for pushes with a checkpoint over those without, as in `checkpoint_stall.py`."""


def resting(times: float) -> Seen:
    """Makes a callback for each chunk of the writer: it rests `times` the thread's CPU time since the last rest."""
    used = time.thread_time()

    def rest(table: int, spec: TableSpec, rows: NDArray[np.uint8]) -> None:
        nonlocal used
        time.sleep(times * (time.thread_time() - used))
        used = time.thread_time()

    return rest


class Window(NamedTuple):
    """The pushes of a window, the CPU seconds of the process, and the seconds of the checkpoint."""

    pushes: int
    cpu: float
    checkpoint: float

    @property
    def rate(self) -> float:
        """Pushes per second of CPU time."""
        return self.pushes / self.cpu


def measure(server: Server, seconds: float, rest: float | None, folder: Path) -> Window:
    """Measures a window of `seconds`, without a checkpoint if `rest` is None.

    Raises RuntimeError if the checkpoint takes longer.
    """
    pushes, cpu, began, took = server.pushes, time.process_time(), time.perf_counter(), 0.0
    if rest is not None:
        with server.lock:
            snapshot = server.tables.readers.snapshot(Reader.CHECKPOINT, server.lock)
        share = Share(0, owned(1, 0), AppliedBatches(), DENSE)
        write_part(snapshot, server.tables.specs, share, str(folder), Work(), seen=resting(rest) if rest else None)
        snapshot.commit()
        shutil.rmtree(folder)
        took = time.perf_counter() - began
    left = began + seconds - time.perf_counter()
    if left < 0:
        raise RuntimeError(
            f"a checkpoint took {duration_text(took)}: windows of {duration_text(seconds)} are too short (--window)"
        )
    time.sleep(left)
    return Window(server.pushes - pushes, time.process_time() - cpu, took)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__, plot=False)
    parser.add_argument("--size", type=float, default=0.25, help="GiB of rows")
    parser.add_argument("--window", type=float, default=30.0, help="seconds")
    parser.add_argument("--rest", type=float, default=20.0, help="in times of the CPU that a chunk took")
    options = parser.parse_args()
    turns = 4 if options.quick else 12
    server = Server(options.size)
    for seed in range(PUSHERS):
        threading.Thread(target=server.train, args=[seed + 1], daemon=True).start()
    windows: dict[float | None, list[Window]] = {None: [], 0.0: [], options.rest: []}
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as folder:
        measure(server, options.window, 0.0, Path(folder) / "warm-up")
        for turn in range(turns):
            for rest in list(windows) if turn % 2 == 0 else reversed(list(windows)):
                windows[rest].append(measure(server, options.window, rest, Path(folder) / "checkpoint"))
            said = ", ".join(f"{window[-1].rate:.0f}" for window in windows.values())
            took = ", ".join(f"{window[-1].checkpoint:.1f}" for window in windows.values())
            say(f"pushes a CPU second without, at full speed, with rests: {said}; seconds of the checkpoints: {took}")
    without, full, rested = ([window.rate for window in arm] for arm in windows.values())
    report(
        "checkpoint_pace",
        {
            "pushes with rests / at full speed": Ratio(list(zip(rested, full, strict=True)), GAIN, "max"),
            "pushes with a checkpoint / without": Ratio(list(zip(full, without, strict=True)), COST, "min"),
        },
        options.output,
    )


if __name__ == "__main__":
    main()
