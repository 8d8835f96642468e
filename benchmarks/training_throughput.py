"""Samples/s of a DLRM: parameter servers and workers against the same model without them, on the same cores.

Ours is a whole `emberscale run` with 2 PS and 2 workers of one core each, on two cores: dynamic hash tables, dense
parameters synchronised, asynchronous workers, records read and parsed from Criteo-format text while training. Its rate
is that of the run's summary, over the whole time spent training.

The bound on staleness is 64 batches from the first one on (`stalenessWarmup: 0`). The default of jobs, 96, has workers
wait for each other more: the bound grows from 0, and only to 2 in all batches of 2048 of this data. `--warmup 96`
measures that.

The references (`reference_dlrm.py`) train on the same records, held in memory as tensors, ids replaced by row numbers,
and step rows by row-wise Adagrad, as ours does:

* one process of PyTorch with two threads, and two processes of one thread each that know nothing of each other;
* one process with two threads whose tables are FBGEMM's table-batched embeddings with fused row-wise Adagrad, which is
  what TorchRec runs on CPUs (`pip install '.[benchmarks]'`; left out where it is not installed).

They run in eager mode. With all but the tables compiled by `torch.compile`, they trained 0.84 to 1.08 times as fast, as
nine pairs on 28 November 2026 told.

With `--parity`, one more job of ours takes turns: it has 5 PS, which keep parity with `durability: Sync`.

With `--before`, the `emberscale` command of another checkout takes turns with this one.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import reference_dlrm
from emberscale_api.dataset import Split
from emberscale_api.job import parse_manifest
from emberscale_api.pictures import BLUE, GREY
from emberscale_api.readable import rate_text
from plain_torch import indexed, number_rows
from reference_dlrm import BOTTOM, DIMENSION, TOP
from reporting import Ratio, arguments, report, say
from whole_run import EMBERSCALE, manifest, run, synthesise

OURS, BEFORE = "Emberscale, 2 PS + 2 workers", "Emberscale before"
PROTECTED, PROTECTED_TARGET = "Emberscale with parity, 5 PS + 2 workers", 1.25
"""Of all references, the target of a job with parity is for FBGEMM."""
THREADS, PROCESSES, FBGEMM = "PyTorch, two threads", "PyTorch, two processes", "FBGEMM, two threads"
TARGETS = {
    2048: {THREADS: 1.15, PROCESSES: 0.9, FBGEMM: 1.4, BEFORE: 1.05},
    512: {THREADS: 1.0, PROCESSES: 1.0, FBGEMM: 1.4, BEFORE: 1.1},
}


def _cores() -> list[int]:
    """Returns the two cores that every contender gets on any machine."""
    return sorted(os.sched_getaffinity(0))[:2]


def reference(kind: str, records: Path, processes: int, threads: int, batch: int) -> float:
    """Measures the total samples/s of `processes` processes of a reference, started at once."""
    program = [sys.executable, "-W", "ignore", reference_dlrm.__file__, kind, str(records), str(threads), str(batch)]
    cores = _cores()
    started = []
    for number in range(processes):
        mine = cores if processes == 1 else [cores[number]]
        started.append(
            subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, mine)), *program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for process in started:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the reference {kind} did not start")
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return sum(float(process.communicate()[0]) for process in started)


def ours(
    data: Path, batch: int, warmup: int, command: str = EMBERSCALE, servers: int = 2, strategy: str = "Auto"
) -> dict[str, Any]:
    """Returns the summary of a whole run on the same records."""
    return run(
        manifest(
            "throughput",
            {
                "data": {"train": [str(data / "train-*.tsv")]},
                "model": {"embeddings": {"dimension": DIMENSION}, "bottomMlp": [*BOTTOM], "topMlp": [*TOP]},
                "training": {"batchSize": batch, "stalenessWarmup": warmup},
                "sharding": {"heartbeatInterval": "200ms"},  # the precision of the end of training
                "ps": {"replicas": servers, "resources": {"limits": {"cpu": 1}}},
                "worker": {"replicas": 2, "resources": {"limits": {"cpu": 1}}},
                "faultTolerance": {"strategy": strategy},
            },
        ),
        ["taskset", "-c", ",".join(map(str, _cores())), command],
    )


def prepare(folder: Path, samples: int) -> tuple[Path, Path]:
    """Writes Criteo-format text for ours, and the same records as arrays for the references; returns both paths."""
    data, records = folder / "data", folder / "records.npz"
    synthesise(data, samples, "--evaluation-fraction", "0")
    source = indexed(parse_manifest(manifest("records", {"data": {"train": [str(data / "train-*.tsv")]}})))
    batches = list(source.batches(Split.TRAINING, 0, 0, samples))
    labels, dense, ids = (
        np.concatenate([getattr(batch, column) for batch in batches]) for column in ("labels", "dense", "ids")
    )
    numbers, firsts = number_rows(ids)
    np.savez(records, labels=labels, dense=dense, ids=numbers, firsts=firsts)
    return data, records


def draw(path: Path, rates: dict[str, list[float]]) -> None:
    """Draws every run's rate, by contender."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axis = figure.subplots()
    for number, (label, values) in enumerate(rates.items()):
        axis.barh(number, np.median(values), color=BLUE if label.startswith("Emberscale") else GREY, alpha=0.6)
        axis.plot(values, [number] * len(values), "k.")
    axis.set_yticks(range(len(rates)), rates)
    axis.invert_yaxis()
    axis.set_xlabel("samples/s (median, and every run)")
    figure.savefig(path, dpi=120)


def measure(
    data: Path, records: Path, batch: int, warmup: int, before: str | None, has_parity: bool
) -> dict[str, float]:
    """Measures the samples/s of each contender once, by label."""
    summary = ours(data, batch, warmup)
    rates = {OURS: float(summary["samples_per_second"])}
    say(f"B = {batch}: stages {summary['stages']}")
    if before is not None:
        rates[BEFORE] = float(ours(data, batch, warmup, before)["samples_per_second"])
    if has_parity:
        protected = ours(data, batch, warmup, servers=5, strategy="ErasureCoding")
        rates[PROTECTED] = float(protected["samples_per_second"])
    rates[THREADS] = reference("plain", records, 1, 2, batch)
    rates[PROCESSES] = reference("plain", records, 2, 1, batch)
    if importlib.util.find_spec("fbgemm_gpu"):
        rates[FBGEMM] = reference("fbgemm", records, 1, 2, batch)
    return rates


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--batch-sizes", type=int, nargs="+", choices=TARGETS, default=[*TARGETS], help="only these")
    parser.add_argument("--warmup", type=int, default=0, metavar="BATCHES", help="stalenessWarmup of ours")
    parser.add_argument("--parity", action="store_true", help="also measure a job that keeps parity")
    parser.add_argument("--before", metavar="COMMAND", help="the emberscale command of another checkout")
    options = parser.parse_args()
    samples = 300_000 if options.quick else 1_000_000
    ratios: dict[str, Ratio] = {}
    drawn: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data, records = prepare(Path(folder), samples)
        say(f"{samples:,} records are written")
        for batch in options.batch_sizes:
            measured = []
            for pair in range(options.pairs):
                measured.append(measure(data, records, batch, options.warmup, options.before, options.parity))
                rates = ", ".join(f"{label} {rate_text(rate)}" for label, rate in measured[-1].items())
                say(f"B = {batch}, pair {pair}: {rates}")
            for label in measured[0]:
                drawn[f"{label}, B = {batch}"] = [rates[label] for rates in measured]
                if label == PROTECTED and FBGEMM in measured[0]:
                    pairs = [(rates[PROTECTED], rates[FBGEMM]) for rates in measured]
                    ratios[f"with parity / {FBGEMM}, B = {batch}"] = Ratio(pairs, PROTECTED_TARGET, "min")
                if label not in (OURS, PROTECTED):
                    pairs = [(rates[OURS], rates[label]) for rates in measured]
                    ratios[f"samples/s / {label}, B = {batch}"] = Ratio(pairs, TARGETS[batch][label], "min")
    if options.plot:
        draw(options.plot, drawn)
    report("training_throughput", ratios, options.output)


if __name__ == "__main__":
    main()
