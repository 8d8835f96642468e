"""`emberscale simulate`: compares schedulers on a simulated cluster."""

import json
import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import MofNCompleteColumn, TimeRemainingColumn
from rich.table import Table

from emberscale._commands.options import Output, OutputFormat, bad_input_exits, paragraphs
from emberscale._console import open_console, progress_bar
from emberscale._run.preflight import ensure_writable
from emberscale_api.errors import InvalidError, os_errors_named
from emberscale_api.readable import count_text

if TYPE_CHECKING:
    from emberscale_simulator.results import Estimate, SchedulerSummary, SeedOutcome
    from emberscale_simulator.scenario import Scenario

HELP = paragraphs("""\
Simulates a cluster under several schedulers and compares job completion time (JCT), utilization, completion rate and
the number of scalings, each with its 95% interval over seeds.

A scenario (YAML) describes the cluster, its capacity over time, failures, stragglers, the workload (generated, or a CSV
trace) and the schedulers. deploy/examples/scenarios has examples, with the reason for every number.

The same scenario and seeds give the same figures. Exit code [red]2[/] for a scenario or trace that cannot be used.
""")
EXAMPLES = """\
[bold]Examples[/]

  emberscale simulate deploy/examples/scenarios/small-cluster.yaml --seeds 10

  emberscale simulate scenario.yaml --schedulers emberscale,static --plot pictures --output json
"""


def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario (YAML).")],
    schedulers: Annotated[
        str | None, typer.Option(help="Schedulers of the scenario to run, separated by commas. [dim]default: all[/]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds; two or more give intervals.")] = 3,
    first_seed: Annotated[
        int | None, typer.Option(min=0, help="First seed. [dim]default: the first judging seed of the scenario[/]")
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Runs at a time. [dim]default: one per core[/]")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draws the comparison into this folder.")] = None,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Compares schedulers on a simulated cluster."""
    with bad_input_exits():
        if not find_spec("emberscale_simulator"):
            raise InvalidError("the simulator is not part of the images: install Emberscale from its sources")
    # the simulator's libraries take a second to import, which no other command should
    from emberscale_simulator.experiment import as_json, choose_schedulers, summarize_experiment
    from emberscale_simulator.pictures import draw_comparison
    from emberscale_simulator.scenario_file import load_scenario
    from emberscale_simulator.workload import make_jobs

    with bad_input_exits():
        loaded = load_scenario(scenario)
        first = loaded.seeds.judging.first if first_seed is None else first_seed
        chosen_seeds = range(first, first + seeds)
        wanted = [name.strip() for name in schedulers.split(",")] if schedulers else None
        names = list(dict.fromkeys(spec.name for spec in choose_schedulers(loaded, wanted)))
        make_jobs(loaded, first, scenario.parent)  # a bad trace is found before anything starts
        if plot is not None:
            ensure_writable(plot, "--plot")
        outcomes = _run(loaded, names, chosen_seeds, scenario.parent, processes or os.cpu_count() or 1)
        summaries = summarize_experiment(outcomes, names)
        if plot is not None:
            with os_errors_named(f"--plot {plot}: cannot be written"):
                pictures = draw_comparison(loaded.name, summaries, outcomes, plot)
            typer.echo("drawn: " + ", ".join(map(str, pictures)), err=True)
    if output is Output.JSON:
        typer.echo(json.dumps(as_json(loaded.name, chosen_seeds, summaries), indent=2))
    else:
        open_console().print(_table(loaded.name, summaries))


def _run(
    scenario: "Scenario", names: Sequence[str], seeds: Sequence[int], folder: Path, processes: int
) -> "list[SeedOutcome]":
    from emberscale_simulator.experiment import run_experiment

    runs, figures = len(names) * len(seeds), (MofNCompleteColumn(), TimeRemainingColumn())
    with progress_bar("simulating", *figures, total=runs) as update:

        def advance(outcome: "SeedOutcome") -> None:
            update(advance=1, description=f"{outcome.scheduler}, seed {outcome.seed}")

        return run_experiment(scenario, names, seeds, folder, processes, advance)


def _table(name: str, summaries: "Sequence[SchedulerSummary]") -> Table:
    seeds = summaries[0].seeds
    title = f"{name}, {count_text(seeds, 'seed')}" + (" (± 95%)" if seeds > 1 else "")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("scheduler", no_wrap=True)
    for column in ("JCT\nmin", "p50\nmin", "p90\nmin", "worker\nCPU", "PS\nCPU", "com-\npleted", "scal-\nings"):
        table.add_column(column, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(
            summary.scheduler,
            *(_cell(jct, 1 / 60, "") for jct in (summary.jct, summary.jct_p50, summary.jct_p90)),
            _cell(summary.worker_cpu_utilization, 100, "%"),
            _cell(summary.ps_cpu_utilization, 100, "%"),
            _cell(summary.completion_rate, 100, "%"),
            _cell(summary.scalings, 1, ""),
        )
    return table


def _cell(estimate: "Estimate", scale: float, unit: str) -> str:
    """The mean, and below it half the interval's width where there is one."""
    if math.isnan(estimate.mean):
        return "-"
    mean = f"{estimate.mean * scale:.1f}{unit}"
    return mean + (f"\n±{estimate.half_width * scale:.1f}" if math.isfinite(estimate.half_width) else "")
