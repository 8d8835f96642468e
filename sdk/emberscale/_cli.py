"""The `emberscale` command."""

import sys
from typing import Annotated

import typer

from emberscale._commands import cluster, drain, drill, scale
from emberscale._commands.options import paragraphs
from emberscale_api.errors import disk_problem

HELP = paragraphs("""\
Trains deep-learning recommendation models on parameter servers.

A [bold]TrainingJob[/] manifest says what to train, on which data, with which processes. The same manifest runs here,
with processes, and on a Kubernetes cluster, with pods.
""")
EXAMPLES = """\
[bold]Start here[/]

  emberscale data synth data/criteo-synthetic --rows 1000000 --seed 1

  emberscale explain deploy/examples/criteo-dlrm.yaml

  emberscale run deploy/examples/criteo-dlrm.yaml

  emberscale audit runs/criteo-dlrm
"""
_TRAINING, _CLUSTER, _MANIFESTS = "Train here", "Train on a cluster", "Understand a manifest"
_PLANS, _RESULTS = "Understand plans", "Use what was trained"
_LOCAL_COMMANDS = (
    "run",
    "audit",
    "profile",
    "compare",
    "checkpoints",
    "export",
    "validate",
    "explain",
    "explain-plan",
    "simulate",
    "data",
)

app = typer.Typer(
    name="emberscale",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)


def _add_local_commands() -> None:
    from emberscale._commands import (
        audit,
        compare,
        explain,
        explain_plan,
        export,
        profile,
        restore,
        run,
        simulate,
        validate,
    )
    from emberscale._commands.checkpoints import checkpoints_app
    from emberscale._commands.data import data_app

    for name, command, module, panel in (
        ("run", run.run, run, _TRAINING),
        ("audit", audit.audit, audit, _TRAINING),
        ("profile", profile.profile, profile, _TRAINING),
        ("compare", compare.compare, compare, _RESULTS),
        ("export", export.export, export, _RESULTS),
        ("validate", validate.validate, validate, _MANIFESTS),
        ("explain", explain.explain, explain, _MANIFESTS),
        ("explain-plan", explain_plan.explain_plan, explain_plan, _PLANS),
        ("simulate", simulate.simulate, simulate, _PLANS),
    ):
        app.command(name, help=module.HELP, epilog=module.EXAMPLES, rich_help_panel=panel)(command)
    checkpoints_app.command("restore", help=restore.HELP, epilog=restore.EXAMPLES)(restore.restore)
    app.add_typer(checkpoints_app, name="checkpoints", rich_help_panel=_RESULTS)
    app.add_typer(data_app, name="data", rich_help_panel="Prepare data")


def _say_what_local_commands_need(missing: str) -> None:
    def needs_local(context: typer.Context) -> None:
        problem = f"`emberscale {context.info_name}` needs {missing}: pip install 'emberscale[local]'"
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name in _LOCAL_COMMANDS:
        text = "[dim]needs[/] pip install 'emberscale\\[local]'"
        app.command(name, help=text, rich_help_panel=_TRAINING, context_settings=settings)(needs_local)


try:
    _add_local_commands()
except ModuleNotFoundError as absent:
    if (absent.name or "").startswith("emberscale"):
        raise
    _say_what_local_commands_need(absent.name or str(absent))
app.command("scale", help=scale.HELP, epilog=scale.EXAMPLES, rich_help_panel=_TRAINING)(scale.scale)
app.command("drain", help=drain.HELP, epilog=drain.EXAMPLES, rich_help_panel=_TRAINING)(drain.drain)
app.command("drill", help=drill.HELP, epilog=drill.EXAMPLES, rich_help_panel=_TRAINING)(drill.drill)
for name, command, text in (
    ("submit", cluster.submit, cluster.SUBMIT_HELP),
    ("status", cluster.status, cluster.STATUS_HELP),
    ("logs", cluster.logs, cluster.LOGS_HELP),
    ("suspend", cluster.suspend, cluster.SUSPEND_HELP),
    ("resume", cluster.resume, cluster.RESUME_HELP),
    ("delete", cluster.delete, cluster.DELETE_HELP),
):
    app.command(name, help=text, rich_help_panel=_CLUSTER)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"emberscale {version('emberscale')}")
        raise typer.Exit


@app.callback(help=HELP, epilog=EXAMPLES)
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Prints the version.")
    ] = False,
) -> None:
    """Options of every command."""


def main() -> None:
    """Runs the command that the arguments name."""
    try:
        app()
    except OSError as error:
        problem = disk_problem(error)
        if problem is None:
            raise
        typer.echo(f"error: {error.filename or 'a file'}: cannot be written: {problem}", err=True)
        sys.exit(1)
