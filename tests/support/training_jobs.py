"""TrainingJobs as an API server would hold them."""

from typing import Any


def job_body(name: str = "ctr", uid: str = "job-uid", generation: int = 1, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {
            "name": name,
            "namespace": "team-a",
            "uid": uid,
            "generation": generation,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"data": {"train": ["/data/train.tsv"]}, **spec},
    }
