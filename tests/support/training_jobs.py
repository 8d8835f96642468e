"""TrainingJobs as an API server would hold them."""

from typing import Any

from emberscale_api.job import TrainingJob, TrainingJobSpec, parse_manifest


def job_body(name: str = "ctr", uid: str = "job-uid", generation: int = 1, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {
            "name": name,
            "namespace": "team-a",
            "uid": uid,
            "generation": generation,
            "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"data": {"train": ["/data/train.tsv"]}, **spec},
    }


def training_job(**spec: Any) -> TrainingJob:
    """A small job; its data is never read."""
    body = job_body(**spec)
    return parse_manifest({**body, "metadata": {"name": body["metadata"]["name"]}})


def training_spec(**spec: Any) -> TrainingJobSpec:
    """The spec of a small job."""
    return training_job(**spec).spec
