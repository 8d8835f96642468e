"""What it costs to move rows between parameter servers (PS) while training goes on, and to stop and restart instead.

A whole `emberscale run` with 2 PS and 2 workers trains on synthetic records. Its rows grow by training alone: one epoch
touches them all, and the dimension (Adagrad: as much optimizer state as weights) sets how many bytes they are. Then
`emberscale scale` asks for 3 PS and for 2, again and again:

* Barrier: for how long pushes were held, as the master measured it.
* Lost: the samples that the job trained less than at its steady rate, from the request until the rows have moved, with
  the start of the new process and the copying; over what it would have trained. The steady rate is the mean of the
  seconds before and after. The change of it that another number of PS brings counts for neither. No flash checkpoint is
  taken, since one under way would cost samples too.
* Copying: how many of those samples the CPU costs that the servers took beyond their steady rate, where all cores are
  busy. The rest goes to the command, to the master, and to waiting.
* Stop and restart: the same job is interrupted, which writes a checkpoint, and resumed with 3 PS, which read it. The
  time without a trained sample is compared with the barriers of the same job.

With `--sizes`, one job for each number of gigabytes, and the barriers over the size.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from matplotlib.figure import Figure

from emberscale_api.pictures import BLUE, ORANGE
from emberscale_api.readable import bytes_text, duration_text
from growing_job import SAMPLES, bytes_of, dimension_of, growing
from reporting import Ratio, arguments, report, say
from whole_run import EMBERSCALE, PATIENCE_SECONDS, RunningJob, manifest, synthesise

SIZES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
STEADY_SECONDS, LOOK_SECONDS = 8.0, 2.0
BARRIER_SECONDS, LOST, TIMES_LESS = 0.2, 0.05, 20.0


@dataclass(frozen=True)
class Moved:
    """One move: `barrier` and `seconds` in seconds, the copied `bytes`, `lost` as a share of the samples.

    `copying` is the share of samples that the cores would have trained in the CPU time that the move took the servers.
    """

    servers: int
    barrier: float
    seconds: float
    bytes: int
    rounds: int
    lost: float
    copying: float


class MigratingJob(RunningJob):
    """A job whose rows move."""

    def __init__(self, folder: Path, data: Path, dimension: int) -> None:
        job = manifest(
            "migration",
            {
                **growing(data, dimension),
                "ps": {"replicas": 2, "resources": {"limits": {"cpu": 1}}},
                "worker": {"replicas": 2, "resources": {"limits": {"cpu": 1}}},
                "checkpoint": {"interval": "1h", "flash": {"mode": "Disabled"}},
            },
        )
        super().__init__(folder, job)
        self._server_seconds: dict[int, float] = {}

    def rate(self) -> float:
        """Measures the samples/s over the next STEADY_SECONDS."""
        began, before, _ = self.latest()
        self.expect(lambda: self.latest()[0] >= began + STEADY_SECONDS)
        ended, after, _ = self.latest()
        return (after - before) / (ended - began)

    def server_seconds(self) -> float:
        """Returns the CPU seconds of all parameter servers so far, including those that have ended."""
        for process in self.members("ps"):
            with suppress(psutil.Error):
                used = process.cpu_times()
                self._server_seconds[process.pid] = used.user + used.system
        return sum(self._server_seconds.values())

    def moves(self) -> list[dict[str, float]]:
        """Returns the master's log entries of finished moves."""
        return [json.loads(line) for line in self.master_log() if '"event": "moved"' in line]

    def scale(self, servers: int) -> Moved:
        """Moves the rows to `servers` servers, and measures the move."""
        known, idle, since = len(self.moves()), self.server_seconds(), self.latest()[0]
        before = self.rate()
        began, first, _ = self.latest()
        used = self.server_seconds()
        command, patience = [EMBERSCALE, "scale", str(self.root), f"ps={servers}"], time.monotonic() + PATIENCE_SECONDS
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        while not self.wait(lambda: len(self.moves()) > known, LOOK_SECONDS):
            self.server_seconds()  # a server may end with the move
            if time.monotonic() > patience:
                raise RuntimeError(f"the rows do not move: see {self.root}/logs")
        told = self.latest()[0]
        self.expect(lambda: self.latest()[0] > told)
        ended, last, _ = self.latest()
        extra = self.server_seconds() - used - (used - idle) * (ended - began) / (began - since)
        steady = (before + self.rate()) / 2
        line = self.moves()[-1]
        return Moved(
            servers,
            line["held_seconds"],
            line["seconds"],
            int(line["bytes"]),
            int(line["rounds"]),
            1 - (last - first) / (steady * (ended - began)),
            extra / ((ended - began) * len(os.sched_getaffinity(0))),
        )

    def restart(self, servers: int) -> float:
        """Stops the job with a checkpoint, and resumes it on `servers` PS; returns the seconds without a new sample."""
        self._process.send_signal(signal.SIGINT)
        samples, at = self.latest()[1], time.monotonic()
        while self._process.poll() is None:
            if (now := self.latest()[1]) > samples:
                samples, at = now, time.monotonic()
            time.sleep(0.02)
        self._process = self._started("--resume", "--set", f"spec.ps.replicas={servers}")
        self.expect(lambda: self.latest()[1] > samples)
        return time.monotonic() - at


def grown(folder: Path, data: Path, size: float) -> MigratingJob:
    """Starts a job with `size` GB of rows; returns it once training has touched all of them."""
    dimension = dimension_of(size)
    training = MigratingJob(folder, data, dimension)
    training.expect(lambda: training.latest()[1] > SAMPLES)
    rows = training.latest()[2]
    say(f"{rows:,} rows of dimension {dimension}: {bytes_text(bytes_of(rows, dimension))}")
    return training


def measure(data: Path, size: float, moves: int, restarts: bool) -> tuple[list[Moved], float]:
    """Measures moves of a job of this size, 2 -> 3 -> 2 PS and so on, and the pause of a restart (0 without one)."""
    with tempfile.TemporaryDirectory() as folder:
        training = grown(Path(folder), data, size)
        try:
            moved = []
            for number in range(moves):
                moved.append(training.scale(3 - number % 2))
                one = moved[-1]
                say(
                    f"{size} GB to {one.servers} PS: {bytes_text(one.bytes)} in {one.rounds} rounds and "
                    f"{duration_text(one.seconds)}, pushes held {duration_text(one.barrier)}, "
                    f"{one.lost:.1%} of samples lost, {one.copying:.1%} to copying"
                )
            return moved, training.restart(3) if restarts else 0.0
        finally:
            training.end()


def draw(path: Path, sizes: dict[float, list[Moved]], restart: float) -> None:
    """Draws the barriers over the size, next to the restart."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    for size, moved in sizes.items():
        axis.plot([size] * len(moved), [1e3 * one.barrier for one in moved], "k.", alpha=0.5)
    medians = [1e3 * float(np.median([one.barrier for one in moved])) for moved in sizes.values()]
    axis.plot(list(sizes), medians, color=BLUE, label="live move: pushes held (median, and every move)")
    axis.axhline(1e3 * BARRIER_SECONDS, linestyle="--", color="black", label="target")
    axis.plot([1.0], [1e3 * restart], "s", color=ORANGE, label="stop and restart: no sample trained")
    axis.set(xscale="log", yscale="log", xlabel="GB of rows and optimizer state", ylabel="milliseconds")
    axis.legend()
    axis.set_title("2 -> 3 -> 2 parameter servers under full training load")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="where to keep the records; made if they are not there")
    parser.add_argument("--moves", type=int, default=0, help="how many at 1 GB; 0: 20, and 4 with --quick")
    parser.add_argument(
        "--sizes", action="store_true", help=f"also measure {', '.join(f'{one:g}' for one in SIZES)} GB"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or Path(folder) / "data"
        synthesise(data, SAMPLES, "--evaluation-fraction", "0")
        moved, restart = measure(data, 1.0, options.moves or (4 if options.quick else 20), restarts=True)
        say(f"stop and restart: {duration_text(restart)} without a sample")
        sizes = {1.0: moved}
        for size in SIZES if options.sizes else ():
            if size not in sizes:
                sizes[size] = measure(data, size, 4, restarts=False)[0]
    if options.plot:
        draw(options.plot, dict(sorted(sizes.items())), restart)
    barriers = [one.barrier for one in moved]
    medians = {size: float(np.median([one.barrier for one in some])) for size, some in sizes.items()}
    ratios = {
        "barrier p50 at 1 GB / 200 ms": Ratio([(float(np.median(barriers)), BARRIER_SECONDS)], 1.0, "max"),
        "barrier p99 at 1 GB / 200 ms": Ratio([(float(np.quantile(barriers, 0.99)), BARRIER_SECONDS)], 1.0, "max"),
        "samples lost over a move": Ratio([(one.lost, 1.0) for one in moved], LOST, "max"),
        "stop and restart / barrier": Ratio([(restart, one) for one in barriers], TIMES_LESS, "min"),
    }
    if len(sizes) > 1:
        largest, smallest = medians[max(sizes)], medians[min(sizes)]
        ratios[f"barrier at {max(sizes)} GB / at {min(sizes)} GB"] = Ratio([(largest, smallest)], 2.0, "max")
    report("migration", ratios, options.output)


if __name__ == "__main__":
    main()
