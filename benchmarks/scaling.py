"""Cost grows as work grows: the cost of a sample with more processes, and of a row with more rows.

A job of 1 worker + 1 parameter server, 2 + 2 and 4 + 4, on the same records. On a machine with fewer cores than that
the processes take turns, so that wall time would say how many cores there are. Oversubscription is excluded by counting
not seconds but CPU seconds: samples trained for each second that the kernel gave to the job's processes (utime + stime
of /proc, of workers, servers, master and Redis), in a window in which nothing but training happens. What more processes
cost, such as smaller messages to more servers, colder caches and switches between processes, stays in.

A table of n rows, 2n and 4n: the growth of a fresh process's resident memory for each row, index and bookkeeping
included.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import psutil

from emberscale.interruption import Interruption
from emberscale.profiling.measure import measure_job
from emberscale.profiling.reading import difference
from emberscale_api import metrics
from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec, TrainingJob, parse_manifest
from emberscale_trainer.data.synthetic import DatasetSpec, write_dataset
from emberscale_trainer.table import TableStore
from reporting import Ratio, arguments, report, say

SHAPES = (1, 2, 4)
SCALES = (1, 2, 4)
RECORDS = 400_000
SAMPLES = 300_000
ROWS = 1_000_000
DIMENSION = 16
CHUNK = 1 << 16
TARGET_SPEED = 0.9
TARGET_MEMORY = 1.1


def job_of(data: Path, processes: int) -> TrainingJob:
    """A DLRM with so many workers, and as many servers, of one core each."""
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


def samples_per_cpu_second(data: Path, processes: int, samples: int) -> float:
    """Of all processes of the job together, once it is warm."""
    with Interruption() as interruption:
        before, after = measure_job(job_of(data, processes), samples, interruption, lambda *_: None)
    grown, cpu_seconds = difference(before, after)
    return grown["worker"][metrics.SAMPLES_TOTAL] / sum(cpu_seconds.values())


def bytes_per_row(rows: int) -> float:
    """Growth of the resident memory of a process of its own that fills one table."""
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


def draw(path: Path, speeds: Sequence[Sequence[float]], sizes: Sequence[Sequence[float]]) -> None:
    """Every measurement, and the medians; the lines are what perfectly proportional cost would be."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (speed, memory) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    speed.axhline(float(np.median(speeds[0])), color="#8a8f98", linewidth=1)
    speed.axhline(TARGET_SPEED * float(np.median(speeds[0])), color="#d9722e", linewidth=1, linestyle="--")
    for place, values in enumerate(speeds):
        speed.plot([place] * len(values), values, "o", color="#2f6db5", alpha=0.4)
        speed.plot([place], [np.median(values)], "_", color="#2f6db5", markersize=40, markeredgewidth=3)
    speed.set_xticks(range(len(SHAPES)), [f"{count} + {count}" for count in SHAPES])
    speed.set_xlabel("workers + parameter servers")
    speed.set_title("Samples for each CPU second of the job; dashed: the target")
    speed.set_ylim(bottom=0)
    rows = [ROWS * scale / 1e6 for scale in SCALES]
    totals = [float(np.median(values)) * ROWS * scale / 2**20 for scale, values in zip(SCALES, sizes, strict=True)]
    memory.plot([0, rows[-1]], [0, totals[0] * SCALES[-1]], color="#8a8f98", linewidth=1)
    memory.plot(rows, totals, "o", color="#3a8f5c")
    for x, y, values in zip(rows, totals, sizes, strict=True):
        text = f"{np.median(values):.0f} bytes a row"
        memory.annotate(text, (x, y), xytext=(-8, 4), textcoords="offset points", ha="right")
    memory.set_xlabel("million rows")
    memory.set_title("MiB of a table; the line is proportional")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Alternates the shapes, then the sizes, and reports both against the smallest."""
    options = arguments(__doc__).parse_args()
    repetitions = 5
    samples = SAMPLES // 3 if options.quick else SAMPLES
    sizes: list[list[float]] = [[] for _ in SCALES]
    for _ in range(repetitions):
        for number, scale in enumerate(SCALES):
            sizes[number].append(bytes_per_row(ROWS * scale))
    say("bytes a row: " + "   ".join(f"{s}x {np.median(v):.1f}" for s, v in zip(SCALES, sizes, strict=True)))
    speeds: list[list[float]] = [[] for _ in SHAPES]
    with tempfile.TemporaryDirectory(prefix="emberscale-scaling-") as folder:
        write_dataset(Path(folder, "data"), DatasetSpec(RECORDS, 0, 1, 0.0), lambda _: None)
        for repetition in range(repetitions):
            for number, processes in enumerate(SHAPES):
                speeds[number].append(samples_per_cpu_second(Path(folder, "data"), processes, samples))
            last = "   ".join(f"{n} + {n}: {v[-1]:,.0f}" for n, v in zip(SHAPES, speeds, strict=True))
            say(f"samples per CPU second, round {repetition + 1}: {last}")
    if options.plot:
        draw(options.plot, speeds, sizes)
    ratios = {
        f"samples per CPU second, {count}+{count} against 1+1": Ratio(
            list(zip(values, speeds[0], strict=True)), TARGET_SPEED, "min"
        )
        for count, values in zip(SHAPES[1:], speeds[1:], strict=True)
    }
    for scale, values in zip(SCALES[1:], sizes[1:], strict=True):
        pairs = list(zip(values, sizes[0], strict=True))
        ratios[f"bytes a row, {scale}x rows against 1x"] = Ratio(pairs, TARGET_MEMORY, "max")
    report("scaling", ratios, options.output)


if __name__ == "__main__":
    main()
