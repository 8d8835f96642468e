"""The `emberscale` command."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Annotated

import structlog
import typer

from emberscale._commands import cluster, drain, drill, scale
from emberscale._commands.options import paragraphs
from emberscale_api.errors import disk_problem

HELP = paragraphs("""\
Trains deep-learning recommendation models on parameter servers.

A [bold]TrainingJob[/] manifest says what to train, on which data, and with which processes. The same manifest runs on
this machine, with processes, and on a Kubernetes cluster, with pods.
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
_LOCAL_COMMANDS = {
    "run": _TRAINING,
    "audit": _TRAINING,
    "profile": _TRAINING,
    "compare": _RESULTS,
    "export": _RESULTS,
    "validate": _MANIFESTS,
    "explain": _MANIFESTS,
    "explain-plan": _PLANS,
    "simulate": _PLANS,
}

app = typer.Typer(
    name="emberscale",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)


def _add(module: ModuleType, panel: str) -> None:
    """Adds the command of a module: the function that has the module's name."""
    function = module.__name__.rpartition(".")[2]
    name, command = function.replace("_", "-"), getattr(module, function)
    app.command(name, help=module.HELP, epilog=module.EXAMPLES, rich_help_panel=panel)(command)


def _add_local_commands() -> None:
    # all imports come first: if one fails, no command may be there yet
    names = [name.replace("-", "_") for name in _LOCAL_COMMANDS]
    modules = [import_module(f"emberscale._commands.{name}") for name in names]
    from emberscale._commands import restore
    from emberscale._commands.checkpoints import checkpoints_app
    from emberscale._commands.data import data_app

    for module, panel in zip(modules, _LOCAL_COMMANDS.values(), strict=True):
        _add(module, panel)
    checkpoints_app.command("restore", help=restore.HELP, epilog=restore.EXAMPLES)(restore.restore)
    app.add_typer(checkpoints_app, name="checkpoints", rich_help_panel=_RESULTS)
    app.add_typer(data_app, name="data", rich_help_panel="Prepare data")


def _say_what_local_commands_need(missing: str) -> None:
    def needs_local(context: typer.Context) -> None:
        problem = f"`emberscale {context.info_name}` needs {missing}: pip install 'emberscale[local]'"
        typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(2)

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    for name in (*_LOCAL_COMMANDS, "checkpoints", "data"):
        text = "[dim]needs[/] pip install 'emberscale\\[local]'"
        app.command(name, help=text, rich_help_panel=_TRAINING, context_settings=settings)(needs_local)


try:
    _add_local_commands()
except ModuleNotFoundError as absent:
    if (absent.name or "").startswith("emberscale"):
        raise
    _say_what_local_commands_need(absent.name or str(absent))
for module in (scale, drain, drill):  # for jobs of this machine and of a cluster: they need no local extra
    _add(module, _TRAINING)
for command in (cluster.submit, cluster.status, cluster.logs, cluster.suspend, cluster.resume, cluster.delete):
    app.command(rich_help_panel=_CLUSTER)(command)


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
    # stdout is for what a command was asked for; `sys.stderr` is looked up anew, as tests replace it
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


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
