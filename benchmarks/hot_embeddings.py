"""Rounds on rows that a worker pulls once (`hotEmbeddings`), against the same job without (`Disabled`).

Whole `emberscale run`s of the example model take turns, on the first two cores. Records are those of the synthetic
generator, whose power laws are assumptions, or have uniform ids: 26 columns of 100,000 ids each, which batches hardly
share. A run's rate is over its time of training. Bytes are those that its workers exchange with parameter servers. CPU
time is that of the whole run, with the start of its processes: a pair differs by some hundredths for no reason, so the
hundredth that `--mode Auto` may cost on uniform ids takes tens of pairs to be shown.

With two workers, rounds have no more batches than the bound on staleness admits, and the bound starts low
(`stalenessWarmup`). `--warmup 0` has the whole bound from the first batch on; both sides have the same warm-up.

`--lo-mbit` holds the loopback of a network namespace to a bandwidth (root, `unshare`, `ip` and `tc`), and has parameter
servers listen on TCP: that is what all processes send together, not what a link of each machine carries.
"""

import resource
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from emberscale_api.pictures import BLUE, GREY
from over_tcp import OVER_TCP
from reporting import Ratio, arguments, report, say
from whole_run import EMBERSCALE, manifest, run, synthesise

ENABLED, AUTO, DISABLED = "Enabled", "Auto", "Disabled"
SKEWED, UNIFORM = "skewed", "uniform"
UNIFORM_IDS = 100_000
EVALUATION_ROWS = 100_000
ALLOWED_AUC = 0.0002


@dataclass(frozen=True)
class Run:
    """Figures of a run, per sample except `rate` (samples/s) and `length` (mean batches of a round)."""

    rate: float
    bytes: float
    cpu_seconds: float
    length: float


def write_uniform(folder: Path, rows: int) -> None:
    """Writes Criteo-format text with uniform ids, and labels that depend on the numbers."""
    folder.mkdir()
    random = np.random.default_rng(1)
    with (folder / "train-00000.tsv").open("w") as file:
        for first in range(0, rows, 10_000):
            count = min(10_000, rows - first)
            numbers = random.integers(0, 100, (count, 13))
            ids = random.integers(0, UNIFORM_IDS, (count, 26))
            labels = (numbers[:, 0] + random.integers(0, 100, count) > 130).astype(int)
            for label, dense, sparse in zip(labels.tolist(), numbers.tolist(), ids.tolist(), strict=True):
                fields = [str(label), *map(str, dense), *(f"{one:08x}" for one in sparse)]
                file.write("\t".join(fields) + "\n")


def job(data: Path, mode: str, batch: int, workers: int, warmup: int | None, **training: Any) -> dict[str, Any]:
    """Returns a job with the example model on two parameter servers."""
    bound = {} if warmup is None else {"stalenessWarmup": warmup}
    held_out = data / "evaluation.tsv"
    evaluation = {"evaluation": [str(held_out)]} if held_out.exists() else {}
    return manifest(
        "hot-embeddings",
        {
            "data": {"train": [str(data / "train-*.tsv")], **evaluation},
            "training": {"batchSize": batch, **bound, **training},
            "hotEmbeddings": {"mode": mode},
            "sharding": {"heartbeatInterval": "200ms"},  # the precision of the end of training
            "ps": {"replicas": 2},
            "worker": {"replicas": workers},
        },
    )


def measure(document: Mapping[str, Any], command: Sequence[str]) -> tuple[Run, dict[str, Any]]:
    """Runs a job; returns its figures, and its summary."""
    before = _cpu_seconds()
    summary = run(document, command)
    traffic, samples = summary["traffic"], summary["samples"]
    length = traffic["round_batches"] / traffic["rounds"] if traffic["rounds"] else 1.0
    used = _cpu_seconds() - before
    return Run(summary["samples_per_second"], traffic["bytes"] / samples, used / samples, length), summary


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _command(mbit: int | None) -> list[str]:
    pinned = ["taskset", "-c", "0,1"]
    if mbit is None:
        return [*pinned, EMBERSCALE]
    held = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 256kb latency 50ms"
    return ["unshare", "--net", "sh", "-ec", f'ip link set lo up; {held}; exec "$@"', "sh", *pinned, *OVER_TCP]


def draw(path: Path, measured: Mapping[str, Sequence[tuple[Run, Run]]]) -> None:
    """Draws the figures with rounds relative to without: every pair and the medians."""
    figure = Figure(figsize=(13, 1.5 + 0.5 * len(measured)), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for axis, figures in zip(axes, ("rate", "bytes", "cpu_seconds"), strict=True):
        for place, pairs in enumerate(measured.values()):
            ratios = [getattr(ours, figures) / getattr(without, figures) for ours, without in pairs]
            axis.barh(place, median(ratios), color=BLUE, alpha=0.6)
            axis.plot(ratios, [place] * len(ratios), "k.")
        axis.axvline(1.0, color=GREY, linestyle="--")
    for axis, title in zip(axes, ("samples/s", "bytes a sample", "CPU time a sample"), strict=True):
        axis.set_xlabel(f"{title}, relative to without rounds")
    axes[0].set_yticks(range(len(measured)), list(measured))
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=500_000)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--ids", nargs="+", choices=[SKEWED, UNIFORM], default=[SKEWED, UNIFORM])
    parser.add_argument("--mode", choices=[ENABLED, AUTO], default=ENABLED, help="of the side with rounds")
    parser.add_argument("--warmup", type=int, metavar="BATCHES", help="stalenessWarmup of both sides; else its default")
    parser.add_argument("--lo-mbit", type=int, metavar="MBIT", help="what all processes may send together, a second")
    parser.add_argument("--seeds", type=int, default=3, help="of the comparison of AUC, on skewed ids; 0: leave it out")
    options = parser.parse_args()
    if options.lo_mbit is not None and not all(map(shutil.which, ("unshare", "ip", "tc"))):
        parser.error("--lo-mbit needs unshare, ip and tc")
    samples, pairs = (200_000, 2) if options.quick else (options.samples, options.pairs)
    command = _command(options.lo_mbit)
    measured: dict[str, list[tuple[Run, Run]]] = {}
    ratios: dict[str, Ratio] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = {ids: Path(folder, ids) for ids in options.ids}
        if SKEWED in data:
            synthesise(data[SKEWED], samples, "--evaluation-fraction", "0")
        if UNIFORM in data:
            write_uniform(data[UNIFORM], samples)
        cases = [(ids, workers, batch) for ids in data for workers in options.workers for batch in options.batch_sizes]
        for ids, workers, batch in cases:
            label = f"{ids}, {workers} workers, B = {batch}"
            for pair in range(pairs):
                ours, without = (
                    measure(job(data[ids], mode, batch, workers, options.warmup), command)[0]
                    for mode in (options.mode, DISABLED)
                )
                measured.setdefault(label, []).append((ours, without))
                say(f"{label}, pair {pair}: {ours} against {without}")
            together = measured[label]
            cpu = [(ours.cpu_seconds, one.cpu_seconds) for ours, one in together]
            if options.mode == AUTO and ids == UNIFORM:  # rounds save nothing here: the cost of finding out
                ratios[f"CPU time: {label}"] = Ratio(cpu, 1.01, "max")
                continue
            ratios[f"samples/s: {label}"] = Ratio([(ours.rate, one.rate) for ours, one in together], 1.3, "min")
            ratios[f"bytes: {label}"] = Ratio([(ours.bytes, one.bytes) for ours, one in together], 0.33, "max")
            ratios[f"CPU time: {label}"] = Ratio(cpu, 1.0, "max")
        if options.seeds:
            ratios |= compare_quality(Path(folder, "quality"), samples, options, command)
    if options.plot:
        draw(options.plot, measured)
    report("hot_embeddings", ratios, options.output)


def compare_quality(data: Path, samples: int, options: Any, command: Sequence[str]) -> dict[str, Ratio]:
    """Compares the loss of held-out AUC with rounds, as a mean over seeds, with the allowed one."""
    rows = samples + EVALUATION_ROWS
    synthesise(data, rows, "--evaluation-fraction", str(EVALUATION_ROWS / rows))
    found: dict[str, Ratio] = {}
    for workers in options.workers:
        for batch in options.batch_sizes:
            differences = []
            for seed in range(options.seeds):
                ours, without = (
                    float(measure(job(data, mode, batch, workers, options.warmup, seed=seed), command)[1]["auc"])
                    for mode in (options.mode, DISABLED)
                )
                differences.append(without - ours)
                say(f"{workers} workers, B = {batch}, seed {seed}: AUC {ours:.5f} against {without:.5f}")
            label = f"AUC lost / {ALLOWED_AUC:g}: {workers} workers, B = {batch}"
            found[label] = Ratio([(mean(differences), ALLOWED_AUC)], 1.0, "max")
    return found


if __name__ == "__main__":
    main()
