"""Images of two versions: within a job, and under an operator that is upgraded and rolled back."""

import json
from collections.abc import Iterator

import pytest

from api_objects import get
from cluster import (
    ENDLESS,
    IMAGE,
    NEXT_IMAGE,
    Job,
    Place,
    assert_exact_so_far,
    eventually,
    kubectl,
    manifest,
    setting,
    submit,
)
from faults import ProcessKiller
from installation import arguments_of, helm_install

pytestmark = [pytest.mark.timeout(900), pytest.mark.alone]

CRD = "trainingjobs.emberscale.io"
KNOB = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/training/properties/futureKnob"


@pytest.fixture
def next_image(installed: str) -> Iterator[str]:
    """An image of a future version; restores the installation afterwards."""
    name = setting(NEXT_IMAGE)
    if not name:
        pytest.skip(f"NOT RUN: {NEXT_IMAGE} is not set: there is no second image")
    yield name
    helm_install()


def install_the_newer_definition() -> None:
    """Updates the CRD before the operator, as helm does: the older operator sees an unknown field for a while."""
    knob = {"op": "add", "path": KNOB, "value": {"type": "integer", "default": 7}}
    kubectl("patch", "crd", CRD, "--type=json", "-p", json.dumps([knob]))


def operator_of(image: str) -> None:
    """Installs the operator of this image; the CRD stays that of the newer version."""
    repository, tag = image.rsplit(":", 1)
    of_all = [f"image.repository={repository}", f"image.tag={tag}", "controlPlane.image.repository="]
    helm_install(*arguments_of([*of_all, "crds.enabled=false"]))


def job_of(name: str, place: Place, workers: str) -> Job:
    """Submits a job whose workers have their own image."""
    document = manifest(name, place, epochs=ENDLESS)
    template = document["spec"]["worker"]["template"]
    document["spec"]["worker"]["template"] = {**template, "image": workers}
    return submit(document, place)


def images(job: Job) -> dict[str, str]:
    """Returns the image of the running pods, by role."""
    pods = [pod for role in ("master", "ps", "worker") for pod in job.running(role)]
    return {pod["metadata"]["labels"]["emberscale.io/role"]: pod["spec"]["containers"][0]["image"] for pod in pods}


def uids(job: Job, *roles: str) -> set[str]:
    return {pod["metadata"]["uid"] for role in roles for pod in job.running(role)}


def replaced(job: Job, role: str, killer: ProcessKiller) -> None:
    """Kills a pod's processes; waits until another pod has taken over and training goes on."""
    old = job.running(role)[0]
    killer.kill(old)

    def another() -> bool:
        return old["metadata"]["uid"] not in uids(job, role) and len(job.running(role)) > 0

    eventually(lambda: another() or None, f"another {role} of {job.name}", seconds=180)
    samples = job.samples()
    job.wait_for_samples(samples + 1)


def test_jobs_keep_their_image_and_neighbouring_versions_work_together(
    next_image: str, place: Place, killer: ProcessKiller
) -> None:
    this = setting(IMAGE)
    older = job_of("older", place, workers=next_image)
    older.wait_for_samples(1)
    assert images(older) == {"master": this, "ps": this, "worker": next_image}
    before = uids(older, "master", "ps", "worker")

    install_the_newer_definition()
    eventually(lambda: "futureKnob" in older.read()["spec"]["training"], "the job has the new field", seconds=180)
    older.wait_for_samples(older.samples() + 1)
    assert older.condition("Progressing")["status"] == "True"
    operator_of(next_image)
    newer = manifest("newer", place)
    newer["spec"]["training"] |= {"epochs": ENDLESS, "futureKnob": 9}
    newer["spec"]["worker"]["template"] = {**newer["spec"]["worker"]["template"], "image": this}
    late = submit(newer, place)
    late.wait_for_samples(1)
    assert images(late) == {"master": next_image, "ps": next_image, "worker": this}
    assert uids(older, "master", "ps", "worker") == before, "an upgrade has replaced pods"
    replaced(older, "master", killer)
    assert images(older)["master"] == this

    kept = uids(late, "ps", "worker")
    operator_of(this)
    replaced(late, "master", killer)
    assert images(late)["master"] == next_image
    assert uids(late, "ps", "worker") == kept, "going back has replaced pods"
    manifests = [
        text for one in get("configmaps", namespace=place.namespace) for text in (one.get("data") or {}).values()
    ]
    of_newer = [text for text in manifests if '"name":"newer"' in text]
    assert of_newer
    assert all(json.loads(text)["spec"]["training"]["futureKnob"] == 9 for text in of_newer)
    for job in (older, late):
        assert_exact_so_far(job, place)
    assert (older.status()["image"], late.status()["image"]) == (this, next_image)
