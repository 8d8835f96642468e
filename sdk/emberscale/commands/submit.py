"""`emberscale submit`: creates a TrainingJob on a cluster."""

import typer

from emberscale.commands.cluster import Namespace
from emberscale.commands.options import ManifestFile, Overrides, bad_input_exits
from emberscale_api.job import load_manifest

HELP = "Creates a TrainingJob on the cluster that KUBECONFIG names."


def submit(file: ManifestFile, overrides: Overrides = None, namespace: Namespace = None) -> None:
    """Creates a TrainingJob on the cluster."""
    # the Kubernetes client takes a second to import, which only commands that use it should cost
    from emberscale.client import TrainingJobClient

    with bad_input_exits():
        job = load_manifest(file, overrides or ())
        client = TrainingJobClient(namespace)
        name = client.submit(job)
        typer.echo(f"{name}: submitted to namespace {client.namespace}; follow it: emberscale status {name} --watch")
