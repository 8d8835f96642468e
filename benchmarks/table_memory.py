"""What an embedding row costs in memory, and how long growth keeps a pull waiting.

Each run fills one table (dimension 16, row-wise Adagrad) with 10 million rows in a process of its own, as a parameter
server does: pushes of new keys, and between them pulls of keys that are there. Memory is what the kernel says that the
process has gained (resident set), not what the table believes. The reference is key + weights + optimizer state + 16
bytes of index. What is timed is a push of new keys together with the pull after it: both take the same lock, so this is
how long a pull may have to wait for growth. On a machine with other work on its cores the longest wait is mostly the
time for which the process did not run; its processor time is told beside it.

Beside it, ids by Zipf's law are pushed into a table that keeps all rows, and into one with `minCount: 3` and `maxRows`
of 100,000, which is swept between the pushes as a server does it. How long a sweep takes is how long it holds the lock.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from matplotlib.figure import Figure

from emberscale_api.job import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    OptimizerType,
    TableSpec,
)
from emberscale_api.readable import bytes_text, duration_text
from emberscale_api.routing import BUCKETS
from emberscale_trainer.table import Eviction, TableStore
from reporting import Ratio, arguments, report, say

ROWS = 10_000_000
DIMENSION = 16
STEP = 4096
"""New keys per push: more than a batch of 2048 has for one of two servers."""

KEY_BYTES, STATE_BYTES, INDEX_BYTES = 8, 4, 16
REFERENCE = KEY_BYTES + 4 * DIMENSION + STATE_BYTES + INDEX_BYTES
LONGEST_PULL_SECONDS = 0.05
POINTS = 20

SKEWED_PUSHES = 3000
SKEW = 1.1
MIN_COUNT, MOST_ROWS = 3, 100_000
LONGEST_SWEEP_SECONDS = 0.005


def table(admission: AdmissionSpec | None = None, eviction: EvictionSpec | None = None) -> TableStore:
    """Returns an empty store of one table."""
    return TableStore(
        [
            TableSpec(
                number=0,
                name="ids",
                column=0,
                dimension=DIMENSION,
                optimizer=OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=0.01),
                initializer=InitializerSpec(),
                seed=1,
                admission=admission or AdmissionSpec(),
                eviction=eviction or EvictionSpec(),
            )
        ]
    )


def fill(seed: int) -> dict[str, list[float]]:
    """Fills a table; returns rows and gained bytes at POINTS moments, and seconds and CPU seconds of every step."""
    random = np.random.default_rng(seed)
    store = table()
    counts = np.array([STEP], np.uint32)
    gradients = np.full(STEP * DIMENSION, 0.01, np.float32)
    answer = np.empty_like(gradients)
    keys = random.integers(-(1 << 63), 1 << 63, ROWS // STEP * STEP, np.int64)
    resident = psutil.Process().memory_info
    before = resident().rss
    rows, gained, waits, processor = [], [], [], []
    for start in range(0, len(keys), STEP):
        new = keys[start : start + STEP]
        began, began_processor = time.perf_counter(), time.thread_time()
        store.push(counts, new, gradients)
        store.pull(counts, new, answer)
        processor.append(time.thread_time() - began_processor)
        waits.append(time.perf_counter() - began)
        if (start // STEP + 1) % (len(keys) // STEP // POINTS) == 0:
            rows.append(float(sum(store.rows().values())))
            gained.append(float(resident().rss - before))
    return {"rows": rows, "bytes": gained, "waits": waits, "processor": processor}


def train(seed: int, *, bounded: bool) -> dict[str, list[float]]:
    """Pushes skewed ids; returns the final rows and gained bytes, and the seconds of all pushes and sweeps."""
    random = np.random.default_rng(seed)
    store = table(AdmissionSpec(min_count=MIN_COUNT), EvictionSpec(max_rows=MOST_ROWS)) if bounded else table()
    eviction, owned = Eviction(store), np.ones(BUCKETS, np.bool_)
    gradients = np.full(STEP * DIMENSION, 0.01, np.float32)
    resident = psutil.Process().memory_info
    before = resident().rss
    pushes, sweeps = [], []
    for batch in range(SKEWED_PUSHES):
        keys = np.unique(np.minimum(random.zipf(SKEW, STEP), 1 << 62))
        store.clock = batch + 1
        began = time.perf_counter()
        store.push(np.array([len(keys)], np.uint32), keys, gradients[: len(keys) * DIMENSION])
        pushes.append(time.perf_counter() - began)
        for due in eviction.due(store.clock, owned):
            began = time.perf_counter()
            eviction.sweep(due)
            sweeps.append(time.perf_counter() - began)
    rows = float(sum(store.rows().values()))
    return {"rows": [rows], "bytes": [float(resident().rss - before)], "pushes": pushes, "sweeps": sweeps}


def in_a_process(seed: int, what: str = "--fill") -> dict[str, list[float]]:
    """Runs in a new process, so that memory that another run freed is not counted."""
    done = subprocess.run([sys.executable, __file__, what, str(seed)], stdout=subprocess.PIPE, check=True, text=True)
    filled: dict[str, list[float]] = json.loads(done.stdout)
    return filled


def draw(path: Path, runs: list[dict[str, list[float]]]) -> None:
    """Draws memory over rows, and the distribution of waits."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    memory, waits = figure.subplots(1, 2)
    for run in runs:
        memory.plot(np.array(run["rows"]) / 1e6, np.array(run["bytes"]) / np.array(run["rows"]))
        ordered = np.sort(run["waits"]) * 1e3
        waits.plot(ordered, 1 - np.arange(len(ordered)) / len(ordered))
    memory.axhline(1.3 * REFERENCE, linestyle="--", color="black", label=f"target {1.3 * REFERENCE:g}")
    memory.set(xlabel="million rows", ylabel="bytes a row (resident)")
    memory.set_ylim(bottom=0)
    memory.legend()
    waits.axvline(1e3 * LONGEST_PULL_SECONDS, linestyle="--", color="black", label="target")
    waits.set(xscale="log", yscale="log", xlabel="milliseconds of a push and a pull", ylabel="share that took longer")
    waits.legend()
    figure.suptitle(f"One table, dimension {DIMENSION}, row-wise Adagrad, filled to {ROWS:,} rows")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Fills tables and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--fill", type=int, metavar="SEED", help="fill one table in this process; prints JSON")
    parser.add_argument("--train", type=int, metavar="SEED", help="train all skewed ids in this process")
    parser.add_argument("--train-bounded", type=int, metavar="SEED", help="the same with admission and eviction")
    options = parser.parse_args()
    if options.fill is not None:
        print(json.dumps(fill(options.fill)))
        return
    if options.train is not None:
        print(json.dumps(train(options.train, bounded=False)))
        return
    if options.train_bounded is not None:
        print(json.dumps(train(options.train_bounded, bounded=True)))
        return
    runs = []
    for seed in range(5):
        runs.append(in_a_process(seed))
        waits, longest = np.array(runs[-1]["waits"]), max(runs[-1]["processor"])
        say(
            f"run {seed}: {runs[-1]['bytes'][-1] / runs[-1]['rows'][-1]:.1f} bytes a row at {ROWS:,} rows; "
            f"push and pull of {STEP:,} new rows: median {duration_text(float(np.median(waits)))}, "
            f"p99.9 {duration_text(float(np.quantile(waits, 0.999)))}, longest {duration_text(waits.max())} "
            f"(processor time {duration_text(longest)})"
        )
    skewed = [(in_a_process(seed, "--train"), in_a_process(seed, "--train-bounded")) for seed in range(3)]
    for seed, (whole, bounded) in enumerate(skewed):
        sweeps = np.array(bounded["sweeps"])
        say(
            f"skewed ids, run {seed}: {bounded['rows'][0]:,.0f} rows of {whole['rows'][0]:,.0f}, "
            f"{bytes_text(bounded['bytes'][0])} of {bytes_text(whole['bytes'][0])}; pushes "
            f"{duration_text(sum(bounded['pushes']))}, sweeps {duration_text(sweeps.sum())}, "
            f"without both {duration_text(sum(whole['pushes']))}; "
            f"{len(sweeps)} sweeps: median {duration_text(float(np.median(sweeps)))}, "
            f"longest {duration_text(sweeps.max())}"
        )
    if options.plot:
        draw(options.plot, runs)
    report(
        "table_memory",
        {
            "longest sweep of a bucket / 5 ms": Ratio(
                [(max(bounded["sweeps"]), LONGEST_SWEEP_SECONDS) for _, bounded in skewed], 1.0, "max"
            ),
            "pushes and sweeps with minCount and maxRows / pushes without": Ratio(
                [(sum(bounded["pushes"]) + sum(bounded["sweeps"]), sum(whole["pushes"])) for whole, bounded in skewed],
                1.5,
                "max",
            ),
            "bytes a row / (key + weights + state + 16)": Ratio(
                [(run["bytes"][-1] / run["rows"][-1], REFERENCE) for run in runs], 1.3, "max"
            ),
            "bytes a row at all rows / at a quarter of them": Ratio(
                [(run["bytes"][-1] / run["rows"][-1], run["bytes"][4] / run["rows"][4]) for run in runs], 1.1, "max"
            ),
            "longest pull during growth / 50 ms": Ratio(
                [(max(run["waits"]), LONGEST_PULL_SECONDS) for run in runs], 1.0, "max"
            ),
        },
        options.output,
    )


if __name__ == "__main__":
    main()
