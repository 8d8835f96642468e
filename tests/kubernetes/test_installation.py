"""Ways to install Emberscale: without Helm, for some namespaces only, with two operators, and not any more."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import (
    EVALUATION_RECORDS,
    IMAGE,
    REDIS_IMAGE,
    Place,
    apply,
    assert_exact,
    eventually,
    find,
    get,
    kubectl,
    manifest,
    run,
    setting,
    submit,
)
from faults import ProcessKiller, is_live
from installation import OPERATOR, RELEASE, SYSTEM, helm_install, redis_volume

pytestmark = pytest.mark.timeout(900)

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PLAIN = "emberscale-system"


def short(name: str, place: Place) -> dict[str, Any]:
    document = manifest(name, place)
    document["spec"]["data"] = {"train": ["/shared/criteo/evaluation.tsv"]}
    return document


@pytest.fixture
def uninstalled(installed: str) -> Iterator[None]:
    """The release is gone while the test runs."""
    run("helm", "uninstall", RELEASE, "-n", SYSTEM, "--wait", timeout=180)
    yield
    helm_install()


def test_uninstalling_leaves_nothing_but_the_crd(uninstalled: None) -> None:
    left = kubectl(
        "get", "all,secrets,configmaps,roles,rolebindings,serviceaccounts", "-n", SYSTEM, "-o", "name"
    ).split()
    of_kubernetes = ("configmap/kube-root-ca.crt", "serviceaccount/default")
    of_the_suite = ("emberscale-e2e-killer", "prepare-data")
    assert [name for name in left if name not in of_kubernetes and not any(own in name for own in of_the_suite)] == []
    assert "emberscale" not in kubectl("get", "clusterroles,clusterrolebindings", "-o", "name")
    assert find("crd", "trainingjobs.emberscale.io", "default") is not None


def test_plain_manifests_work_without_helm(uninstalled: None, place: Place, tmp_path: Path) -> None:
    """As deploy/kustomization.yaml says: with the names of the images edited in it."""
    folder = tmp_path / "deploy"
    shutil.copytree(DEPLOY, folder)
    file = folder / "kustomization.yaml"
    document = yaml.safe_load(file.read_text())
    names = {"emberscale": setting(IMAGE), "docker.io/library/redis": setting(REDIS_IMAGE)}
    document["images"] = [
        {"name": name, "newName": image.rpartition(":")[0], "newTag": image.rpartition(":")[2]}
        for name, image in names.items()
        if image
    ]
    file.write_text(yaml.safe_dump(document))
    volume, _ = redis_volume(f"{place.folder}/redis-plain")
    volume["metadata"] = {"name": "emberscale-e2e-plain"}
    volume["spec"]["capacity"] = {"storage": "2Gi"}
    volume["spec"]["claimRef"] = {"namespace": PLAIN, "name": "emberscale-redis"}
    apply(volume)
    try:
        kubectl("apply", "-k", str(folder))
        for deployment in ("emberscale-redis", "emberscale-operator"):
            kubectl("rollout", "status", f"deployment/{deployment}", "-n", PLAIN, "--timeout=120s", timeout=150)
        job = submit(short("plain", place), place)
        job.wait_complete()
        assert_exact(job, place, EVALUATION_RECORDS)
    finally:
        kubectl("delete", "-k", str(folder), "--ignore-not-found", timeout=240)
        kubectl("delete", "pv", "emberscale-e2e-plain", "--ignore-not-found", "--wait=false")
    assert find("namespace", PLAIN, "default") is None
    assert find("crd", "trainingjobs.emberscale.io", "default") is None
    assert "emberscale" not in kubectl("get", "clusterroles,clusterrolebindings", "-o", "name")


def test_jobs_in_a_namespace_that_is_not_watched_are_left_alone(
    installed: str, place: Place, shared_folder: str
) -> None:
    elsewhere = Place("elsewhere", shared_folder)
    kubectl("create", "namespace", elsewhere.namespace)
    helm_install("--set", f"operator.watchNamespaces={{{place.namespace}}}")
    try:
        ignored = submit(short("ignored", elsewhere), elsewhere)
        watched = submit(short("watched", place), place)
        watched.wait_complete()
        assert ignored.pods() == []
        assert "status" not in ignored.read()
    finally:
        helm_install()
    ignored.wait_complete()
    kubectl("delete", "namespace", elsewhere.namespace, "--wait=false")


def test_of_two_operators_one_acts_and_the_other_takes_over(
    installed: str, place: Place, killer: ProcessKiller
) -> None:
    def holder() -> str:
        return str(get("lease", "emberscale-operator", SYSTEM)["spec"].get("holderIdentity") or "")

    def live() -> dict[str, Any]:
        return {
            pod["metadata"]["name"]: pod for pod in get("pods", namespace=SYSTEM, selector=OPERATOR) if is_live(pod)
        }

    helm_install("--set", "operator.replicas=2")
    try:
        first = eventually("one of the two leads", lambda: holder() if holder() in live() else None, seconds=60)
        assert len(live()) == 2
        job = submit(short("handed-over", place), place)
        eventually("its pods", lambda: len(job.pods()) >= 5 or None, seconds=60)
        kubectl("delete", "pod", first, "-n", SYSTEM, "--grace-period=0", "--force")
        eventually("the other leads", lambda: (holder() in live() and holder() != first) or None, seconds=60)
        job.wait_complete()
        names = [event["message"] for event in job.events() if event["reason"].startswith("Created")]
        assert len(names) == len(set(names)), names
        assert_exact(job, place, EVALUATION_RECORDS)
    finally:
        helm_install()
