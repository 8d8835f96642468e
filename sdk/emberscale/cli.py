"""The `emberscale` command."""

import sys
from typing import Annotated

import typer

from emberscale.commands import (
    audit,
    compare,
    delete,
    explain,
    explain_plan,
    export,
    logs,
    profile,
    resume,
    run,
    simulate,
    status,
    submit,
    suspend,
    validate,
)
from emberscale.commands.data import data_app
from emberscale.commands.options import paragraphs
from emberscale.errors import disk_problem

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

app = typer.Typer(
    name="emberscale",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)
app.command("run", help=run.HELP, epilog=run.EXAMPLES, rich_help_panel=_TRAINING)(run.run)
app.command("audit", help=audit.HELP, epilog=audit.EXAMPLES, rich_help_panel=_TRAINING)(audit.audit)
app.command("profile", help=profile.HELP, epilog=profile.EXAMPLES, rich_help_panel=_TRAINING)(profile.profile)
app.command("compare", help=compare.HELP, epilog=compare.EXAMPLES, rich_help_panel=_RESULTS)(compare.compare)
app.command("export", help=export.HELP, epilog=export.EXAMPLES, rich_help_panel=_RESULTS)(export.export)
for name, command, text in (
    ("submit", submit.submit, submit.HELP),
    ("status", status.status, status.HELP),
    ("logs", logs.logs, logs.HELP),
    ("suspend", suspend.suspend, suspend.HELP),
    ("resume", resume.resume, resume.HELP),
    ("delete", delete.delete, delete.HELP),
):
    app.command(name, help=text, rich_help_panel=_CLUSTER)(command)
app.command("validate", help=validate.HELP, epilog=validate.EXAMPLES, rich_help_panel=_MANIFESTS)(validate.validate)
app.command("explain", help=explain.HELP, epilog=explain.EXAMPLES, rich_help_panel=_MANIFESTS)(explain.explain)
app.command("explain-plan", help=explain_plan.HELP, epilog=explain_plan.EXAMPLES, rich_help_panel=_PLANS)(
    explain_plan.explain_plan
)
app.command("simulate", help=simulate.HELP, epilog=simulate.EXAMPLES, rich_help_panel=_PLANS)(simulate.simulate)
app.add_typer(data_app, name="data", rich_help_panel="Prepare data")


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
    """What holds for every command."""


def main() -> None:
    """The entry point of the console script."""
    try:
        app()
    except OSError as error:
        problem = disk_problem(error)
        if problem is None:
            raise
        typer.echo(f"error: {error.filename or 'a file'}: cannot be written: {problem}", err=True)
        sys.exit(1)
