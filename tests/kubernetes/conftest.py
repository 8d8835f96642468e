"""The end-to-end suite: it runs on the cluster that KUBECONFIG names, where cluster.sh has loaded the image."""

from collections.abc import Iterator

import pytest

from cluster import IMAGE, KEEP, ROWS, SHARED_FOLDER, Place, apply, kubectl, run, run_in_pod, setting
from faults import ProcessKiller, process_killer
from installation import RELEASE, SYSTEM, helm_install, redis_volume


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks back at the session, or breaks what others need, comes last."""
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


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
    apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
    kubectl("delete", "pod", "prepare-data", "-n", SYSTEM, "--ignore-not-found")
    script = (
        f"mkdir -p /shared/checkpoints /shared/redis /shared/redis-plain && "
        f"(test -f /shared/criteo/metadata.json || "
        f"emberscale data synth /shared/criteo --rows {ROWS} --seed 1 --parts 2) && chmod -R a+rwX /shared"
    )
    run_in_pod("prepare-data", Place(SYSTEM, folder), ["sh", "-c", script], user=0)
    yield folder
    if not setting(KEEP):
        kubectl("delete", "namespace", SYSTEM, "--wait=true", timeout=180)


@pytest.fixture(scope="session")
def installed(image: str, shared_folder: str) -> Iterator[str]:
    """The chart, installed with Redis on a volume; the name of the release."""
    apply(*redis_volume(f"{shared_folder}/redis"), namespace=SYSTEM)
    helm_install()
    yield RELEASE
    if not setting(KEEP):
        run("helm", "uninstall", RELEASE, "-n", SYSTEM, "--ignore-not-found", "--wait", timeout=180)
        kubectl("delete", "pv", "emberscale-e2e-redis", "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def killer(installed: str) -> Iterator[ProcessKiller]:
    """Something that kills processes on their nodes."""
    with process_killer() as found:
        yield found


@pytest.fixture
def place(installed: str, shared_folder: str, request: pytest.FixtureRequest) -> Iterator[Place]:
    """A namespace of the test's own; its jobs end with it."""
    name = request.node.name.split("[")[0].removeprefix("test_").replace("_", "-")[:40].strip("-")
    kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=true", timeout=180)
    kubectl("create", "namespace", name)
    yield Place(name, shared_folder)
    kubectl("delete", "namespace", name, "--wait=false")
