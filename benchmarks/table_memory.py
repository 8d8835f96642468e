"""What an embedding row costs in memory, and how long growth keeps a pull waiting.

Each run fills one table (dimension 16, row-wise Adagrad) with 10 million rows in a process of its own, as a parameter
server does: pushes of new keys, and between them pulls of keys that are there. Memory is what the kernel says that the
process has gained (resident set), not what the table believes. The reference is key + weights + optimizer state + 16
bytes of index. What is timed is a push of new keys together with the pull after it: both take the same lock, so this is
how long a pull may have to wait for growth. On a machine with other work on its cores the longest wait is mostly the
time for which the process did not run; its processor time is told beside it.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import matplotlib as mpl
import numpy as np
import psutil

from emberscale_api.job import InitializerSpec, OptimizerSpec, OptimizerType, TableSpec
from emberscale_trainer.table import TableStore
from reporting import Ratio, arguments, report, say

ROWS = 10_000_000
DIMENSION = 16
STEP = 4096
"""New keys a push: more than a batch of 2048 brings to one of two servers."""

KEY_BYTES, STATE_BYTES, INDEX_BYTES = 8, 4, 16
REFERENCE = KEY_BYTES + 4 * DIMENSION + STATE_BYTES + INDEX_BYTES
LONGEST_PULL_SECONDS = 0.05
POINTS = 20


def table() -> TableStore:
    """An empty store of one table."""
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
            )
        ]
    )


def fill(seed: int) -> dict[str, list[float]]:
    """Fills a table; returns rows, gained bytes and pull seconds at POINTS moments, and every step's seconds."""
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


def in_a_process(seed: int) -> dict[str, list[float]]:
    """`fill` in a new process, so that memory which another run has freed is not counted."""
    done = subprocess.run(
        [sys.executable, __file__, "--fill", str(seed)], stdout=subprocess.PIPE, check=True, text=True
    )
    filled: dict[str, list[float]] = json.loads(done.stdout)
    return filled


def draw(path: Path, runs: list[dict[str, list[float]]]) -> None:
    """Memory over rows, and the distribution of waits."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (memory, waits) = plt.subplots(1, 2, figsize=(12, 4))
    for run in runs:
        memory.plot(np.array(run["rows"]) / 1e6, np.array(run["bytes"]) / np.array(run["rows"]))
        ordered = np.sort(run["waits"]) * 1e3
        waits.plot(ordered, 1 - np.arange(len(ordered)) / len(ordered))
    memory.axhline(1.3 * REFERENCE, linestyle="--", color="black", label=f"target {1.3 * REFERENCE:g}")
    memory.set_xlabel("million rows")
    memory.set_ylabel("bytes a row (resident)")
    memory.set_ylim(bottom=0)
    memory.legend()
    waits.axvline(1e3 * LONGEST_PULL_SECONDS, linestyle="--", color="black", label="target")
    waits.set_xscale("log")
    waits.set_yscale("log")
    waits.set_xlabel("milliseconds of a push and a pull")
    waits.set_ylabel("share that took longer")
    waits.legend()
    figure.suptitle(f"One table, dimension {DIMENSION}, row-wise Adagrad, filled to {ROWS:,} rows")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Fills tables and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--fill", type=int, metavar="SEED", help="fill one table in this process; prints JSON")
    options = parser.parse_args()
    if options.fill is not None:
        print(json.dumps(fill(options.fill)))
        return
    runs = []
    for seed in range(5):
        runs.append(in_a_process(seed))
        waits, longest = np.array(runs[-1]["waits"]), max(runs[-1]["processor"])
        say(
            f"run {seed}: {runs[-1]['bytes'][-1] / runs[-1]['rows'][-1]:.1f} bytes a row at {ROWS:,} rows; "
            f"push and pull of {STEP:,} new rows: median {1e3 * np.median(waits):.2f} ms, "
            f"p99.9 {1e3 * np.quantile(waits, 0.999):.2f} ms, longest {1e3 * waits.max():.2f} ms "
            f"(processor time {1e3 * longest:.2f} ms)"
        )
    if options.plot:
        draw(options.plot, runs)
    report(
        "table_memory",
        {
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
