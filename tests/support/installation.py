"""Installs the chart for the end-to-end suite."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster import CONTROL_PLANE_IMAGE, IMAGE, POSTGRESQL_IMAGE, REDIS_IMAGE, kubectl, run, setting

CHART = Path(__file__).resolve().parents[2] / "charts" / "emberscale"
RELEASE = "emberscale"
SYSTEM = "emberscale-e2e"
OPERATOR = "app.kubernetes.io/component=operator,app.kubernetes.io/instance=emberscale"
FLASH_REDIS = "app.kubernetes.io/component=flash-redis,app.kubernetes.io/instance=emberscale"
REDIS = "app.kubernetes.io/component=redis,app.kubernetes.io/instance=emberscale"


def helm_install(*more: str, namespace: str = SYSTEM) -> None:
    """Installs or upgrades the release: the suite's own, or another one with its own settings and namespace."""
    run(
        "helm",
        "upgrade",
        "--install",
        RELEASE,
        str(CHART),
        "--namespace",
        namespace,
        *(arguments_of(chart_values()) if namespace == SYSTEM else ()),
        *more,
        "--wait",
        "--timeout=180s",
        timeout=240,
    )


def helm_uninstall() -> None:
    """Removes the suite's release, with its namespace and volume."""
    run("helm", "uninstall", RELEASE, "-n", SYSTEM, "--ignore-not-found", "--wait", timeout=180)
    kubectl("delete", "namespace", SYSTEM, "--ignore-not-found", "--wait=true", timeout=180)
    kubectl("delete", "pv", "emberscale-e2e-redis", "--ignore-not-found", "--wait=false")


def arguments_of(values: Iterable[str]) -> list[str]:
    """Returns helm's arguments for settings, each `path=value`."""
    return [argument for value in values for argument in ("--set", value)]


def chart_values() -> list[str]:
    """Returns the settings of the suite's installation; it has no brain, since its jobs have fixed sizes."""
    return [
        *image_values(),
        "redis.persistence.existingClaim=emberscale-e2e-redis",
        "redis.flash.enabled=true",
        "redis.flash.resources.limits.memory=512Mi",
        "brain.enabled=false",
    ]


def image_values() -> list[str]:
    """Returns the settings that select the images under test."""
    repository, tag = setting(IMAGE).rsplit(":", 1)
    values = [f"image.repository={repository}", f"image.tag={tag}"]
    images = {"controlPlane": CONTROL_PLANE_IMAGE, "redis": REDIS_IMAGE, "postgresql": POSTGRESQL_IMAGE}
    for component, name in images.items():
        if image := setting(name):
            repository, tag = image.rsplit(":", 1)
            part = f"{component}.image"
            values += [f"{part}.registry=", f"{part}.repository={repository}", f"{part}.tag={tag}"]
    return values


def redis_volume(path: str) -> list[dict[str, Any]]:
    """Returns a claim and its volume, for clusters without a storage class."""
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
