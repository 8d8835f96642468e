"""Unknown fields of a newer version: a process keeps and ignores them, but refuses them in a user's manifest."""

import json
import zlib
from typing import Any

import pytest

from emberscale_api.checkpoint import CheckpointManifest, DamagedCheckpointError
from emberscale_api.job import ManifestError, TrainingJob, parse_manifest

PLACES = ("", "spec", "spec.training", "spec.worker", "spec.worker.template", "spec.optimizers.sparse", "spec.data")


def document() -> dict[str, Any]:
    spec = {
        "data": {"train": ["/data/train.tsv"]},
        "training": {},
        "worker": {"template": {}},
        "optimizers": {"sparse": {}},
    }
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "ctr"},
        "spec": spec,
    }


def at(place: str, part: Any) -> Any:
    for name in filter(None, place.split(".")):
        part = part[name]
    return part


def newer(place: str) -> dict[str, Any]:
    """Returns a manifest with fields that no version knows yet."""
    made = document()
    at(place, made)["fromTheFuture"] = {"deeply": [1, {"nested": "x"}]}
    return made


@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_field_travels_through_a_process_that_does_not_know_it(place: str) -> None:
    text = TrainingJob.from_json(json.dumps(newer(place))).to_json()
    again = json.loads(TrainingJob.from_json(text).to_json())
    assert at(place, again)["fromTheFuture"] == {"deeply": [1, {"nested": "x"}]}


@pytest.mark.parametrize("place", PLACES)
def test_a_field_that_a_person_mistyped_is_refused_at_the_door(place: str) -> None:
    with pytest.raises(ManifestError, match="fromTheFuture: unknown field"):
        parse_manifest(newer(place))


def checkpoint(**more: Any) -> CheckpointManifest:
    base: dict[str, Any] = {
        "id": "1",
        "number": 1,
        "created": "2026-01-01T00:00:00Z",
        "job_uid": "uid",
        "job": document(),
        "ps_count": 1,
        "generation": 1,
        "routing_version": 1,
        "epoch": 0,
        "batch_size": 8,
        "training_records": 8,
        "applied": [{"epoch": 0, "ranges": [[0, 1]]}],
        "evaluations": [],
        "training_files": [],
        "evaluation_files": [],
        "training_seconds": 0.1,
        "files": [],
    }
    return CheckpointManifest.model_validate({**base, **more}, extra="allow")


def test_a_checkpoint_of_a_newer_version_is_read_and_its_seal_holds() -> None:
    text = checkpoint(job=newer("spec.training"), tier="flash").to_json()
    read = CheckpointManifest.from_json(text, "manifest.json")
    assert json.loads(read.to_json()) == json.loads(text)
    assert json.loads(text)["job"]["spec"]["training"]["fromTheFuture"]
    assert json.loads(text)["tier"] == "flash"


def test_a_checkpoint_of_an_older_version_is_read_and_its_seal_holds() -> None:
    """The checkpoint lacks fields. Their defaults are filled in on reading, and the seal does not cover them."""
    document = json.loads(checkpoint().to_json())
    del document["job"]["spec"]["checkpoint"]["keep"]
    sealed = zlib.crc32(json.dumps({**document, "seal": 0}, sort_keys=True, separators=(",", ":")).encode())
    text = json.dumps({**document, "seal": sealed})
    assert CheckpointManifest.from_json(text, "manifest.json").job == checkpoint().job


@pytest.mark.parametrize("change", [("id", "2"), ("tier", "none")])
def test_a_change_breaks_the_seal_also_of_what_is_not_known(change: tuple[str, str]) -> None:
    document = json.loads(checkpoint(tier="flash").to_json())
    document[change[0]] = change[1]
    with pytest.raises(DamagedCheckpointError, match="was altered"):
        CheckpointManifest.from_json(json.dumps(document), "manifest.json")
