"""`emberscale suspend`: takes a checkpoint of a TrainingJob and deletes its pods."""

import typer

from emberscale.commands.cluster import JobName, Namespace
from emberscale.commands.options import bad_input_exits

HELP = "Takes a checkpoint of a TrainingJob and deletes its pods."


def suspend(name: JobName, namespace: Namespace = None) -> None:
    """Takes a checkpoint of a TrainingJob and deletes its pods."""
    # the Kubernetes client takes a second to import, which only commands that use it should cost
    from emberscale.client import TrainingJobClient

    with bad_input_exits():
        TrainingJobClient(namespace).suspend(name)
        typer.echo(f"{name}: the job rests once its checkpoint is complete")
