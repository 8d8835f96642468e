"""Partial recovery (CPR) against full recovery: what it saves, and what it costs in accuracy.

* Overhead: the share of a job's time that saving, loading and repeating take, for the job that the paper emulates: 56
  hours, two failures, target PLS 0.1. The paper does not print its O_save, O_load and O_res; they follow from the
  overheads that it does print (`paper_costs`). Once by the brain's equations (1 and 2 of the paper), which count
  T_total / T_save saves, and once with the whole saves that fit into such a job (section 5.1). Nothing is run for it.
* Accuracy: a DLRM on synthetic Criteo-like records, its failures emulated (`recovery_emulation`), each run against the
  same run without failures. First, random numbers of failures, of servers that are lost and of intervals (section 6.5):
  how far AUC follows PLS. The paper's r is that of single runs, with PLS by its equation 3; only the one of single runs
  by the printed equation is to be compared with it. The AUC of a run is noisy, so each plan is also run with every
  seed, and r of the means is told, too: averages make any r larger. A job counts PLS otherwise than the paper prints it
  (`lost_samples`), so r is told for both. With 24 plans a true r of 0.87 is seen as anything from 0.7 to 0.95. Then two
  failures a run and the interval of a target PLS, with each priority (6.1 and 6.3).

`lost_server.py` kills servers of real jobs.
"""

import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drawn_labels import DrawnLabels
from emberscale_api.job import TrainingJob, parse_manifest
from emberscale_brain.fault_tolerance import FailureCosts, full_recovery, partial_recovery
from plain_torch import NumberedData, numbered, predictions
from recovery_emulation import Failure, Plan, Priority, emulate
from reporting import Ratio, arguments, report, say, standard_error
from whole_run import manifest, synthesise

HOUR = 3600.0
TOTAL, BETWEEN = 56 * HOUR, 28 * HOUR
"""The job that the paper emulates: its length, and the time between its failures (section 5.1)."""

PAPER_OVERHEADS = {"Kaggle": (0.085, 0.044, 0.0053), "Terabyte": (0.082, 0.044, 0.0068)}
"""Overheads of full recovery, of partial recovery at its interval, and of CPR with a target PLS of 0.1 (figure 7)."""

PAPER_LOSSES = {Priority.NONE: 0.0003, Priority.SCAR: 0.0001, Priority.MFU: 0.0001, Priority.SSU: 0.0002}
"""The loss of AUC against full recovery at a target PLS of 0.1, on the worse of both data sets (section 6.1)."""

PAPER_R = {"Kaggle": 0.8764, "Terabyte": 0.8175}
"""The correlation of PLS with the loss of AUC (figure 11)."""

ALLOWED_LOSS = {Priority.MFU: 0.0002, Priority.SSU: 0.0005}
TARGET_PLS = 0.1
TARGETS = (0.02, 0.1, 0.2)
"""The targets of the paper's figure 9."""

SHARES = (8, 4, 2)
"""The numbers of emulated servers; a failure takes one, with 12.5%, 25% or 50% of the rows."""

RECORDS, QUICK_RECORDS, HELD_OUT = 180_000, 54_000, 100_000

RECORDS_A_ROW = 22
"""The records over the most rows of a table, for about as many accesses per row as in Criteo's Kaggle data."""

SERVERS = 16
"""The servers of a random run, which loses one to eight of them at a time."""

PLANS, SEEDS = 24, 3
"""The random plans, and the seeds of each: of the model, the order of the records, and the rows of each server."""


@dataclass(frozen=True)
class Overheads:
    """Shares of a job's time: for full recovery, and for partial recovery at the same interval and at the target's.

    `whole_saves` is `partial` with the whole saves that fit into the job, and `floor` the part of it that no interval
    avoids: loading and rescheduling. All follow from printed figures of two digits, and may be off by 0.15% of the
    job's time.
    """

    full: float
    same_interval: float
    partial: float
    whole_saves: float
    floor: float


def paper_costs(full: float, same_interval: float, servers: int) -> FailureCosts:
    """Returns the costs that give full recovery these overheads at its best interval.

    Partial recovery avoids the repeated work, T_save / 2 T_fail. At the best interval, that equals the cost of saves,
    O_save / T_save; the rest is loading and rescheduling.
    """
    repeated = full - same_interval
    interval = 2 * repeated * BETWEEN
    return FailureCosts(
        total_seconds=TOTAL,
        ps=servers,
        between_failures=BETWEEN,
        save=repeated * interval,
        load=(same_interval - repeated) * BETWEEN,
        reschedule=0.0,
        target_pls=TARGET_PLS,
    )


def overheads(data: str, servers: int) -> Overheads:
    """Computes, with the brain's equations, the overheads of the paper's emulated job on this data set."""
    full, same_interval, _ = PAPER_OVERHEADS[data]
    costs = paper_costs(full, same_interval, servers)
    ours, partial = full_recovery(costs), partial_recovery(costs)
    floor = (costs.load + costs.reschedule) / costs.between_failures
    return Overheads(
        ours.overhead,
        ours.overhead - ours.interval / 2 / costs.between_failures,
        partial.overhead,
        saves_within(TOTAL, partial.interval) * costs.save / TOTAL + floor,
        floor,
    )


def saves_within(total: float, interval: float) -> int:
    """Counts the saves at multiples of the interval during training, without the final one that every job takes."""
    return math.ceil(total / interval - 1e-9) - 1


def dlrm(data: Path, seed: int) -> TrainingJob:
    """Returns a smaller version of the example job."""
    spec = {
        "data": {"train": [str(data / "train-*.tsv")], "evaluation": [str(data / "evaluation.tsv")]},
        "model": {"architecture": "DLRM", "embeddings": {"dimension": 16}},
        "training": {"batchSize": 512, "seed": seed},
    }
    return parse_manifest(manifest("partial-recovery", spec))


def random_plan(random_of: random.Random, batches: int) -> Plan:
    """Draws 1 to 32 failures, each of 6.25 to 50% of the rows, and an interval with an expected PLS of 0 to 1."""
    failures, lost = 2 ** random_of.randint(0, 5), 2 ** random_of.randint(0, 3)
    expected = random_of.random()
    interval = min(2 * expected * batches * SERVERS / lost / failures, 2.0 * batches)
    return Plan(SERVERS, max(1.0, interval), _failures(random_of, batches, failures, SERVERS, lost))


def _failures(random_of: random.Random, batches: int, count: int, servers: int, lost: int) -> tuple[Failure, ...]:
    return tuple(
        Failure(random_of.randrange(1, batches), tuple(random_of.sample(range(servers), lost))) for _ in range(count)
    )


@dataclass(frozen=True)
class Run:
    """A run with failures: its PLS, the `loss` of AUC against the run without failures, and rows saved over all rows.

    `printed_pls` is that of equation 3 as the paper prints it.
    """

    pls: float
    printed_pls: float
    loss: float
    saves: float

    def pls_of(self, as_printed: bool) -> float:
        """Returns the PLS, as a job counts it or as the paper prints it."""
        return self.printed_pls if as_printed else self.pls


@dataclass
class Accuracy:
    """The emulated runs: those of each random plan, by seed, and those with a target PLS and a priority."""

    random: list[list[Run]]
    targeted: dict[tuple[float, Priority], list[Run]]

    def plans(self, *, as_printed: bool = False) -> list[tuple[float, float]]:
        """Returns PLS and mean loss of each random plan. The PLS is the same with every seed."""
        return [(runs[0].pls_of(as_printed), mean(run.loss for run in runs)) for runs in self.random]

    def correlation(self, *, as_printed: bool = False) -> float:
        """Returns Pearson's r of PLS and the mean loss of the plans."""
        return _correlation(self.plans(as_printed=as_printed))

    def correlation_of_runs(self, *, as_printed: bool = False, saved: bool = False) -> float:
        """Returns Pearson's r of PLS and the loss of single runs, as in the paper's figure 11.

        With `saved`, only of runs with a save: others lose all that the rows of a server have learnt.
        """
        of_runs = (run for runs in self.random for run in runs if run.saves or not saved)
        return _correlation([(run.pls_of(as_printed), run.loss) for run in of_runs])


def _correlation(pairs: list[tuple[float, float]]) -> float:
    return float(np.corrcoef(np.array(pairs).T)[0, 1])


def measure_accuracy(
    folder: Path, records: int, seeds: int, plans: int, shares: Sequence[int], targets: Sequence[float]
) -> Accuracy:
    """Trains with emulated failures: in `plans` at random, and with each of the targets and priorities."""
    rows = records + HELD_OUT
    synthesise(folder, rows, "--evaluation-fraction", str(HELD_OUT / rows))
    found = Accuracy([[] for _ in range(plans)], {})
    for seed in range(seeds):
        job = dlrm(folder, seed)
        data = numbered(job, records // RECORDS_A_ROW)
        drawn = DrawnLabels(data.held_out_labels, records)
        undisturbed = drawn.auc(predictions(job, data))
        say(f"seed {seed}: AUC {undisturbed:.5f} without failures, {len(data.training)} batches")
        random_of, batches = random.Random(0), len(data.training)
        for runs in found.random:
            runs.append(_run(job, data, random_plan(random_of, batches), drawn, undisturbed))
        random_of = random.Random(seed)
        for target, priority, plan in _targeted(random_of, batches, shares, targets):
            run = _run(job, data, plan, drawn, undisturbed)
            found.targeted.setdefault((target, priority), []).append(run)
    return found


def _targeted(
    random_of: random.Random, batches: int, shares: Sequence[int], targets: Sequence[float]
) -> Iterator[tuple[float, Priority, Plan]]:
    """Yields plans with the same failures under each target and priority."""
    for servers in shares if targets else ():
        failures = _failures(random_of, batches, 2, servers, 1)
        for target in targets:
            interval = min(2 * target * servers * BETWEEN / TOTAL, 1.0) * batches
            for priority in Priority:
                if priority in (Priority.NONE, Priority.SSU) or target == TARGET_PLS:
                    yield target, priority, Plan(servers, interval, failures, priority)


def _run(job: TrainingJob, data: NumberedData, plan: Plan, drawn: DrawnLabels, undisturbed: float) -> Run:
    outcome = emulate(job, data, plan, drawn)
    run = Run(outcome.pls, outcome.printed_pls, undisturbed - outcome.auc, outcome.saves)
    say(
        f"  {len(plan.failures)} failures of {len(plan.failures[0].servers)} in {plan.servers}, a save every "
        f"{plan.interval:.1f} batches, priority {plan.priority}: PLS {run.pls:.4f} "
        f"({run.printed_pls:.4f} as printed), AUC lower by {run.loss:.5f}"
    )
    return run


PARTS = ("pls", "priorities")


def draw(path: Path, accuracy: Accuracy) -> None:
    """Draws overheads, loss by PLS, and loss by priority."""
    panels: list[Callable[[Axes], None]] = [_draw_overheads]
    if accuracy.random:
        panels.append(partial(_draw_correlation, accuracy))
    if all((TARGET_PLS, priority) in accuracy.targeted for priority in PAPER_LOSSES):
        panels.append(partial(_draw_priorities, accuracy))
    figure = Figure(figsize=(7 * len(panels), 5), layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axis)
    figure.savefig(path, dpi=120)


def _draw_overheads(axis: Axes) -> None:
    labels = ["full", "partial,\nsame interval", *(f"partial, PLS 0.1,\n{servers} servers" for servers in SHARES)]
    for number, data in enumerate(PAPER_OVERHEADS):
        ours = [overheads(data, servers) for servers in SHARES]
        heights = [ours[0].full, ours[0].same_interval, *(one.partial for one in ours)]
        places = np.arange(len(labels)) + 0.4 * (number - 0.5)
        bars = axis.bar(places, [100 * one for one in heights], 0.36, label=f"equations, costs of {data}")
        axis.bar_label(bars, fmt="%.2f")
        paper = [100 * one for one in PAPER_OVERHEADS[data]]
        axis.plot(places[:3], paper, "kx", label="the paper" if not number else None)
    axis.set_xticks(range(len(labels)), labels)
    axis.set(ylabel="overhead, % of the job's time")
    axis.legend()


def _draw_correlation(accuracy: Accuracy, axis: Axes) -> None:
    of_all = [run for of_plan in accuracy.random for run in of_plan]
    of_saved = [run for run in of_all if run.saves]
    for runs, mark, kind, r in (
        (of_all, "kx", "a run", accuracy.correlation_of_runs()),
        (of_saved, "o", "with a save", accuracy.correlation_of_runs(saved=True)),
    ):
        axis.plot([run.pls for run in runs], [run.loss for run in runs], mark, label=f"{kind}, r = {r:.3f}")
    pls = np.array([run.pls for run in of_saved])
    slope, offset = np.polyfit(pls, [run.loss for run in of_saved], 1)
    axis.plot(pls, slope * pls + offset, "-", label=f"{slope:.4f} of AUC per PLS")
    said = ", ".join(f"{value:.2f} ({data})" for data, value in PAPER_R.items())
    axis.set(xlabel="PLS", ylabel="AUC below the run without failures", title=f"the paper's r: {said}")
    axis.set_yscale("symlog", linthresh=0.005)
    axis.legend()


def _draw_priorities(accuracy: Accuracy, axis: Axes) -> None:
    ours = [mean(run.loss for run in accuracy.targeted[TARGET_PLS, priority]) for priority in PAPER_LOSSES]
    places = np.arange(len(PAPER_LOSSES))
    axis.bar(places - 0.2, ours, 0.36, label="emulated, mean")
    axis.bar(places + 0.2, list(PAPER_LOSSES.values()), 0.36, label="the paper, worse of two")
    for place, priority in zip(places, PAPER_LOSSES, strict=True):
        runs = accuracy.targeted[TARGET_PLS, priority]
        axis.plot([place - 0.2] * len(runs), [run.loss for run in runs], "k.", markersize=3)
    axis.set_xticks(places, [str(priority) for priority in PAPER_LOSSES])
    axis.set(xlabel="priority of saves, two failures, target PLS 0.1", ylabel="AUC below the run without failures")
    axis.legend()


def main() -> None:
    """Calculates, emulates and reports."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=PARTS, help="beside the overheads, one part alone")
    parser.add_argument("--records", type=int, help="how many are trained on")
    parser.add_argument("--seeds", type=int, help="of the model, the order of the records, and the rows of each server")
    parser.add_argument("--targets", type=float, nargs="+", help="of PLS, for the part priorities")
    options = parser.parse_args()
    parts = (options.only,) if options.only else PARTS
    quick = options.quick
    plans = 0 if "pls" not in parts else 8 if quick else PLANS
    targets = () if "priorities" not in parts else options.targets or (TARGETS[1:] if quick else TARGETS)
    shares = SHARES[1:2] if quick else SHARES
    torch.set_num_threads(1)
    ratios: dict[str, Ratio] = {}
    for data, (full, _, paper) in PAPER_OVERHEADS.items():
        for servers in SHARES:
            ours = overheads(data, servers)
            say(
                f"{data}, {servers} servers: overhead {ours.full:.2%} by full recovery, {ours.same_interval:.2%} by "
                f"partial at its interval, {ours.partial:.2%} at that of PLS {TARGET_PLS:g} (paper {full:.1%}, "
                f"{paper:.2%}); {ours.whole_saves:.2%} with whole saves, {ours.floor:.2%} of it to load and "
                "reschedule"
            )
        best = overheads(data, SHARES[0])
        ratios[f"overhead / 0.5%: 8 servers, {data}, equation 2"] = Ratio([(best.partial, 0.005)], 1.0, "max")
        ratios[f"overhead / 0.5%: 8 servers, {data}, whole saves"] = Ratio([(best.whole_saves, 0.005)], 1.0, "max")
    with tempfile.TemporaryDirectory() as folder:
        records = options.records or (QUICK_RECORDS if quick else RECORDS)
        seeds = options.seeds or (2 if quick else SEEDS)
        accuracy = measure_accuracy(Path(folder, "data"), records, seeds, plans, shares, targets)
    if accuracy.random:
        for as_printed, kind in ((True, "PLS as printed"), (False, "PLS as a job counts it")):
            of_runs = accuracy.correlation_of_runs(as_printed=as_printed)
            of_plans = accuracy.correlation(as_printed=as_printed)
            ratios[f"r of loss and {kind}, runs"] = Ratio([(of_runs, 1.0)], min(PAPER_R.values()), "min")
            ratios[f"r of loss and {kind}, means"] = Ratio([(of_plans, 1.0)], 0.9, "min")
            of_saved = accuracy.correlation_of_runs(as_printed=as_printed, saved=True)
            ratios[f"r of loss and {kind}, runs with a save"] = Ratio([(of_saved, 1.0)], 0.9, "min")
    for (target, priority), runs in sorted(accuracy.targeted.items()):
        losses = [run.loss for run in runs]
        of_seeds = [mean(losses[first : first + len(shares)]) for first in range(0, len(losses), len(shares))]
        say(
            f"target PLS {target:g}, priority {priority}: AUC lower by {mean(losses):.5f} on average (standard error "
            f"{standard_error(of_seeds):.5f}, of the means of {len(of_seeds)} seeds), at most {max(losses):.5f}; PLS "
            f"{mean(run.pls for run in runs):.3f}, each row saved {mean(run.saves for run in runs):.2f} times"
        )
        if target == TARGET_PLS and priority in ALLOWED_LOSS:
            allowed = ALLOWED_LOSS[priority]
            ratios[f"loss of AUC / {allowed:g}: {priority}"] = Ratio([(mean(losses), allowed)], 1.0, "max")
    if options.plot:
        draw(options.plot, accuracy)
    report("partial_recovery", ratios, options.output)


if __name__ == "__main__":
    main()
