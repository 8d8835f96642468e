"""What the commands for jobs on a cluster share."""

from typing import Annotated

import typer

JobName = Annotated[str, typer.Argument(metavar="NAME", help="Name of a TrainingJob.", show_default=False)]
Namespace = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="[dim]default: that of the kubeconfig's context[/]", show_default=False),
]
