"""`emberscale logs`: the log of one member of a TrainingJob."""

from typing import Annotated

import typer

from emberscale.commands.cluster import JobName, Namespace
from emberscale.commands.options import bad_input_exits

HELP = "Prints the log of a TrainingJob's master, or of another of its members."


def logs(
    name: JobName,
    member: Annotated[str, typer.Argument(help="Such as master-0, ps-1 or worker-0.")] = "master-0",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Goes on until the pod ends.")] = False,
    namespace: Namespace = None,
) -> None:
    """Prints a member's log."""
    # the Kubernetes client takes a second to import, which only commands that use it should cost
    from emberscale.client import TrainingJobClient

    with bad_input_exits():
        for line in TrainingJobClient(namespace).logs(name, member, follow):
            typer.echo(line)
