"""Arguments and options that several commands take, and how bad input ends a command."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberscale_api.errors import InvalidError, UnavailableError, UnwritableError

if TYPE_CHECKING:
    pass

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
    """Exits with code 2 for user errors and files that the user may not access, and with code 1 for a full disk."""
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
    except PermissionError as error:
        if error.filename is None:  # not of a file
            raise
        typer.echo(f"error: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(BAD_INPUT) from error


def paragraphs(text: str) -> str:
    """Help text with each paragraph on one line, to be wrapped where the terminal ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
