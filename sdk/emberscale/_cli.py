"""The `emberscale` command."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

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
_PLANS, _RESULTS, _DATA = "Understand plans", "Use what was trained", "Prepare data"
_LOCAL_COMMANDS = {
    "run": _TRAINING,
    "audit": _TRAINING,
    "profile": _TRAINING,
    "compare": _RESULTS,
    "export": _RESULTS,
    "checkpoints": _RESULTS,
    "validate": _MANIFESTS,
    "explain": _MANIFESTS,
    "explain-plan": _PLANS,
    "simulate": _PLANS,
    "data": _DATA,
}
_COMMANDS_OF_ANY_JOB = dict.fromkeys(("scale", "drain", "drill"), _TRAINING)
"""For jobs of this machine and of a cluster: they need no local extra."""
_CLUSTER_COMMANDS = dict.fromkeys(("submit", "status", "logs", "suspend", "resume", "delete"), _CLUSTER)
_PANELS = _LOCAL_COMMANDS | _COMMANDS_OF_ANY_JOB | _CLUSTER_COMMANDS
_COMMANDS_WITHOUT_LOG = frozenset({"scale", *_CLUSTER_COMMANDS})
"""Nothing that they import logs; importing structlog takes a fifth of the time of the fastest."""


@cache
def command(name: str) -> TyperCommand | TyperGroup:
    """Imports and returns a command. One that lacks a package fails with ModuleNotFoundError when it is called."""
    alone = typer.Typer(rich_markup_mode="rich")
    try:
        _add(alone, name, name.replace("-", "_"))
    except ModuleNotFoundError as absent:
        if _is_own(absent):
            raise
        _add_failing(alone, name, absent)
    return cast(TyperCommand | TyperGroup, get_group(alone).commands[name])


def _is_own(absent: ModuleNotFoundError) -> bool:
    return (absent.name or "").startswith("emberscale")


def _add(alone: typer.Typer, name: str, function: str) -> None:
    module = import_module(f"emberscale._commands.{'cluster' if name in _CLUSTER_COMMANDS else function}")
    panel = _PANELS[name]
    if name in _CLUSTER_COMMANDS:
        alone.command(name, rich_help_panel=panel)(getattr(module, function))
    elif hasattr(module, f"{name}_app"):
        alone.add_typer(getattr(module, f"{name}_app"), name=name, rich_help_panel=panel)
    else:
        settings = {"help": module.HELP, "epilog": module.EXAMPLES, "rich_help_panel": panel}
        alone.command(name, **settings)(getattr(module, function))


def _add_failing(alone: typer.Typer, name: str, absent: ModuleNotFoundError) -> None:
    def fail() -> None:
        raise absent

    settings = {"ignore_unknown_options": True, "allow_extra_args": True}
    text = f"[dim]needs[/] pip install 'emberscale\\[{_extra(name)}]'"
    alone.command(name, help=text, rich_help_panel=_PANELS[name], context_settings=settings)(fail)


def _extra(name: str) -> str:
    return "local" if name in _LOCAL_COMMANDS else "client"


class _Commands(Mapping[str, TyperCommand | TyperGroup]):
    """All commands by name, each imported when it is looked up: one needs a fraction of what all of them need."""

    def __iter__(self) -> Iterator[str]:
        return iter(_PANELS)

    def __len__(self) -> int:
        return len(_PANELS)

    def __getitem__(self, name: str) -> TyperCommand | TyperGroup:
        if name not in _PANELS:
            raise KeyError(name)
        return command(name)


class _Program(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands()  # type: ignore[assignment]  # no command is added to these

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that the arguments name; if it lacks a package, says which extra has it."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:  # typer has pydantic check values, which marks what a check says
            error.message = error.message.removeprefix("Value error, ")
            raise
        except ModuleNotFoundError as absent:
            if _is_own(absent):
                raise
            name = ctx.invoked_subcommand
            needed = f"{absent.name or absent}: pip install 'emberscale[{_extra(name)}]'"
            typer.echo(f"error: `emberscale {name}` needs {needed}", err=True)
            raise typer.Exit(2) from absent


app = typer.Typer(
    name="emberscale",
    cls=_Program,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"emberscale {version('emberscale')}")
        raise typer.Exit


@app.callback(help=HELP, epilog=EXAMPLES)
def about(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Prints the version.")
    ] = False,
) -> None:
    """Options of every command."""
    if ctx.invoked_subcommand in _COMMANDS_WITHOUT_LOG:
        return
    import structlog

    # stdout is for what a command was asked for; `sys.stderr` is looked up anew, as tests replace it
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


def import_command(arguments: Sequence[str]) -> None:
    """Imports the command that the arguments name, if they name one."""
    if arguments and arguments[0] in _PANELS:
        command(arguments[0])


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
