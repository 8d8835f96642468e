"""Jobs as tenants: what one team's people and pods can read gives no access to another team's jobs."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api_objects import get
from cluster import (
    ENDLESS,
    CommandFailedError,
    Job,
    Place,
    apply,
    audit,
    eventually,
    kubectl,
    manifest,
    run_in_pod,
    submit,
)
from faults import running
from installation import REDIS, SYSTEM, arguments_of, helm_install

pytestmark = pytest.mark.timeout(1200)

SUPPORT = Path(__file__).resolve().parents[1] / "support"
TEAM = "mallory"
BRAIN = f"emberscale-brain.{SYSTEM}.svc.cluster.local:50061"


@pytest.fixture
def brain(installed: str) -> Iterator[None]:
    """Adds a brain to the release while the test runs."""
    values = [
        "brain.enabled=true",
        "brain.cluster.cpu=4",
        "brain.cluster.memory=12Gi",
        "brain.planning.interval=2s",
        "brain.resources.requests.cpu=50m",
        "postgresql.persistence.enabled=false",
    ]
    helm_install(*arguments_of(values))
    yield
    helm_install()


@pytest.fixture
def team(shared_folder: str) -> Iterator[Place]:
    """A namespace in which a person has the `edit` role; the person has no rights elsewhere."""
    kubectl("create", "namespace", TEAM)
    kubectl("create", "rolebinding", "edit", "-n", TEAM, "--clusterrole=edit", f"--user={TEAM}")
    yield Place(TEAM, shared_folder)
    kubectl("delete", "namespace", TEAM, "--wait=false")


def as_mallory(*arguments: str, stdin: str | None = None) -> str:
    return kubectl(*arguments, f"--as={TEAM}", "--as-group=system:authenticated", stdin=stdin)


def may(verb: str, kind: str, namespace: str) -> bool:
    try:
        return as_mallory("auth", "can-i", verb, kind, "-n", namespace).strip() == "yes"
    except CommandFailedError:
        return False


def readable() -> list[str]:
    """Returns every text that the person can read in the namespace: of Secrets, ConfigMaps and pods."""
    texts = []
    for kind in ("secrets", "configmaps", "pods"):
        for document in json.loads(as_mallory("get", kind, "-n", TEAM, "-o", "json"))["items"]:
            texts.append(json.dumps(document))
            if kind == "secrets":
                texts += [base64.b64decode(text).decode() for text in document["data"].values()]
    return texts


def values_of(secret: str) -> set[str]:
    """Returns the values in a Secret of the installation."""
    return {base64.b64decode(text).decode() for text in get("secret", secret, SYSTEM)["data"].values()}


def job_of(name: str, place: Place) -> Job:
    """Submits a job that trains until it is suspended or deleted, so that it outlasts even a slow attack."""
    document = manifest(name, place, epochs=ENDLESS)
    document["spec"]["scaling"] = {"profileInterval": "2s"}
    return submit(document, place)


def master_of(job: Job) -> str:
    return f"{job.name}-master.{job.namespace}.svc.cluster.local:7070"


def wait_until_known_to_the_brain(job: Job) -> None:
    def known() -> bool:
        master = job.running("master")[0]["metadata"]["name"]
        return "job_submitted" in kubectl("logs", "-n", job.namespace, master)

    eventually(lambda: known() or None, "it is known to the brain", seconds=180)


def users_of_redis() -> str:
    pod = running(REDIS)["metadata"]["name"]
    return kubectl("exec", "-n", SYSTEM, pod, "--", "redis-cli", "acl", "users")


@pytest.mark.alone
def test_what_a_team_can_read_opens_nothing_of_another_teams_job(brain: None, place: Place, team: Place) -> None:
    victim, own = job_of("victim", place), job_of("mallorys", team)
    for job in (victim, own):
        job.wait_for_samples(1)
        wait_until_known_to_the_brain(job)
    uids = {job.name: str(job.read()["metadata"]["uid"]) for job in (victim, own)}
    found = readable()
    for secret in ("emberscale-redis", "emberscale-brain", "emberscale-postgresql"):
        assert not [text for text in found if any(value in text for value in values_of(secret))], secret
    assert may("get", "secrets", TEAM)
    assert may("create", "pods", TEAM)
    for namespace in (place.namespace, SYSTEM):
        assert not may("get", "secrets", namespace)
        assert not may("create", "pods", namespace)

    secrets = {text for text in found if "\n" not in text and " " not in text}
    given = {
        "redis": sorted(text for text in secrets if text.startswith("redis://")),
        "tokens": sorted(text for text in secrets if text.isascii() and not text.startswith("redis://")),
        "brain": BRAIN,
        "victim": uids["victim"],
        "own": uids["mallorys"],
        "masters": {"victim": master_of(victim), "own": master_of(own)},
    }
    assert given["redis"]
    said = attack(given, team)
    assert said["open"] == []
    assert said["tried"] > 40, said
    assert {what.split()[0] for what in said["own"]} == {"brain", "master"}, said

    # the deleted job's user goes too; the other job keeps its user, and trains on undisturbed
    kubectl("delete", "trainingjob", own.name, "-n", TEAM, "--wait=false")
    eventually(lambda: uids["mallorys"] not in users_of_redis() or None, "its user is gone", seconds=180)
    assert uids["victim"] in users_of_redis()
    victim.wait_for_samples(victim.samples() + 1)
    kubectl("patch", "tj", "victim", "-n", place.namespace, "--type=merge", "-p", '{"spec": {"suspend": true}}')
    eventually(lambda: victim.phase() == "Suspended" or None, "it rests", seconds=180)
    counted = audit(victim, place)
    assert counted["once"] >= victim.samples() > 0
    assert (counted["repeated"], counted["contradictions"]) == (0, [])


def attack(given: dict[str, Any], place: Place) -> dict[str, Any]:
    """Runs the attacks from a pod labelled as a master; returns their outcomes."""
    files = {name: (SUPPORT / name).read_text() for name in ("redis_attacker.py", "attacker.py")}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "attack"}, "data": files}
    apply(config, namespace=place.namespace)
    command = ["python", "/attack/attacker.py", json.dumps(given)]
    labels = {"emberscale.io/role": "master", "emberscale.io/job-name": "victim"}
    said: dict[str, Any] = json.loads(run_in_pod("attacker", place, command, labels=labels, files="attack"))
    return said


def test_redis_is_bounded_and_shows_no_password(installed: str) -> None:
    pod = running(REDIS)["metadata"]["name"]

    def inside(*command: str) -> str:
        return kubectl("exec", "-n", SYSTEM, pod, "--", *command)

    assert inside("redis-cli", "config", "get", "maxmemory").split() == ["maxmemory", str(3 * (512 << 20) // 4)]
    arguments = inside("cat", "/proc/1/cmdline")
    assert "redis-server" in arguments
    assert not [value for value in values_of("emberscale-redis") if value in arguments]
