"""`emberscale delete`: deletes a TrainingJob and its pods; its checkpoints stay."""

import typer

from emberscale.commands.cluster import JobName, Namespace
from emberscale.commands.options import bad_input_exits

HELP = "Deletes a TrainingJob and its pods; its checkpoints stay."


def delete(name: JobName, namespace: Namespace = None) -> None:
    """Deletes a TrainingJob and its pods; its checkpoints stay."""
    # the Kubernetes client takes a second to import, which only commands that use it should cost
    from emberscale.client import TrainingJobClient

    with bad_input_exits():
        TrainingJobClient(namespace).delete(name)
        typer.echo(f"{name}: deleted")
