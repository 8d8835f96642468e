"""Which manifests `kubectl apply` refuses, and with which messages."""

import json
from typing import Any

import pytest

from cluster import CommandFailedError, Place, apply, kubectl, manifest

pytestmark = pytest.mark.smoke

TABLE: list[tuple[str, Any, str]] = [
    # path, value, words that the message must contain
    ("spec.data", None, "spec.data: Required value"),
    ("spec.data.train", None, "spec.data.train: Required value"),
    ("spec.data.train", [], "spec.data.train: Invalid value"),
    ("spec.data.train", "one.tsv", "must be of type array"),
    ("spec.data.train", [""], "spec.data.train[0]"),
    ("spec.data.format", "Avro", 'supported values: "CriteoTSV"'),
    ("spec.data.maxBadRecords", -1, "should be greater than or equal to 0"),
    ("spec.data.shuffling.blockRecords", 0, "should be greater than or equal to 1"),
    ("spec.training.batchSize", 0, "should be greater than or equal to 1"),
    ("spec.training.batchSize", "big", "must be of type integer"),
    ("spec.training.batchSize", 2.5, "must be of type integer"),
    ("spec.training.batchSize", 1 << 24, "should be less than or equal to"),
    ("spec.training.epochs", 0, "should be greater than or equal to 1"),
    ("spec.training.seed", -1, "should be greater than or equal to 0"),
    ("spec.training.maxStaleness", -1, "should be greater than or equal to 0"),
    ("spec.training.prefetchBatches", 65, "should be less than or equal to 64"),
    ("spec.training.batch_size", 5, 'unknown field "spec.training.batch_size"'),
    ("spec.workers", 2, 'unknown field "spec.workers"'),
    ("spec.model.architecture", "GPT", 'supported values: "DLRM"'),
    ("spec.model.embeddings.dimension", 0, "should be greater than or equal to 1"),
    ("spec.model.bottomMlp", [0], "should be greater than or equal to 1"),
    ("spec.model.embeddings.tables", {"C27": {}}, "CriteoTSV has C1 to C26"),
    ("spec.optimizers.sparse.type", "Lion", "supported values"),
    ("spec.optimizers.sparse.learningRate", 0, "spec.optimizers.sparse.learningRate"),
    ("spec.optimizers.dense.type", "FTRL", "use SGD, Momentum, Adagrad or Adam"),
    ("spec.ps.replicas", 0, "should be greater than or equal to 1"),
    ("spec.ps.replicas", 2000, "should be less than or equal to 1024"),
    ("spec.worker", {"minReplicas": 3, "maxReplicas": 2}, "minReplicas must not be above maxReplicas"),
    ("spec.worker", {"replicas": 3, "maxReplicas": 4}, "give either replicas, or minReplicas and maxReplicas"),
    ("spec.worker.resources", {"limits": {"memory": "much"}}, "spec.worker.resources.limits.memory"),
    (
        "spec.worker.resources",
        {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}},
        "requests.cpu must not be above limits.cpu",
    ),
    (
        "spec.ps.resources",
        {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}},
        "requests.memory must not be above limits.memory",
    ),
    ("spec.sharding", {"minBatches": 9, "maxBatches": 8}, "minBatches must not be above maxBatches"),
    (
        "spec.sharding",
        {"leaseTimeout": "1s", "heartbeatInterval": "1s"},
        "leaseTimeout must be at least twice heartbeatInterval",
    ),
    ("spec.sharding.leaseTimeout", "soon", "spec.sharding.leaseTimeout"),
    ("spec.checkpoint.interval", "-5s", "spec.checkpoint.interval"),
    ("spec.checkpoint.writeBandwidth", "100MB", "spec.checkpoint.writeBandwidth"),
    ("spec.checkpoint.writeBandwidth", "20000Pi", "must be above 0 and at most 8Pi"),
    ("spec.hotEmbeddings.budget", "256MB", "spec.hotEmbeddings.budget"),
    ("spec.worker.resources", {"limits": {"memory": 0}}, "must be above 0 and at most 8Pi"),
    ("spec.ps.resources", {"limits": {"memory": "512m"}}, "memory must be at least 1Mi"),
    ("spec.checkpoint.writeBandwidth", "500Ki", "writeBandwidth must be at least 1Mi"),
    ("spec.checkpoint.keep", 0, "should be greater than or equal to 1"),
    ("spec.faultTolerance.strategy", "Pray", "supported values"),
    ("spec.faultTolerance", {"strategy": "ErasureCoding", "parity": 3}, "should be less than or equal to 2"),
    (
        "spec.faultTolerance",
        {"strategy": "FullRecovery", "targetPLS": 0.1},
        "targetPLS: FullRecovery and ErasureCoding lose no sample",
    ),
    (
        "spec.faultTolerance",
        {"strategy": "FullRecovery", "durability": "Async"},
        "durability: FullRecovery and PartialRecovery keep no parity",
    ),
    ("spec.faultTolerance", {"strategy": "Auto", "priority": "MFU"}, "priority is for partial recovery"),
    (
        "spec.faultTolerance",
        {"strategy": "FullRecovery", "priority": "SSU", "targetPLS": 0.1},
        "priority is for partial recovery",
    ),
    ("spec.runPolicy.backoffLimit", -1, "should be greater than or equal to 0"),
    ("spec.runPolicy.cleanPodPolicy", "Sometimes", "supported values"),
    ("spec.scaling.mode", "Magic", "supported values"),
    ("spec.suspend", "yes", "must be of type boolean"),
    ("spec.worker.template.volumeMounts", [{"name": "shared", "mountPath": "data"}], "mountPath must be absolute"),
    (
        "spec.worker.template.volumeMounts",
        [{"name": "nothing", "mountPath": "/x"}],
        "each must name one of the volumes",
    ),
    ("spec.worker.template.env", [{"name": "EMBERSCALE_ROLE", "value": "ps"}], "are reserved for the operator"),
    ("metadata.name", "3-starts-with-a-digit", "start with a letter"),
    ("metadata.name", "x" * 54, "at most 53 characters"),
    ("apiVersion", "emberscale.io/v1", "no matches for kind"),
]

CHANGES: list[tuple[str, Any, str]] = [
    ("spec.model.embeddings.dimension", 32, "spec.model cannot change once the job is created"),
    ("spec.data.train", ["/elsewhere/*.tsv"], "spec.data cannot change once the job is created"),
    ("spec.optimizers.sparse.learningRate", 0.5, "spec.optimizers cannot change once the job is created"),
    ("spec.training.batchSize", 512, "spec.training cannot change once the job is created"),
    ("spec.sharding.maxBatches", 32, "spec.sharding cannot change once the job is created"),
    ("spec.checkpoint.initialFrom", {"uri": "/elsewhere"}, "spec.checkpoint.initialFrom cannot change once"),
    ("spec.checkpoint.uri", "/elsewhere", "spec.checkpoint.uri cannot change once the job is created"),
]


def put(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Sets the value at a path; None removes it."""
    *way, last = path.split(".")
    part = document
    for name in way:
        part = part.setdefault(name, {})
    if value is None:
        del part[last]
    else:
        part[last] = value
    return document


@pytest.fixture(scope="module")
def namespace(installed: str, shared_folder: str) -> Place:
    """A namespace for dry runs, which leave nothing behind."""
    return Place("default", shared_folder)


@pytest.mark.parametrize(("path", "value", "words"), TABLE, ids=[f"{path}={value}"[:60] for path, value, _ in TABLE])
def test_a_bad_manifest_is_refused_in_words_that_help(path: str, value: Any, words: str, namespace: Place) -> None:
    document = put(manifest("bad", namespace), path, value)
    with pytest.raises(CommandFailedError) as refused:
        kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(document))
    assert words in refused.value.said


def test_the_manifest_that_the_table_breaks_is_good(namespace: Place) -> None:
    kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(manifest("good", namespace)))


@pytest.fixture(scope="module")
def existing(namespace: Place) -> dict[str, Any]:
    """A suspended job that is never started."""
    document = manifest("existing", namespace, suspend=True)
    kubectl("delete", "tj", "existing", "-n", namespace.namespace, "--ignore-not-found")
    apply(document, namespace=namespace.namespace)
    return document


@pytest.mark.parametrize(("path", "value", "words"), CHANGES, ids=[path for path, _, _ in CHANGES])
def test_what_cannot_change_is_refused_with_the_reason(
    path: str, value: Any, words: str, existing: dict[str, Any], namespace: Place
) -> None:
    *way, last = path.split(".")
    patch: Any = {last: value}
    for name in reversed(way):
        patch = {name: patch}
    with pytest.raises(CommandFailedError) as refused:
        kubectl(
            "patch",
            "tj",
            "existing",
            "-n",
            namespace.namespace,
            "--type=merge",
            "--patch-file=/dev/stdin",
            stdin=json.dumps(patch),
        )
    assert words in refused.value.said
