"""What a real API server answers to bad manifests. Needs the CRD on the cluster that KUBECONFIG names."""

import json
import os
import shutil
import subprocess
from typing import Any

import pytest

from training_jobs import job_body

if not (os.environ.get("KUBECONFIG") and shutil.which("kubectl")):
    pytest.skip("no cluster: set KUBECONFIG and put kubectl on the PATH", allow_module_level=True)

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": None}, "spec.data: Required value"),
    "no training files": ({"data": {"train": []}}, "spec.data.train: Invalid value"),
    "an empty path": ({"data": {"train": [""]}}, "should be at least 1 chars long"),
    "an unknown format": ({"data": {"train": ["x"], "format": "Avro"}}, 'supported values: "CriteoTSV"'),
    "columns of a format that fixes them": (
        {"data": {"train": ["x"], "columns": {"label": "y", "categorical": ["a"]}}},
        "columns must not be given for format CriteoTSV",
    ),
    "no columns": ({"data": {"train": ["x"], "format": "CSV"}}, "columns is required for the formats Parquet and CSV"),
    "columns without ids": (
        {"data": {"train": ["x"], "format": "CSV", "columns": {"label": "y", "dense": ["a"]}}},
        "name at least one column in categorical or lists",
    ),
    "an unknown field": ({"trainig": {}}, 'unknown field "spec.trainig"'),
    "an unknown nested field": ({"training": {"batchsize": 5}}, 'unknown field "spec.training.batchsize"'),
    "text for a number": ({"training": {"batchSize": "many"}}, "spec.training.batchSize: Invalid value"),
    "a batch of nothing": ({"training": {"batchSize": 0}}, "greater than or equal to 1"),
    "no epoch": ({"training": {"epochs": 0}}, "spec.training.epochs"),
    "a negative seed": ({"training": {"seed": -1}}, "spec.training.seed"),
    "negative bad records": ({"data": {"train": ["x"], "maxBadRecords": -1}}, "spec.data.maxBadRecords"),
    "an unknown model": ({"model": {"architecture": "GPT"}}, 'supported values: "DLRM"'),
    "a layer of nothing": ({"model": {"bottomMlp": [64, 0]}}, "spec.model.bottomMlp[1]"),
    "a dimension of nothing": ({"model": {"embeddings": {"dimension": 0}}}, "spec.model.embeddings.dimension"),
    "a table that is no column": ({"model": {"embeddings": {"tables": {"C27": {}}}}}, "CriteoTSV has C1 to C26"),
    "a table of another dimension": (
        {"model": {"embeddings": {"tables": {"C1": {"dimension": 8}}}}},
        "all dimensions must be equal",
    ),
    "an unknown optimizer": ({"optimizers": {"sparse": {"type": "Lion"}}}, "spec.optimizers.sparse.type"),
    "an optimizer of rows for dense": ({"optimizers": {"dense": {"type": "FTRL"}}}, "are for embeddings"),
    "a learning rate of 0": ({"optimizers": {"sparse": {"learningRate": 0}}}, "should be greater than 0"),
    "a momentum of 1": ({"optimizers": {"dense": {"momentum": 1}}}, "should be less than 1"),
    "no worker": ({"worker": {"replicas": 0}}, "spec.worker.replicas"),
    "too many PS": ({"ps": {"replicas": 2000}}, "less than or equal to 1024"),
    "both ways to size": ({"worker": {"replicas": 2, "minReplicas": 1}}, "give either replicas, or minReplicas"),
    "min above max": ({"worker": {"minReplicas": 4, "maxReplicas": 2}}, "minReplicas must not be above maxReplicas"),
    "a quantity that is none": ({"ps": {"resources": {"limits": {"memory": "2GB"}}}}, "resources.limits.memory"),
    "a limit of 0": ({"ps": {"resources": {"limits": {"cpu": 0}}}}, "must be above 0 and at most 8Pi"),
    "more memory than messages can hold": (
        {"ps": {"resources": {"limits": {"memory": "8193Ti"}}}},
        "must be above 0 and at most 8Pi",
    ),
    "a budget that is no quantity": ({"hotEmbeddings": {"budget": "256MB"}}, "spec.hotEmbeddings.budget"),
    "requests above limits": (
        {"ps": {"resources": {"limits": {"memory": "1Gi"}, "requests": {"memory": "2Gi"}}}},
        "requests.memory must not be above limits.memory",
    ),
    "shards min above max": ({"sharding": {"minBatches": 9, "maxBatches": 3}}, "minBatches must not be above"),
    "a lease that is too short": ({"sharding": {"leaseTimeout": "1s"}}, "at least twice heartbeatInterval"),
    "a duration that is none": ({"checkpoint": {"interval": "5 minutes"}}, "spec.checkpoint.interval"),
    "a checkpoint every 0 seconds": ({"checkpoint": {"interval": 0}}, "must be above 0"),
    "a folder without a name": ({"checkpoint": {"uri": ""}}, "spec.checkpoint.uri"),
    "a scheme without slashes": ({"checkpoint": {"uri": "s3:/bucket/job"}}, "spec.checkpoint.uri"),
    "a start in its own checkpoints": (
        {"checkpoint": {"uri": "/own", "initialFrom": {"uri": "/own"}}},
        "initialFrom.uri must differ from uri",
    ),
    "a checkpoint that is named by a number": (
        {"checkpoint": {"initialFrom": {"uri": "/another", "id": 8}}},
        "spec.checkpoint.initialFrom.id in body must be of type string",
    ),
    "a checkpoint that is named by a short number": (
        {"checkpoint": {"initialFrom": {"uri": "/another", "id": "8"}}},
        "spec.checkpoint.initialFrom.id in body should match",
    ),
    "data that goes on from nothing": (
        {"data": {"train": ["x"], "continuation": "Append"}},
        "data.continuation needs checkpoint.initialFrom",
    ),
    "weights of five bits": ({"checkpoint": {"quantization": 5}}, "spec.checkpoint.quantization"),
    "no checkpoint kept": ({"checkpoint": {"keep": 0}}, "spec.checkpoint.keep"),
    "a negative backoffLimit": ({"runPolicy": {"backoffLimit": -1}}, "spec.runPolicy.backoffLimit"),
    "a negative TTL": ({"runPolicy": {"ttlAfterFinished": -5}}, "must not be negative"),
    "an unknown cleanPodPolicy": ({"runPolicy": {"cleanPodPolicy": "Some"}}, 'supported values: "Running"'),
    "a deadline of 0": ({"runPolicy": {"activeDeadline": "0s"}}, "must be above 0"),
    "an unknown scaling mode": ({"scaling": {"mode": "Magic"}}, "spec.scaling.mode"),
    "a mount without its volume": (
        {"ps": {"template": {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}}},
        "each must name one of the volumes",
    ),
    "a variable of ours": ({"ps": {"template": {"env": [{"name": "EMBERSCALE_ROLE", "value": "x"}]}}}, "EMBERSCALE_"),
    "a variable of two values": (
        {"ps": {"template": {"env": [{"name": "A", "value": "x", "valueFrom": {"fieldRef": {"fieldPath": "a"}}}]}}},
        "give either value or valueFrom",
    ),
}
FIXED: dict[str, dict[str, Any]] = {
    "model": {"model": {"bottomMlp": [8]}},
    "data": {"data": {"train": ["other"]}},
    "optimizers": {"optimizers": {"dense": {"type": "SGD"}}},
    "training": {"training": {"epochs": 7}},
    "sharding": {"sharding": {"maxBatches": 100}},
    "checkpoint.uri": {"checkpoint": {"uri": "/elsewhere"}},
    "checkpoint.initialFrom": {"checkpoint": {"initialFrom": {"uri": "/elsewhere"}}},
}


def kubectl(*arguments: str, document: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    text = json.dumps(document) if document is not None else None
    return subprocess.run(["kubectl", *arguments], input=text, text=True, capture_output=True, check=False)


def manifest(name: str = "bad", **spec: Any) -> dict[str, Any]:
    body = job_body(name)
    given = {key: value for key, value in {**body["spec"], **spec}.items() if value is not None}
    return {**body, "metadata": {"name": name, "namespace": "default"}, "spec": given}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_manifest_is_refused_in_words(case: str) -> None:
    spec, words = BAD[case]
    answer = kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", document=manifest(**spec))
    assert answer.returncode != 0
    assert words in answer.stderr


@pytest.mark.parametrize("name", ["1st", "a" * 54, "ends-"])
def test_a_name_that_cannot_name_pods_is_refused(name: str) -> None:
    answer = kubectl("create", "--dry-run=server", "-f", "-", document=manifest(name))
    assert answer.returncode != 0
    assert "metadata.name" in answer.stderr


def test_a_good_manifest_is_taken() -> None:
    answer = kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", document=manifest())
    assert answer.returncode == 0, answer.stderr


@pytest.fixture(scope="module")
def created() -> Any:
    name = "fixed"
    # suspended, so that nothing runs for it
    kubectl("create", "-f", "-", document=manifest(name, suspend=True))
    yield name
    kubectl("delete", "trainingjob", name, "--wait=false")


@pytest.mark.parametrize("section", FIXED)
def test_what_cannot_change_is_refused_with_the_reason(created: str, section: str) -> None:
    patch = json.dumps({"spec": FIXED[section]})
    answer = kubectl("patch", "trainingjob", created, "--type=merge", "--dry-run=server", "-p", patch)
    assert answer.returncode != 0
    assert f"spec.{section} cannot change once the job is created" in answer.stderr


@pytest.mark.parametrize(
    "change",
    [
        {"worker": {"replicas": 4}},
        {"ps": {"replicas": 3}},
        {"suspend": False},
        {"runPolicy": {"backoffLimit": 2, "ttlAfterFinished": "1d", "priorityClassName": "high"}},
        {"checkpoint": {"interval": "1m", "keep": 5}},
        {"checkpoint": {"quantization": 4}},
        {"checkpoint": {"quantization": "2"}},
        {"checkpoint": {"quantization": "Auto"}},
    ],
)
def test_what_may_change_is_taken(created: str, change: dict[str, Any]) -> None:
    patch = json.dumps({"spec": change})
    answer = kubectl("patch", "trainingjob", created, "--type=merge", "--dry-run=server", "-p", patch)
    assert answer.returncode == 0, answer.stderr
