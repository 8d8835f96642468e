"""What parity of parameter servers (PS) costs a job in CPU time, for each sample.

Whole runs of `emberscale run` train on synthetic records in turns, with `faultTolerance.strategy: ErasureCoding` and
without; its `durability` is that of `--durability`, and with `Both`, three runs take turns. Once a job has trained
`--warm` samples, and with parity once all rows are protected, the CPU time of its PS and workers is taken over the next
`--seconds`, and the samples trained meanwhile, which workers report every 200 ms. CPU time rather than rate: on cores
that others use, too, it says more. The bound on staleness is full from the first batch on (`stalenessWarmup: 0`), as in
most of a long job: workers and PS then hardly wait for each other, with parity or without. ECRM (section 4.3) finds an
overhead of 4.2%, asynchronous, on servers that had cores to spare; with `Sync`, a push is answered only once its
changes are stored, which counts.

`--baseline` adds jobs without parity whose workers send each gradient to two PS (`replicated_gradients.py`), as for
replication and, at the least, for the paper's gradient propagation, whose overhead it measured as 9.0% against 2.6%.

This is for one setting; `parity_sweep.py` measures and draws several.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from emberscale_api.readable import rate_text
from emberscale_trainer.data.population import Population
from emberscale_trainer.data.writers import criteo_lines
from hot_order import power_law
from replicated_gradients import REPLICATING
from reporting import Ratio, arguments, report, say
from whole_run import EMBERSCALE, RunningJob, manifest, synthesise

ROWS = 200_000
TARGET, ASYNC_TARGET = 1.08, 1.04
WITHOUT, WITH, ASYNC = "without parity", "with parity", "with parity, Async"
REPLICATED = "gradients to two servers"
DURABILITIES = {"Sync": (WITHOUT, WITH), "Async": (WITHOUT, ASYNC), "Both": (WITHOUT, WITH, ASYNC)}
"""The contenders, by option."""
ROLES = ("ps", "worker")

Used = dict[str, float]
"""The CPU microseconds of a sample, by role."""
Runs = dict[str, list[Used]]
"""All measurements of a setting, by contender, turn by turn: WITHOUT, and others."""


@dataclass(frozen=True)
class Setting:
    """What a pair of jobs has in common. `parity` is that of the job with parity.

    `skew` is the exponent of the power law of all ids, other than 1; with None, each column has the generator's own.
    """

    dimension: int = 16
    servers: int = 5
    batch_size: int = 2048
    workers: int = 1
    parity: int = 1
    skew: float | None = None


def job_of(data: Path, setting: Setting, contender: str) -> dict[str, Any]:
    """Returns the manifest of a job with or without parity."""
    durability = "Async" if contender == ASYNC else "Sync"
    coded = {"strategy": "ErasureCoding", "parity": setting.parity, "durability": durability}
    spec = {
        "data": {"train": [str(data / "train-*.tsv")]},
        "model": {"embeddings": {"dimension": setting.dimension}},
        "training": {"batchSize": setting.batch_size, "epochs": 1000, "stalenessWarmup": 0},
        "sharding": {"heartbeatInterval": "200ms"},
        "ps": {"replicas": setting.servers},
        "worker": {"replicas": setting.workers},
        "faultTolerance": coded if contender in (WITH, ASYNC) else {"strategy": "FullRecovery"},
        "checkpoint": {"interval": "1h", "flash": {"mode": "Disabled"}},
    }
    return manifest("parity", spec)


@dataclass(frozen=True)
class Reading:
    """The samples trained by a moment, in seconds on the monotonic clock, and the CPU seconds of each role."""

    at: float
    samples: int
    cpu_seconds: Used


def is_protected(run: Path, servers: int) -> bool:
    """Returns whether each PS of a run with parity has logged that its rows are protected."""
    logs = [run / "logs" / f"ps-{index}.log" for index in range(servers)]
    return all(log.exists() and "rows_protected" in log.read_text() for log in logs)


class MeasuredJob(RunningJob):
    """A job with or without parity."""

    def __init__(self, folder: Path, data: Path, setting: Setting, contender: str) -> None:
        emberscale = REPLICATING if contender == REPLICATED else (EMBERSCALE,)
        super().__init__(folder, job_of(data, setting, contender), emberscale=emberscale)

    def samples(self) -> int:
        """Returns the trained samples."""
        return self.latest()[1]

    def next_reading(self) -> Reading:
        """Waits until more samples are reported."""
        known = self.samples()
        self.expect(lambda: self.samples() > known)
        return Reading(time.monotonic(), self.samples(), self.cpu_seconds())

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU seconds of all processes so far, by role."""
        times = {role: [process.cpu_times() for process in self.members(role)] for role in ROLES}
        return {role: sum(one.user + one.system for one in found) for role, found in times.items()}


def measure(data: Path, setting: Setting, contender: str, warm: int, seconds: float) -> tuple[Used, float]:
    """Measures one job: its CPU time per sample, and its samples/s."""
    with tempfile.TemporaryDirectory() as folder:
        job = MeasuredJob(Path(folder), data, setting, contender)
        try:
            coded = contender in (WITH, ASYNC)
            job.expect(lambda: job.samples() >= warm and (not coded or is_protected(job.root, setting.servers)))
            first = job.next_reading()
            job.expect(lambda: time.monotonic() >= first.at + seconds)
            last = job.next_reading()
        finally:
            job.end()
    samples = last.samples - first.samples
    used = {role: (last.cpu_seconds[role] - first.cpu_seconds[role]) / samples * 1e6 for role in ROLES}
    return used, samples / (last.at - first.at)


def write_skewed(folder: Path, rows: int, exponent: float) -> None:
    """Writes synthetic records whose ids are of one power law in all columns; the labels do not depend on them."""
    folder.mkdir()
    records = Population(1).rows(0, rows)
    (folder / "train-00000.tsv").write_bytes(
        criteo_lines(records.labels, records.integers, power_law(rows, exponent, seed=1)).tobytes()
    )


def data_of(folder: Path, skew: float | None) -> Path:
    """Returns the records of this skew, and writes them before if they are not in the folder."""
    data = folder / ("synthetic" if skew is None else f"skew-{skew:g}")
    if data.exists():
        return data
    if skew is None:
        synthesise(data, ROWS, "--evaluation-fraction", "0")
    else:
        write_skewed(data, ROWS, skew)
    return data


def turns(
    settings: Sequence[Setting], pairs: int, contenders: Sequence[str] = (WITHOUT, WITH)
) -> Iterator[tuple[int, Setting, str]]:
    """Yields which job comes next: number of the pair, setting, contender.

    The jobs of a pair, or of a triple, follow each other, and in the opposite order the next time; all settings have a
    pair before any has another.
    """
    for pair in range(pairs):
        for setting in settings:
            for contender in contenders if pair % 2 == 0 else reversed(contenders):
                yield pair, setting, contender


def compare(
    labels: Mapping[Setting, str], options: argparse.Namespace, contenders: Sequence[str] = (WITHOUT, WITH)
) -> dict[Setting, Runs]:
    """Measures all pairs of each setting, and says under its label what comes out."""
    measured: dict[Setting, Runs] = {setting: {one: [] for one in contenders} for setting in labels}
    with tempfile.TemporaryDirectory() as folder:
        for pair, setting, contender in turns(list(labels), options.pairs, contenders):
            data = data_of(Path(folder), setting.skew)
            used, rate = measure(data, setting, contender, options.warm, options.seconds)
            measured[setting][contender].append(used)
            costs = ", ".join(f"{role} {used[role]:.1f} us" for role in ROLES)
            say(f"{labels[setting]}pair {pair}, {contender}: {costs}, {rate_text(rate)}")
    return measured


def totals(runs: Runs, contender: str = WITH) -> list[tuple[float, float]]:
    """Returns the CPU microseconds of a sample in all roles, pair by pair: with parity, and without."""
    return [
        (sum(ours.values()), sum(reference.values()))
        for ours, reference in zip(runs[contender], runs[WITHOUT], strict=True)
    ]


def draw(path: Path, runs: Runs) -> None:
    """Draws the CPU time per sample, by contender and role."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    bottoms = np.zeros(len(runs))
    for role in ROLES:
        heights = np.array([np.median([one[role] for one in used]) for used in runs.values()])
        axis.bar(list(runs), heights, bottom=bottoms, label=role)
        bottoms += heights
    for place, used in enumerate(runs.values()):
        axis.plot([place] * len(used), [sum(one.values()) for one in used], "k.")
    axis.set(ylabel="microseconds of CPU a sample")
    axis.legend()
    figure.savefig(path, dpi=120)


def parser_of(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of how much to measure, and of the setting."""
    parser = arguments(description)
    parser.add_argument("--pairs", type=int, help="5; with --quick, 2")
    parser.add_argument("--warm", type=int, help="samples that are trained before: 400,000; with --quick, 200,000")
    parser.add_argument("--seconds", type=float, help="for which CPU time is taken: 10; with --quick, 5")
    parser.add_argument("--ps", type=int, default=Setting.servers)
    parser.add_argument("--batch-size", type=int, default=Setting.batch_size)
    parser.add_argument("--parity", type=int, choices=[1, 2], default=Setting.parity)
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Setting]:
    """Returns the options, with their defaults, and the setting."""
    options = parser.parse_args()
    usual = (2, 200_000, 5.0) if options.quick else (5, 400_000, 10.0)
    for name, count in zip(("pairs", "warm", "seconds"), usual, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, count)
    return options, Setting(servers=options.ps, batch_size=options.batch_size, parity=options.parity)


def main() -> None:
    """Measures and reports."""
    parser = parser_of(__doc__)
    parser.add_argument("--durability", choices=DURABILITIES, default="Sync")
    parser.add_argument("--baseline", action="store_true", help="also measure gradients that go to two servers")
    options, setting = parse(parser)
    contenders = (*DURABILITIES[options.durability], *([REPLICATED] if options.baseline else []))
    runs = compare({setting: ""}, options, contenders)[setting]
    if options.plot:
        draw(options.plot, runs)
    targets = {WITH: TARGET, ASYNC: ASYNC_TARGET, REPLICATED: math.inf}
    ratios = {f"CPU a sample, {one} / without": Ratio(totals(runs, one), targets[one], "max") for one in contenders[1:]}
    report("parity", ratios, options.output)


if __name__ == "__main__":
    main()
