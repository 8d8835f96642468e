"""One list of fields that must not change: for a checkpoint, a run, or a resource on a cluster."""

import re
from pathlib import Path
from typing import Any

import pytest

from emberscale_api.job import Keeper, broken_fields, differences, fixed_fields
from emberscale_api.job.crd import custom_resource_definition
from training_jobs import training_job

SCHEMA = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


@pytest.mark.parametrize(
    ("changed", "path", "keeper"),
    [
        ({"training": {"batchSize": 7}}, "spec.training.batchSize", Keeper.CHECKPOINT),
        ({"model": {"topMlp": [7]}}, "spec.model.topMlp", Keeper.MODEL),
        ({"optimizers": {"sparse": {"type": "Adam"}}}, "spec.optimizers.sparse.type", Keeper.MODEL),
        ({"data": {"train": ["b.tsv"]}}, "spec.data.train", Keeper.RUN),
        ({"checkpoint": {"uri": "s3://b"}}, "spec.checkpoint.uri", Keeper.RUN),
        ({"name": "b"}, "metadata.name", Keeper.RUN),
        ({"optimizers": {"sparse": {"learningRate": 0.2}}}, "spec.optimizers.sparse.learningRate", Keeper.RESOURCE),
        ({"training": {"epochs": 7}}, "spec.training.epochs", Keeper.RESOURCE),
        ({"data": {"train": ["/data/train.tsv"], "maxBadRecords": 9}}, "spec.data.maxBadRecords", Keeper.RESOURCE),
        ({"worker": {"replicas": 9}}, "spec.worker.replicas", None),
    ],
)
def test_a_difference_is_named_and_refused_by_those_who_keep_the_field(
    changed: dict[str, Any], path: str, keeper: Keeper | None
) -> None:
    before, now = training_job(), training_job(**changed)
    assert [one.path for one in differences(before, now)] == [path]
    refusing = [one for one in Keeper if broken_fields(before, now, one)]
    assert refusing == [one for one in Keeper if keeper is not None and one >= keeper]


def test_manifests_that_say_the_same_do_not_differ() -> None:
    assert differences(training_job(), training_job(training={"epochs": 1}, ps={})) == ()


def test_the_docs_name_what_must_stay_and_nothing_else() -> None:
    text = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")
    section = text.partition("What must stay the same:")[2].partition("Everything else")[0]
    assert sorted(re.findall(r"`((?:spec|metadata)\.[\w.]+)`", section)) == sorted(fixed_fields(Keeper.RUN))


def test_the_definition_refuses_edits_of_just_those_fields() -> None:
    spec = SCHEMA["properties"]["spec"]
    refused = [
        rule["message"].partition(" ")[0]
        for schema in (spec, *spec["properties"].values())
        for rule in schema.get("x-kubernetes-validations", ())
        if "oldSelf" in rule["rule"]
    ]
    # a resource's name cannot change anyway
    assert sorted(refused) == sorted(set(fixed_fields(Keeper.RESOURCE)) - {"metadata.name"})
