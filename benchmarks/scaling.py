"""Cost grows as work grows: the cost of a sample with more processes, and of a row with more rows.

A job of 1 worker + 1 parameter server, 2 + 2 and 4 + 4, on the same records. Cost is CPU seconds: samples trained for
each second that the kernel gave to the processes (utime + stime of /proc, of workers, servers, master and Redis), in a
window in which nothing but training happens.

On a machine with fewer cores than processes two things make a sample dearer: that the job has more processes, which is
asked here, and that processes take turns on a core and find its caches cold, which would be so for any processes. The
second is excluded by a control in the same round: as many jobs of 1 + 1 beside each other, which do the same work in
as many processes and share nothing. Smaller messages to more servers, one master for all of them, and waiting for each
other stay in. The cost against a single job of 1 + 1, with the oversubscription in it, is printed too.

A table of n rows, 2n and 4n: the growth of a fresh process's resident memory for each row, index and bookkeeping
included.
"""

import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

import numpy as np
import psutil
from matplotlib.figure import Figure

from emberscale._profiling.job_profile import Reading, difference, take_reading
from emberscale._profiling.measure import ProfileFailedError, train_until
from emberscale._run.interruption import Interruption
from emberscale_api import metrics
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec, TrainingJob, parse_manifest
from emberscale_api.job.status import JobPhase
from emberscale_api.pictures import BLUE, GREEN, GREY, ORANGE
from emberscale_operator.local.snapshot import RunView
from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset
from emberscale_trainer.table import TableStore
from reporting import Ratio, arguments, report, say

SHAPES = (1, 2, 4)
SCALES = (1, 2, 4)
RECORDS = 400_000
SAMPLES = 300_000
WARM_UP = 0.25
ROWS = 1_000_000
DIMENSION = 16
CHUNK = 1 << 16
TARGET_SPEED = 0.9
TARGET_MEMORY = 1.1


def job_of(data: Path, processes: int) -> TrainingJob:
    """Returns a DLRM job with `processes` workers and as many servers, of one core each."""
    role = {"replicas": processes, "resources": {"limits": {"cpu": 1}}}
    spec = {
        "data": {"train": [str(data / "train-*.tsv")]},
        "model": {"embeddings": {"dimension": DIMENSION}},
        "training": {"batchSize": 2048},
        "ps": role,
        "worker": role,
    }
    metadata = {"name": f"scaling-{processes}"}
    return parse_manifest(
        {"apiVersion": "emberscale.io/v1alpha1", "kind": "TrainingJob", "metadata": metadata, "spec": spec}
    )


class SharedWindow:
    """The time in which concurrent jobs are measured: from when all are warm until enough samples are trained."""

    def __init__(self, jobs: int, samples: int) -> None:
        self._lock = threading.Lock()
        self._samples = samples
        self._trained = [0] * jobs
        self._begun_at = 0
        self._before: list[Reading | None] = [None] * jobs
        self._after: list[Reading | None] = [None] * jobs
        self.cancelled = False

    def is_over(self, job: int, snapshot: RunView) -> bool:
        """Takes a job's own view, from the job's thread; returns whether the window is over."""
        status = snapshot.status
        if status is None or status.phase is not JobPhase.TRAINING:
            return self.cancelled
        with self._lock:
            self._trained[job] = status.samples
            trained = sum(self._trained)
            is_warm = min(self._trained) * len(self._trained) >= WARM_UP * self._samples
            begins = is_warm and self._before[job] is None
            ends = None not in self._before and trained >= self._begun_at + self._samples and self._after[job] is None
        if begins:
            reading = take_reading(snapshot)
            with self._lock:
                self._before[job] = reading
                self._begun_at = sum(self._trained)
        elif ends:
            self._after[job] = take_reading(snapshot)
        return self.cancelled or None not in self._after

    def samples_per_cpu_second(self) -> float:
        """Returns the samples per CPU second of all processes of all jobs."""
        samples, seconds = 0.0, 0.0
        for before, after in zip(self._before, self._after, strict=True):
            if before is None or after is None:
                raise ProfileFailedError("a job ended before it was measured")
            grown, cpu_seconds = difference(before, after)
            samples += grown["worker"][metrics.SAMPLES_TOTAL]
            seconds += sum(cpu_seconds.values())
        return samples / seconds


def samples_per_cpu_second(data: Path, jobs: int, processes: int, samples: int) -> float:
    """Measures the samples per CPU second of concurrent jobs, each with `processes` workers and as many servers."""
    window = SharedWindow(jobs, samples)
    with ThreadPoolExecutor(jobs) as threads:
        runs = [
            threads.submit(train_until, partial(window.is_over, number), job_of(data, processes), Interruption())
            for number in range(jobs)
        ]
        try:
            for run in as_completed(runs):
                run.result()
        except BaseException:
            window.cancelled = True
            raise
    return window.samples_per_cpu_second()


def bytes_per_row(rows: int) -> float:
    """Returns the growth of resident memory per row, in a new process that fills one table."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(send, np.float64(_filled(rows) / rows).tobytes())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as result:
        value = np.frombuffer(result.read(), np.float64)
    os.waitpid(child, 0)
    return float(value[0])


def _filled(rows: int) -> int:
    rule = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD)
    store = TableStore((TableSpec(0, "ids", 0, DIMENSION, rule, InitializerSpec(), seed=0),))
    gradients = np.ones(CHUNK * DIMENSION, np.float32)
    process = psutil.Process()
    before = process.memory_info().rss
    for start in range(0, rows, CHUNK):
        keys = np.arange(start, min(start + CHUNK, rows), dtype=np.int64)
        store.push(np.array([len(keys)], np.uint32), keys, gradients[: len(keys) * DIMENSION])
    return int(process.memory_info().rss - before)


def draw(
    path: Path, speeds: Sequence[Sequence[float]], controls: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]]
) -> None:
    """Draws every measurement, and the medians; the line of memory is perfectly proportional cost."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    speed, memory = figure.subplots(1, 2)
    for beside, shapes, colour, label in (
        (-0.12, controls, GREY, "as many jobs of 1 + 1 beside each other"),
        (0.12, speeds, BLUE, "one job"),
    ):
        for place, runs in enumerate(shapes):
            speed.plot([place + beside] * len(runs), runs, "o", color=colour, alpha=0.4)
            speed.hlines(np.median(runs), place + beside - 0.1, place + beside + 0.1, color=colour, linewidth=3)
        speed.plot([], [], "o", color=colour, label=label)
    for place, runs in enumerate(controls):
        target = TARGET_SPEED * float(np.median(runs))
        speed.hlines(target, place + 0.02, place + 0.22, color=ORANGE, linestyle="--")
    speed.plot([], [], "--", color=ORANGE, label="target: 90% of the jobs beside each other")
    speed.set_xticks(range(len(SHAPES)), [f"{count} + {count}" for count in SHAPES])
    speed.set(xlabel="workers + parameter servers", title="Samples for each CPU second")
    speed.set_ylim(bottom=0)
    speed.legend(loc="lower left")
    rows = [ROWS * scale / 1e6 for scale in SCALES]
    totals = [float(np.median(values)) * ROWS * scale / 2**20 for scale, values in zip(SCALES, sizes, strict=True)]
    memory.plot([0, rows[-1]], [0, totals[0] * SCALES[-1]], color=GREY, linewidth=1)
    memory.plot(rows, totals, "o", color=GREEN)
    for x, y, values in zip(rows, totals, sizes, strict=True):
        text = f"{np.median(values):.0f} bytes a row"
        memory.annotate(text, (x, y), xytext=(-8, 4), textcoords="offset points", ha="right")
    memory.set(xlabel="million rows", title="MiB of a table; the line is proportional")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Alternates the shapes and their controls, then the sizes."""
    options = arguments(__doc__).parse_args()
    repetitions = 5
    samples = SAMPLES // 3 if options.quick else SAMPLES
    sizes: list[list[float]] = [[] for _ in SCALES]
    for _ in range(repetitions):
        for number, scale in enumerate(SCALES):
            sizes[number].append(bytes_per_row(ROWS * scale))
    say("bytes a row: " + "   ".join(f"{s}x {np.median(v):.1f}" for s, v in zip(SCALES, sizes, strict=True)))
    speeds: list[list[float]] = [[] for _ in SHAPES]
    controls: list[list[float]] = [[] for _ in SHAPES]
    with tempfile.TemporaryDirectory(prefix="emberscale-scaling-") as folder:
        data = Path(folder, "data")
        write_dataset(data, DatasetSpec(RECORDS, 0, 1, 0.0), lambda _: None)
        for repetition in range(repetitions):
            for speed, control, count in zip(speeds, controls, SHAPES, strict=True):
                speed.append(samples_per_cpu_second(data, 1, count, samples))
                control.append(speed[-1] if count == 1 else samples_per_cpu_second(data, count, 1, samples))
            each = "   ".join(
                f"{count} + {count}: {speed[-1]:,.0f}" + (f" (control {control[-1]:,.0f})" if count > 1 else "")
                for count, speed, control in zip(SHAPES, speeds, controls, strict=True)
            )
            say(f"samples per CPU second, round {repetition + 1}: {each}")
    for count, speed in zip(SHAPES[1:], speeds[1:], strict=True):
        against = np.median(np.array(speed) / np.array(speeds[0]))
        say(f"oversubscription included, {count} + {count} reaches {against:.3f} of 1 + 1")
    if options.plot:
        draw(options.plot, speeds, controls, sizes)
    ratios = {
        f"samples per CPU second, {count}+{count} against {count} x 1+1": Ratio(
            list(zip(speed, control, strict=True)), TARGET_SPEED, "min"
        )
        for count, speed, control in zip(SHAPES[1:], speeds[1:], controls[1:], strict=True)
    }
    for scale, values in zip(SCALES[1:], sizes[1:], strict=True):
        pairs = list(zip(values, sizes[0], strict=True))
        ratios[f"bytes a row, {scale}x rows against 1x"] = Ratio(pairs, TARGET_MEMORY, "max")
    report("scaling", ratios, options.output)


if __name__ == "__main__":
    main()
