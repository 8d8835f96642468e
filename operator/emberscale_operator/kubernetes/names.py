"""Names, labels and annotations of what belongs to a job in the cluster."""

import hashlib
from collections.abc import Mapping
from typing import Any

from emberscale_api.job.roles import MAX_REPLICAS, Role
from emberscale_api.job.training_job import API_VERSION, GROUP, KIND
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.machine import InstanceId

COMPONENT = "emberscale-operator"

JOB_LABEL = f"{GROUP}/job-name"
ROLE_LABEL = f"{GROUP}/role"
INDEX_LABEL = f"{GROUP}/index"
INCARNATION_LABEL = f"{GROUP}/incarnation"
MANIFEST_ANNOTATION = f"{GROUP}/manifest"
LIMITS_ANNOTATION = f"{GROUP}/limits"
"""Holds the limits that a pod was created with, in JSON: the cluster may give it others, such as rounded ones."""

_MOST_INCARNATIONS = 1 << 40
"""A label with a greater number was forged: the status, with 64 bits, could not hold all that may follow."""

MASTER_PORT = 7070
METRICS_PORT = 9090


def pod_name(job: str, instance: InstanceId) -> str:
    """Returns the name of an incarnation's pod: creating it twice is a conflict, and not a second pod."""
    return f"{job}-{instance.role}-{instance.index}-{instance.incarnation}"


def service_name(job: str) -> str:
    """Returns the name of the master's Service."""
    return f"{job}-master"


def budget_name(job: str) -> str:
    """Returns the name of the PodDisruptionBudget of the parameter servers."""
    return f"{job}-ps"


def token_secret_name(job: str) -> str:
    """Returns the name of the Secret with the job's token, and its certificate if it has one."""
    return f"{job}-token"


def store_secret_name(job: str, settings: Settings) -> str:
    """Returns the name of the Secret for the master alone; under other settings it has another, for later masters."""
    contents = (settings.redis_url, settings.brain_token, settings.brain_authority, settings.flash_redis_url)
    return f"{job}-store-{digest(''.join(contents))}"


def manifest_name(job: str, manifest: str) -> str:
    """Returns the name of the ConfigMap with a manifest; another manifest has another name."""
    return f"{job}-manifest-{digest(manifest)}"


def digest(text: str) -> str:
    """Returns a short name for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def job_labels(job: str) -> dict[str, str]:
    """Returns the labels of all objects of a job."""
    return {
        JOB_LABEL: job,
        "app.kubernetes.io/name": "emberscale",
        "app.kubernetes.io/instance": job,
        "app.kubernetes.io/part-of": "emberscale",
        "app.kubernetes.io/managed-by": COMPONENT,
    }


def instance_labels(job: str, instance: InstanceId) -> dict[str, str]:
    """Returns the labels of a pod of a job."""
    return {
        **job_labels(job),
        "app.kubernetes.io/component": str(instance.role),
        ROLE_LABEL: str(instance.role),
        INDEX_LABEL: str(instance.index),
        INCARNATION_LABEL: str(instance.incarnation),
    }


def instance_of(labels: Mapping[str, str]) -> InstanceId | None:
    """The instance that a pod's labels name; None for a pod that is not ours."""
    try:
        found = InstanceId(Role(labels[ROLE_LABEL]), int(labels[INDEX_LABEL]), int(labels[INCARNATION_LABEL]))
    except (KeyError, ValueError):
        return None
    return found if found.index < MAX_REPLICAS and found.incarnation <= _MOST_INCARNATIONS else None


def is_pod_of(body: Mapping[str, Any], job: str, instance: InstanceId) -> bool:
    """Whether a pod's labels say what it was created for, so that watches show it."""
    labels = body["metadata"].get("labels") or {}
    return labels.get(JOB_LABEL) == job and instance_of(labels) == instance


def owner_reference(name: str, uid: str) -> dict[str, object]:
    """Returns a reference that deletes its carrier with the job, and never delays the deletion of job or namespace."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def is_owned_by(body: Mapping[str, object], uid: str) -> bool:
    """Whether an object belongs to the job of this uid, and not to an earlier job of the same name."""
    metadata = body.get("metadata")
    references = metadata.get("ownerReferences", ()) if isinstance(metadata, Mapping) else ()
    return any(reference.get("uid") == uid for reference in references)
