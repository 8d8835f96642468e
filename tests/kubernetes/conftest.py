"""The end-to-end suite: it runs on the cluster that KUBECONFIG names, where cluster.sh has loaded the image."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import IMAGE, REDIS_IMAGE, SHARED_FOLDER, Place, apply, eventually, get, kubectl, run, setting

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "emberscale"
RELEASE = "emberscale"
SYSTEM = "emberscale-e2e"
ROWS = 60_000


@pytest.fixture(scope="session")
def image() -> str:
    """The image under test; without one there is no cluster to test on."""
    name = setting(IMAGE)
    if not name:
        pytest.skip(
            f"NOT RUN: no cluster: {IMAGE} is not set; tests/kubernetes/cluster.sh starts one", allow_module_level=True
        )
    return name


@pytest.fixture(scope="session")
def shared_folder(image: str) -> Iterator[str]:
    """A folder of the nodes, with data below criteo/, that every pod may write."""
    folder = setting(SHARED_FOLDER, "/var/tmp/emberscale-e2e")
    kubectl("create", "namespace", SYSTEM)
    script = (
        f"set -e; mkdir -p /shared/checkpoints /shared/redis; "
        f"emberscale data synth /shared/criteo --rows {ROWS} --seed 1 --parts 2; chmod -R a+rwX /shared"
    )
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "prepare-data"},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": 0},
            "containers": [
                {
                    "name": "prepare",
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": ["sh", "-c", script],
                    "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
                }
            ],
            "volumes": [{"name": "shared", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}],
        },
    }
    apply(pod, namespace=SYSTEM)

    def ended() -> str | None:
        phase = str(get("pod", "prepare-data", SYSTEM)["status"].get("phase"))
        return phase if phase in ("Succeeded", "Failed") else None

    phase = eventually("data is written", ended, seconds=240)
    assert phase == "Succeeded", kubectl("logs", "prepare-data", "-n", SYSTEM)
    yield folder
    kubectl("delete", "namespace", SYSTEM, "--wait=true", timeout=180)


@pytest.fixture(scope="session")
def installed(image: str, shared_folder: str) -> Iterator[str]:
    """The chart, installed with Redis on a volume; the name of the release."""
    apply(*redis_volume(f"{shared_folder}/redis"), namespace=SYSTEM)
    helm_install()
    yield RELEASE
    run("helm", "uninstall", RELEASE, "-n", SYSTEM, "--ignore-not-found", "--wait", timeout=180)
    kubectl("delete", "pv", "emberscale-e2e-redis", "--ignore-not-found", "--wait=false")


@pytest.fixture
def place(installed: str, shared_folder: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A namespace of the test's own; its jobs end with it."""
    name = request.node.name.split("[")[0].removeprefix("test_").replace("_", "-")[:40].strip("-")
    kubectl("create", "namespace", name)
    yield Place(name, shared_folder)
    kubectl("delete", "namespace", name, "--wait=true", timeout=180)


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
    ]
    redis = setting(REDIS_IMAGE)
    if redis:
        repository, tag = redis.rsplit(":", 1)
        values += ["redis.image.registry=", f"redis.image.repository={repository}", f"redis.image.tag={tag}"]
    return values


def redis_volume(path: str) -> list[dict[str, object]]:
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
