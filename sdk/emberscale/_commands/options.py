"""Arguments and options that several commands take, and how bad input ends a command."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberscale_api.errors import InvalidError, UnavailableError, UnwritableError

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

BAD_INPUT = 2


class Output(StrEnum):
    """The format of a command's result."""

    TEXT = "text"
    JSON = "json"


ManifestFile = Annotated[Path, typer.Argument(metavar="FILE", help="A TrainingJob manifest (YAML).")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="[dim]default: that of the kubeconfig's context[/]")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="spec.path=value",
        help="Sets a field of the manifest to a value in YAML. Repeatable: "
        "[cyan]--set spec.worker.replicas=4 --set spec.training.epochs=2[/]",
    ),
]
WorkFolder = Annotated[
    Path | None, typer.Option("--workdir", metavar="DIR", help="The run's folder. [dim]default: runs/<job name>[/]")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Starts a new run even if the folder holds one that can be resumed.")
]
OutputFormat = Annotated[
    Output, typer.Option("--output", "-o", help="[cyan]json[/] prints one object, for programs, last on stdout.")
]


@contextmanager
def bad_input_exits() -> Iterator[None]:
    """Reports user errors on stderr with exit code 2, and a full disk with exit code 1."""
    try:
        yield
    except UnwritableError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except (InvalidError, UnavailableError) as error:
        if isinstance(error, InvalidError) and error.trace:
            typer.echo(error.trace.rstrip(), err=True)
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(BAD_INPUT) from error


@contextmanager
def progress_bar(doing: str, *figures: "ProgressColumn", total: float | None = None) -> Iterator[Callable[..., None]]:
    """Shows progress on stderr, if that is a terminal, until the end of the block; yields rich's `update` of its task.

    `figures` stand behind the bar: how much is done, and how long the rest takes.
    """
    # the fastest commands show no progress, and rich would take them a tenth of their time
    from rich.progress import BarColumn, Progress, TextColumn

    from emberscale._console import open_console

    console = open_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *figures)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield partial(progress.update, progress.add_task(doing, total=total))


@contextmanager
def stages_bar(doing: str, *figures: "ProgressColumn") -> Iterator[Callable[[str, int, int], None]]:
    """As `progress_bar`, for work in stages; yields a function of the stage, the part that is done, and the total."""
    with progress_bar(doing, *figures) as update:
        yield lambda stage, done, total: update(description=stage, completed=done, total=total)


def paragraphs(text: str) -> str:
    """Help text with each paragraph on one line, to be wrapped where the terminal ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
