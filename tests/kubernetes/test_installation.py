"""Ways to install Emberscale: the chart with its defaults, and manifests without Helm; and to uninstall it."""

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from api_objects import find, get
from cluster import (
    EVALUATION_RECORDS,
    IMAGE,
    RECORDS,
    REDIS_IMAGE,
    SESSION,
    CommandFailedError,
    Place,
    apply,
    assert_exact,
    eventually,
    kubectl,
    manifest,
    run,
    run_in_pod,
    setting,
    submit,
)
from installation import CHART, RELEASE, SYSTEM, arguments_of, helm_install, image_values

pytestmark = [pytest.mark.timeout(900), pytest.mark.alone]

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PLAIN = "emberscale-system"


def short(name: str, place: Place) -> dict[str, Any]:
    document = manifest(name, place, data={"train": ["/shared/criteo/evaluation.tsv"]})
    del document["spec"]["checkpoint"]["flash"]
    return document


def test_a_second_installation_that_would_act_on_the_same_jobs_is_refused(installed: str) -> None:
    def rendered(*values: str) -> str:
        more = arguments_of(["crds.enabled=false", *values])
        return run("helm", "install", "second", str(CHART), "--namespace", "second", "--dry-run=server", *more)

    of_the_first = "emberscale-operator of the namespace emberscale-e2e already acts on the jobs of"
    for values in ([], ["operator.watchNamespaces={default}"]):
        with pytest.raises(CommandFailedError, match=f"{of_the_first} all namespaces"):
            rendered(*values)
    helm_install(*arguments_of(["operator.watchNamespaces={default}"]))
    try:
        for values in ([], ["operator.watchNamespaces={default,kube-public}"]):
            with pytest.raises(CommandFailedError, match=f"{of_the_first} the namespace default"):
                rendered(*values)
        rendered("operator.watchNamespaces={kube-public}")
    finally:
        helm_install()


@pytest.fixture(scope="module")
def uninstalled(installed: str) -> Iterator[None]:
    """Removes the suite's release while a test runs."""
    run("helm", "uninstall", RELEASE, "-n", SYSTEM, "--wait", timeout=180)
    yield
    helm_install("--take-ownership")


def test_the_chart_as_it_comes_plans_jobs_and_leaves_nothing_but_the_crd(uninstalled: None, place: Place) -> None:
    """Installs Redis, PostgreSQL and the brain in a namespace of their own; the chart claims the volumes."""
    claims = ("emberscale-redis", "emberscale-postgresql")
    folders = {claim: f"/shared/whole-{SESSION}/{claim}" for claim in claims}
    run_in_pod("make-volumes", place, ["sh", "-c", f"mkdir -p -m 777 {' '.join(folders.values())}"], user=0)
    kubectl("create", "namespace", PLAIN)
    apply(*(volume_for(claim, place.folder + folders[claim].removeprefix("/shared")) for claim in claims))
    try:
        helm_install(*whole_chart(), "--take-ownership", namespace=PLAIN)  # of the CRD that the suite's release left
        passwords = [get("secret", claim, PLAIN)["data"]["password"] for claim in claims]
        run("helm", "test", RELEASE, "-n", PLAIN, "--timeout=120s", timeout=150)
        job = submit(unsized("planned", place), place)
        plan = job.wait_complete()["plan"]
        assert plan["brainVersion"] >= 1, plan
        assert "replicas" in plan["worker"], plan
        assert_exact(job, place, 2 * RECORDS)
        assert remembered_by_the_brain(PLAIN) == ["planned"]
        helm_install(*whole_chart(), namespace=PLAIN)
        assert [get("secret", claim, PLAIN)["data"]["password"] for claim in claims] == passwords
        run("helm", "uninstall", RELEASE, "-n", PLAIN, "--wait", timeout=180)
        eventually(lambda: not left_in(PLAIN) or None, "nothing is left in its namespace", seconds=180)
        assert left_of_the_cluster() == ["customresourcedefinition.apiextensions.k8s.io/trainingjobs.emberscale.io"]
    finally:
        run("helm", "uninstall", RELEASE, "-n", PLAIN, "--ignore-not-found", "--wait", timeout=180)
        kubectl("delete", "namespace", PLAIN, timeout=120)
        kubectl("delete", "pv", *claims, "--ignore-not-found", "--wait=false")


def whole_chart() -> list[str]:
    """Returns helm's arguments: the chart's defaults with the suite's images, sized for this small cluster."""
    values = [
        *image_values(),
        "brain.cluster.cpu=2",
        "brain.cluster.memory=6Gi",
        "brain.cluster.largestNodeCpu=1",
        "brain.cluster.largestNodeMemory=3Gi",
        "brain.planning.interval=2s",
        "brain.resources.requests.cpu=50m",
        "operator.resources.requests.cpu=50m",
    ]
    return [*arguments_of(values), "--set-json", "brain.bounds.cpuStep=0.5"]  # --set takes no fractions


def unsized(name: str, place: Place) -> dict[str, Any]:
    """A job that leaves its sizes to the brain."""
    document = manifest(name, place)
    spec = document["spec"]
    spec["training"]["epochs"] = 2
    del spec["checkpoint"]["flash"]
    spec["scaling"] = {"profileInterval": "2s", "cooldown": "10s"}
    for role in ("ps", "worker"):
        spec[role] = {"template": spec[role]["template"], "maxReplicas": 2}
    return document


def volume_for(claim: str, path: str) -> dict[str, Any]:
    """Returns a volume for one of the chart's claims, for clusters without a storage class."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": claim},
        "spec": {
            "hostPath": {"path": path},
            "capacity": {"storage": "5Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": "",
            "claimRef": {"namespace": PLAIN, "name": claim},
        },
    }


def remembered_by_the_brain(namespace: str) -> list[str]:
    """Returns the names of the jobs in the history, read from PostgreSQL directly."""
    command = ["psql", "--username=emberscale", "--tuples-only", "--no-align", "--command=SELECT name FROM jobs"]
    return kubectl("exec", "-n", namespace, "statefulset/emberscale-postgresql", "--", *command).split()


def left_in(namespace: str) -> list[str]:
    """Returns every object in a namespace, except Events and what Kubernetes puts into every namespace."""
    kinds = kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
    asked = ",".join(kind for kind in kinds if not kind.startswith("events"))
    found = kubectl("get", asked, "-n", namespace, "-o", "name", "--ignore-not-found").split()
    return sorted(set(found) - {"configmap/kube-root-ca.crt", "serviceaccount/default"})


def left_of_the_cluster() -> list[str]:
    """Returns cluster-wide objects named after the product, except namespaces, volumes and what a CRD brings along."""
    kinds = kubectl("api-resources", "--namespaced=false", "--verbs=list", "-o", "name").split()
    found = kubectl("get", ",".join(kinds), "-o", "name", "--ignore-not-found").split()
    others = ("apiservice.apiregistration.k8s.io/", "persistentvolume/", "namespace/")
    return [name for name in found if "emberscale" in name and not name.startswith(others)]


def test_plain_manifests_work_without_helm(uninstalled: None, place: Place, tmp_path: Path) -> None:
    """Follows deploy/kustomization.yaml, with the names of the images edited in it."""
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
    volume = volume_for("emberscale-redis", f"{place.folder}/redis-plain")
    apply(volume)
    try:
        kubectl("apply", "-f", str(folder / "namespace.yaml"))
        make_password_of_redis()
        kubectl("apply", "-k", str(folder))
        for deployment in ("emberscale-redis", "emberscale-operator"):
            kubectl("rollout", "status", f"deployment/{deployment}", "-n", PLAIN, "--timeout=120s", timeout=150)
        job = submit(short("plain", place), place)
        job.wait_complete()
        assert_exact(job, place, EVALUATION_RECORDS)
    finally:
        kubectl("delete", "-k", str(folder), "--ignore-not-found", timeout=240)
        kubectl("delete", "pv", "emberscale-redis", "--ignore-not-found", "--wait=false")
    assert find("namespace", PLAIN, "default") is None
    assert find("crd", "trainingjobs.emberscale.io", "default") is None
    assert left_of_the_cluster() == []


def make_password_of_redis() -> None:
    """Creates the Secret as deploy/kustomization.yaml says."""
    password = secrets.token_hex(32)
    url = f"redis://:{password}@emberscale-redis.{PLAIN}.svc.cluster.local:6379/0"
    given = f"password={password}\nurl={url}\n"
    kubectl("create", "secret", "generic", "emberscale-redis", "-n", PLAIN, "--from-env-file=/dev/stdin", stdin=given)
