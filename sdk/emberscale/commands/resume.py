"""`emberscale resume`: goes on with a suspended TrainingJob from its checkpoint."""

import typer

from emberscale.commands.cluster import JobName, Namespace
from emberscale.commands.options import bad_input_exits

HELP = "Goes on with a suspended TrainingJob from its checkpoint."


def resume(name: JobName, namespace: Namespace = None) -> None:
    """Goes on with a suspended TrainingJob from its checkpoint."""
    # the Kubernetes client takes a second to import, which only commands that use it should cost
    from emberscale.client import TrainingJobClient

    with bad_input_exits():
        TrainingJobClient(namespace).resume(name)
        typer.echo(f"{name}: the job goes on")
