"""What a worker, or a parameter server (PS), that is left with 3% of a core does to a job's completion time.

A whole `emberscale run` trains on synthetic records. Once it has trained a while, one process is held to 3% of a core
by a cgroup (where none may be made: by SIGSTOP and SIGCONT). Completion time is from then until the job has trained
so many samples more. Contenders, in turns:

* On: the product as it is.
* None: a master that finds nobody slow and makes all shards alike (`without_intervention/`).
* Restart: such a master, and after as long as the product takes to find the member, the job is interrupted, which
  writes a checkpoint, and resumed, with fresh processes.

As in DLRover-RM section 6.2 the process is slow, not its machine: one that replaces it is not held back. The paper's
pods take minutes to start and its checkpoints minutes to write, here both take seconds, so a restart costs less here.
The longer the job, the closer each ratio comes to that of the rates: a job that lasts only seconds gains nothing from
a member that is found after ten. A contender that is not done after `--cap` seconds is extrapolated from its rate over
their second half, which is said beside it.
"""

import json
import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from emberscale_api.pictures import BLUE, CRIMSON, ORANGE
from emberscale_api.readable import duration_text, rate_text
from reporting import Ratio, arguments, report, say
from throttle import Throttle
from whole_run import PATIENCE_SECONDS, RunningJob, manifest, processes_of, synthesise

SHARE = 0.03
ROWS = 200_000
WARM_SAMPLES = 4_000_000
"""Enough for a first flash checkpoint."""
ON, NONE, RESTART = "intervention", "none", "stop and restart"
PAPER = {"worker": {NONE: 0.485, RESTART: 0.37}, "ps": {NONE: 0.364, RESTART: 0.276}}
"""The reductions of completion time by DLRover-RM: figure 13 (straggler) and figure 12 (hot PS)."""

INTERVENTIONS = (
    "member_is_slow",
    "slow_member_is_replaced",
    "server_is_relieved",
    "server_is_replaced",
    "server_is_tried",
    "routing_assigned",
    "moved",
    "operation_recovered",
)
OFF = str(Path(__file__).with_name("without_intervention"))


class SlowedJob(RunningJob):
    """A job with a process that becomes slow."""

    def __init__(self, folder: Path, data: Path, role: str, intervenes: bool) -> None:
        job = manifest(
            f"slow-{role}",
            {
                "data": {"train": [str(data / "train-*.tsv")]},
                "training": {"batchSize": 1024, "epochs": 10_000},
                "ps": {"replicas": 3 if role == "ps" else 2},
                "worker": {"replicas": 3 if role == "worker" else 2},
                "checkpoint": {"interval": "1h"},
            },
        )
        super().__init__(folder, job, None if intervenes else {**os.environ, "PYTHONPATH": OFF})

    def samples(self) -> int:
        """Returns the trained samples, by the newest row of the metrics."""
        return self.latest()[1]

    def pid(self, role: str, index: int) -> int:
        """Returns the process id of a member."""
        wanted = f"emberscale-{role} {index}"
        return next(process.pid for process, title in processes_of(self._process.pid) if title == wanted)

    def log(self, event: str) -> bool:
        """Whether the master has logged this event."""
        return any(f'"event": "{event}"' in line for line in self.master_log())

    def interventions(self) -> list[str]:
        """Returns the master's log entries about slow members: their times, events, members and reasons."""
        lines = (self.root / "logs" / "master-0.log").read_text().splitlines()
        found = [json.loads(line) for line in lines if any(f'"event": "{event}"' in line for event in INTERVENTIONS)]
        return [f"{one['timestamp']} {one['event']} {one['member']} {one.get('reason', '')}" for one in found]

    def restart(self) -> None:
        """Stops the job with a checkpoint, and resumes it."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_SECONDS)
        self._process = self._started("--resume")


def measure(data: Path, role: str, contender: str, samples: int, cap: float, found_after: float) -> tuple[float, float]:
    """Returns the seconds from a member's slow-down until `samples` more are trained, and until it is found (On)."""
    with tempfile.TemporaryDirectory() as folder, Throttle(SHARE) as throttle:
        training = SlowedJob(Path(folder), data, role, contender == ON)
        try:
            if not training.wait(lambda: training.samples() >= WARM_SAMPLES):
                raise RuntimeError("the job does not begin to train")
            throttle.add(training.pid(role, 1))
            began, first = time.monotonic(), training.samples()
            goal = first + samples
            found = found_after
            if contender == ON and training.wait(lambda: training.log("member_is_slow"), cap):
                found = time.monotonic() - began
            elif contender == RESTART:
                time.sleep(found_after)
                training.restart()
            seconds = _until(training, goal, began, cap)
            if contender == ON:
                say(f"  found after {duration_text(found)}")
                for line in training.interventions():
                    say(f"  {line}")
            return seconds, found
        finally:
            training.end()


def _until(training: SlowedJob, goal: int, began: float, cap: float) -> float:
    """Returns the seconds from `began` until the job reaches the goal; extrapolates after `cap` seconds."""
    left = cap - (time.monotonic() - began)
    if training.wait(lambda: training.samples() >= goal, max(0.0, left / 2)):
        return time.monotonic() - began
    middle, at = training.samples(), time.monotonic()
    if training.wait(lambda: training.samples() >= goal, max(1.0, left / 2)):
        return time.monotonic() - began
    now, ended = training.samples(), time.monotonic()
    rate = (now - middle) / (ended - at)
    say(f"  not done after {duration_text(ended - began)}: extrapolated at {rate_text(rate)}")
    return ended - began + (goal - now) / max(rate, 1.0)


def draw(path: Path, measured: dict[str, dict[str, list[float]]]) -> None:
    """Draws completion times by contender, next to the paper's ratios."""
    figure = Figure(figsize=(6 * len(measured), 4), layout="constrained")
    axes = figure.subplots(1, len(measured), squeeze=False)
    for axis, (role, times) in zip(axes[0], measured.items(), strict=True):
        medians = {contender: float(np.median(values)) for contender, values in times.items()}
        axis.bar(list(medians), list(medians.values()), color=[BLUE, CRIMSON, ORANGE])
        for place, values in enumerate(times.values()):
            axis.plot([place] * len(values), values, "k.")
        for place, contender in enumerate(medians):
            if contender != ON:
                shorter = 1 - medians[ON] / medians[contender]
                text = f"ours {shorter:.0%} shorter\npaper {PAPER[role][contender]:.1%}"
                axis.annotate(text, (place, medians[contender]), ha="center", va="bottom")
        axis.margins(y=0.2)
        axis.set(ylabel="seconds until as many samples are trained", title=f"{role} at 3% of a core")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--roles", nargs="+", choices=list(PAPER), default=list(PAPER))
    parser.add_argument("--samples", type=int, default=8_000_000, help="trained after the member became slow")
    parser.add_argument("--cap", type=float, default=240.0, help="seconds after which a contender is extrapolated")
    options = parser.parse_args()
    measured: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        synthesise(data, ROWS, "--evaluation-fraction", "0")
        for role in options.roles:
            times = measured[role] = {ON: [], NONE: [], RESTART: []}
            for pair in range(1 if options.quick else options.pairs):
                found = 15.0
                for contender in times:
                    seconds, found = measure(data, role, contender, options.samples, options.cap, found)
                    times[contender].append(seconds)
                    say(f"{role}, pair {pair}, {contender}: {duration_text(seconds)}")
    if options.plot:
        draw(options.plot, measured)
    ratios = {
        f"{role}: completion / {contender}": Ratio(
            list(zip(times[ON], times[contender], strict=True)), 1 - PAPER[role][contender], "max"
        )
        for role, times in measured.items()
        for contender in (NONE, RESTART)
    }
    report("slow_members", ratios, options.output)


if __name__ == "__main__":
    main()
