"""Rounds on rows that a worker pulls once (`hotEmbeddings`), against the same job without (`Disabled`).

Whole `emberscale run`s of the example model take turns, on the first two cores. Records are those of the synthetic
generator, whose power laws are assumptions, or have uniform ids: 26 columns of 100,000 ids each, which batches hardly
share. A run's rate is over its time of training. Bytes are those that its workers exchange with parameter servers. CPU
time is that of the whole run, with the start of its processes: a pair differs by some hundredths for no reason. So the
hundredth that `--mode Auto` may cost on uniform ids is that of the estimates, which is in the logs of the workers.

With two workers, rounds have no more batches than the bound on staleness admits, and the bound starts low
(`stalenessWarmup`). `--warmup 0` has the whole bound from the first batch on; both sides have the same warm-up.

`--link-mbit` gives every process a network namespace and a link of that bandwidth (root, `unshare`, `nsenter`, `ip` and
`tc`). Parameter servers then listen on TCP, as on a cluster, where they use Unix sockets otherwise; both sides do.
"""

import json
import resource
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import limited_links
from emberscale_api.job.model import Architecture
from emberscale_api.pictures import BLUE, GREY
from reporting import Ratio, arguments, report, say, standard_error
from whole_run import EMBERSCALE, manifest, run, synthesise

ENABLED, AUTO, DISABLED = "Enabled", "Auto", "Disabled"
SKEWED, UNIFORM = "skewed", "uniform"
UNIFORM_IDS = 100_000
SERVERS = 2
EVALUATION_ROWS = 100_000
ALLOWED_AUC = 0.0002


@dataclass(frozen=True)
class Run:
    """Figures of a run, per sample except `rate` (samples/s) and `length` (mean batches of a round).

    `estimate_seconds` of the `cpu_seconds` went into estimates of what rounds would save.
    """

    rate: float
    bytes: float
    cpu_seconds: float
    length: float
    estimate_seconds: float


@dataclass(frozen=True)
class Case:
    """What both runs of a pair train."""

    ids: str
    workers: int
    dimension: int
    batch: int

    def __str__(self) -> str:
        return f"{self.ids}, {self.workers} workers, dimension {self.dimension}, B = {self.batch}"


Costs = dict[Case, list[tuple[Run, Run]]]
"""Pairs of runs with rounds and without."""


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


def job(
    data: Path,
    mode: str,
    batch: int,
    workers: int,
    warmup: int | None,
    model: str = Architecture.DLRM,
    dimension: int = 16,
    **training: Any,
) -> dict[str, Any]:
    """Returns a job with hidden layers as in the example, on two parameter servers."""
    bound = {} if warmup is None else {"stalenessWarmup": warmup}
    held_out = data / "evaluation.tsv"
    evaluation = {"evaluation": [str(held_out)]} if held_out.exists() else {}
    return manifest(
        "hot-embeddings",
        {
            "data": {"train": [str(data / "train-*.tsv")], **evaluation},
            "model": {"architecture": str(model), "embeddings": {"dimension": dimension}},
            "training": {"batchSize": batch, **bound, **training},
            "hotEmbeddings": {"mode": mode},
            "sharding": {"heartbeatInterval": "200ms"},  # the precision of the end of training
            "ps": {"replicas": SERVERS},
            "worker": {"replicas": workers},
        },
    )


def measure(document: Mapping[str, Any], command: Sequence[str]) -> tuple[Run, dict[str, Any]]:
    """Runs a job; returns its figures, and its summary."""
    before = _cpu_seconds()
    estimates: list[float] = []
    summary = run(document, command, look=lambda folder: estimates.append(_estimate_seconds(folder)))
    traffic, samples = summary["traffic"], summary["samples"]
    length = traffic["round_batches"] / traffic["rounds"] if traffic["rounds"] else 1.0
    used = _cpu_seconds() - before
    rate, estimated = summary["samples_per_second"], sum(estimates) / samples
    return Run(rate, traffic["bytes"] / samples, used / samples, length, estimated), summary


def _estimate_seconds(folder: Path) -> float:
    """Returns the CPU time of all estimates of the workers of a run."""
    lines = (line for log in folder.glob("logs/worker-*.log") for line in log.read_text().splitlines())
    return sum(float(json.loads(line)["cpu_seconds"]) for line in lines if "rounds_estimated" in line)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def draw(path: Path, measured: Costs) -> None:
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
    axes[0].set_yticks(range(len(measured)), [str(case) for case in measured])
    axes[0].invert_yaxis()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="of timed runs; 0: compare only AUC")
    parser.add_argument("--samples", type=int, default=500_000)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 1])
    dimensions = "of the embeddings, in timed runs; those of FAE (table 2) have 16 for Criteo Kaggle, 64 for Terabyte"
    parser.add_argument("--dimensions", type=int, nargs="+", default=[16], help=dimensions)
    parser.add_argument("--ids", nargs="+", choices=[SKEWED, UNIFORM], default=[SKEWED, UNIFORM])
    parser.add_argument("--mode", choices=[ENABLED, AUTO], default=ENABLED, help="of the side with rounds")
    parser.add_argument("--warmup", type=int, metavar="BATCHES", help="stalenessWarmup of both sides; else its default")
    parser.add_argument("--link-mbit", type=int, metavar="MBIT", help="of the link of each process, either way")
    parser.add_argument("--seeds", type=int, default=3, help="of the comparison of AUC, on skewed ids; 0: leave it out")
    models = [str(model) for model in Architecture]
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="of the comparison of AUC")
    options = parser.parse_args()
    if options.link_mbit is not None and (lacking := limited_links.missing()):
        parser.error(f"--link-mbit needs {lacking}")
    samples, pairs = (200_000, 2) if options.quick else (options.samples, options.pairs)
    command = ["taskset", "-c", "0,1", EMBERSCALE]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as network:
        if options.link_mbit is not None:
            members = {"ps": SERVERS, "worker": max(options.workers)}
            linked = limited_links.limited_links(Path(folder), members, options.link_mbit)
            command[3:] = network.enter_context(linked)
        data = {ids: Path(folder, ids) for ids in options.ids}
        if SKEWED in data:
            synthesise(data[SKEWED], samples, "--evaluation-fraction", "0")
        if UNIFORM in data:
            write_uniform(data[UNIFORM], samples)
        measured = compare_costs(data, pairs, options, command)
        ratios = cost_ratios(measured, options)
        if options.seeds:
            ratios |= compare_quality(Path(folder, "quality"), samples, options, command)
    if options.plot:
        draw(options.plot, measured)
    report("hot_embeddings", ratios, options.output)


def compare_costs(data: Mapping[str, Path], pairs: int, options: Any, command: Sequence[str]) -> Costs:
    """Runs pairs of jobs with rounds and without."""
    measured: Costs = {}
    for *fields, pair in product(data, options.workers, options.dimensions, options.batch_sizes, range(pairs)):
        case = Case(*fields)
        of_both = (case.batch, case.workers, options.warmup, Architecture.DLRM, case.dimension)
        ours, without = (measure(job(data[case.ids], mode, *of_both), command)[0] for mode in (options.mode, DISABLED))
        measured.setdefault(case, []).append((ours, without))
        say(f"{case}, pair {pair}: {ours} against {without}")
    return measured


def cost_ratios(measured: Costs, options: Any) -> dict[str, Ratio]:
    """Compares what rounds cost and gain with the targets."""
    ratios: dict[str, Ratio] = {}
    faster = 1.3 if options.link_mbit is None else 1.5
    for case, pairs in measured.items():
        cpu = [(ours.cpu_seconds, one.cpu_seconds) for ours, one in pairs]
        if options.mode == AUTO and case.ids == UNIFORM:  # rounds save nothing here: the cost of finding out
            found = [(ours.estimate_seconds, ours.cpu_seconds) for ours, _ in pairs]
            ratios[f"CPU time of estimates: {case}"] = Ratio(found, 0.01, "max")
            ratios[f"CPU time: {case}"] = Ratio(cpu, 1.01, "max")
            continue
        ratios[f"samples/s: {case}"] = Ratio([(ours.rate, one.rate) for ours, one in pairs], faster, "min")
        ratios[f"bytes: {case}"] = Ratio([(ours.bytes, one.bytes) for ours, one in pairs], 0.33, "max")
        ratios[f"CPU time: {case}"] = Ratio(cpu, 1.0, "max")
    return ratios


def compare_quality(data: Path, samples: int, options: Any, command: Sequence[str]) -> dict[str, Ratio]:
    """Compares the loss of held-out AUC with rounds, as a mean over seeds, with the allowed one."""
    rows = samples + EVALUATION_ROWS
    synthesise(data, rows, "--evaluation-fraction", str(EVALUATION_ROWS / rows))
    found: dict[str, Ratio] = {}
    for model, workers, batch in product(options.models, options.workers, options.batch_sizes):
        label = f"{model}, {workers} workers, B = {batch}"
        differences = []
        for seed in range(options.seeds):
            ours, without = (
                float(measure(job(data, mode, batch, workers, options.warmup, model, seed=seed), command)[1]["auc"])
                for mode in (options.mode, DISABLED)
            )
            differences.append(without - ours)
            say(f"{label}, seed {seed}: AUC {ours:.5f} against {without:.5f}")
        say(f"{label}: AUC lost {mean(differences):.5f} +- {standard_error(differences):.5f} (standard error)")
        found[f"AUC lost / {ALLOWED_AUC:g}: {label}"] = Ratio([(mean(differences), ALLOWED_AUC)], 1.0, "max")
    return found


if __name__ == "__main__":
    main()
