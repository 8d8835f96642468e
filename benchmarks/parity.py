"""What parity of parameter servers (PS) costs a job in CPU time, for each sample.

Whole runs of `emberscale run` train on synthetic records in turns, with `faultTolerance.strategy: ErasureCoding` and
without. Once a job has trained `--warm` samples, and with parity once all rows are protected, the CPU time of its PS
and workers is taken until it has trained so many more. CPU time rather than rate: on cores that others use, too, it
says more. ECRM (section 4.3) finds an overhead of 4.2%, asynchronous, on servers that had cores to spare; here a push
is answered only once its changes are stored, which counts.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
from matplotlib.figure import Figure

from reporting import Ratio, arguments, report, say
from whole_run import RunningJob, manifest, synthesise

ROWS = 200_000
TARGET = 1.08
WITHOUT, WITH = "without parity", "with parity"
STRATEGIES = {WITHOUT: "FullRecovery", WITH: "ErasureCoding"}
ROLES = ("ps", "worker")


class MeasuredJob(RunningJob):
    """A job with or without parity."""

    def __init__(self, folder: Path, data: Path, contender: str, batch_size: int, servers: int) -> None:
        spec = {
            "data": {"train": [str(data / "train-*.tsv")]},
            "training": {"batchSize": batch_size, "epochs": 1000},
            "ps": {"replicas": servers},
            "worker": {"replicas": 1},
            "faultTolerance": {"strategy": STRATEGIES[contender]},
            "checkpoint": {"interval": "1h", "flash": {"mode": "Disabled"}},
        }
        super().__init__(folder, manifest("parity", spec))
        self._servers = servers
        self._protects = contender == WITH

    def samples(self) -> int:
        """Returns the trained samples."""
        return self.latest()[1]

    def is_protected(self) -> bool:
        """Whether each PS has logged that its rows are protected; true without parity."""
        logs = [self.root / "logs" / f"ps-{index}.log" for index in range(self._servers)]
        return not self._protects or all(log.exists() and "rows_protected" in log.read_text() for log in logs)

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the CPU seconds of all processes so far, by role."""
        used = dict.fromkeys(ROLES, 0.0)
        for process in psutil.Process(self._process.pid).children(recursive=True):
            title = " ".join(process.cmdline())
            for role in ROLES:
                if title.startswith(f"emberscale-{role} "):
                    times = process.cpu_times()
                    used[role] += times.user + times.system
        return used


def measure(data: Path, contender: str, batch_size: int, servers: int, warm: int, samples: int) -> dict[str, float]:
    """Measures the CPU microseconds per sample, by role."""
    with tempfile.TemporaryDirectory() as folder:
        job = MeasuredJob(Path(folder), data, contender, batch_size, servers)
        try:
            job.expect(lambda: job.samples() >= warm and job.is_protected())
            first, before = job.samples(), job.cpu_seconds()
            job.expect(lambda: job.samples() >= first + samples)
            last, after = job.samples(), job.cpu_seconds()
        finally:
            job.end()
    return {role: (after[role] - before[role]) / (last - first) * 1e6 for role in ROLES}


def draw(path: Path, measured: Mapping[str, list[dict[str, float]]]) -> None:
    """Draws the CPU time per sample, by contender and role."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    bottoms = np.zeros(len(measured))
    for role in ROLES:
        heights = np.array([np.median([one[role] for one in runs]) for runs in measured.values()])
        axis.bar(list(measured), heights, bottom=bottoms, label=role)
        bottoms += heights
    for place, runs in enumerate(measured.values()):
        axis.plot([place] * len(runs), [sum(one.values()) for one in runs], "k.")
    axis.set(ylabel="microseconds of CPU a sample")
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ps", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=400_000, help="samples that are trained before")
    parser.add_argument("--samples", type=int, default=400_000, help="samples over which CPU time is taken")
    options = parser.parse_args()
    if options.quick:
        options.pairs, options.warm, options.samples = 2, 50_000, 100_000
    measured: dict[str, list[dict[str, float]]] = {WITHOUT: [], WITH: []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        synthesise(data, ROWS, "--evaluation-fraction", "0")
        for pair in range(options.pairs):
            for contender in (WITHOUT, WITH) if pair % 2 == 0 else (WITH, WITHOUT):
                used = measure(data, contender, options.batch_size, options.ps, options.warm, options.samples)
                measured[contender].append(used)
                say(f"pair {pair}, {contender}: " + ", ".join(f"{role} {used[role]:.1f} us" for role in ROLES))
    if options.plot:
        draw(options.plot, measured)
    pairs = [
        (sum(ours.values()), sum(reference.values()))
        for ours, reference in zip(measured[WITH], measured[WITHOUT], strict=True)
    ]
    report("parity", {"CPU a sample, with parity / without": Ratio(pairs, TARGET, "max")}, options.output)


if __name__ == "__main__":
    main()
