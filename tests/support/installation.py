"""The chart as the end-to-end suite installs it."""

from pathlib import Path
from typing import Any

from cluster import IMAGE, REDIS_IMAGE, run, setting

CHART = Path(__file__).resolve().parents[2] / "charts" / "emberscale"
RELEASE = "emberscale"
SYSTEM = "emberscale-e2e"
OPERATOR = "app.kubernetes.io/component=operator,app.kubernetes.io/instance=emberscale"
REDIS = "app.kubernetes.io/component=redis,app.kubernetes.io/instance=emberscale"


def helm_install(*more: str) -> None:
    """Installs the release, or upgrades it."""
    run(
        "helm",
        "upgrade",
        "--install",
        RELEASE,
        str(CHART),
        "--namespace",
        SYSTEM,
        *(argument for value in chart_values() for argument in ("--set", value)),
        *more,
        "--wait",
        "--timeout=180s",
        timeout=240,
    )


def chart_values() -> list[str]:
    """The settings of the suite's installation."""
    repository, tag = setting(IMAGE).rsplit(":", 1)
    values = [
        f"image.repository={repository}",
        f"image.tag={tag}",
        "redis.persistence.existingClaim=emberscale-e2e-redis",
        "brain.enabled=false",
    ]
    redis = setting(REDIS_IMAGE)
    if redis:
        repository, tag = redis.rsplit(":", 1)
        values += ["redis.image.registry=", f"redis.image.repository={repository}", f"redis.image.tag={tag}"]
    return values


def redis_volume(path: str) -> list[dict[str, Any]]:
    """A claim, and the volume for it, of clusters without a storage class."""
    size = {"storage": "1Gi"}
    volume = {"hostPath": {"path": path}, "capacity": size, "accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    claim = {
        "resources": {"requests": size},
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "",
        "volumeName": "emberscale-e2e-redis",
    }
    name = {"name": "emberscale-e2e-redis"}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": name, "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": name, "spec": claim},
    ]
