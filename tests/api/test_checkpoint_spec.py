"""What manifests may say about checkpoints, here and on a cluster."""

import re
from typing import Any

import pytest

from emberscale_api.job import ManifestError
from emberscale_api.job.crd import structural_schema
from emberscale_api.job.run_policy import CheckpointSpec
from training_jobs import training_spec

FIELDS = structural_schema(CheckpointSpec, bounded=True)["properties"]


def checkpoint(**fields: Any) -> CheckpointSpec:
    return training_spec(checkpoint=fields).checkpoint


def test_auto_is_the_interval_that_the_brain_advises_as_an_absent_one_is() -> None:
    assert checkpoint(interval="Auto") == checkpoint()
    assert checkpoint(interval="5m").interval == 300.0


@pytest.mark.parametrize("interval", [0, "0s", "-5s", "auto", "soon"])
def test_any_other_interval_is_a_duration_above_0(interval: object) -> None:
    with pytest.raises(ManifestError, match=r"spec\.checkpoint\.interval: "):
        checkpoint(interval=interval)


@pytest.mark.parametrize(
    ("given", "limit"), [("100Mi", 100 << 20), (2_000_000, 2_000_000), ("1Mi", 1 << 20), ("8Pi", 1 << 53)]
)
def test_the_bandwidth_of_writes_is_a_quantity_of_bytes_per_second(given: object, limit: int) -> None:
    assert checkpoint(writeBandwidth=given).bytes_per_second == limit


def test_writes_are_not_limited_unless_the_manifest_says_so() -> None:
    assert checkpoint().bytes_per_second == 0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("100MB", "did you mean 100Mi?"),
        ("1023Ki", "must be at least 1Mi per second"),
        ("20000Pi", "must be at most 8Pi"),
        (2**70, "must be at most 8Pi"),
        (0, "must be above 0"),
        ("-5Mi", "is not a Kubernetes quantity"),
    ],
)
def test_a_bandwidth_that_is_none_or_too_low_is_refused(given: object, problem: str) -> None:
    with pytest.raises(ManifestError) as refused:
        checkpoint(writeBandwidth=given)
    assert "spec.checkpoint.writeBandwidth: " in str(refused.value)
    assert problem in str(refused.value)


@pytest.mark.parametrize("uri", ["", "s3:/bucket/job", "file:/data", "s3:bucket", "s3:"])
@pytest.mark.parametrize("field", ["uri", "initialFrom.uri"])
def test_a_folder_without_a_name_or_with_a_mistyped_scheme_is_refused(field: str, uri: str) -> None:
    with pytest.raises(ManifestError) as refused:
        checkpoint(**({"uri": uri} if field == "uri" else {"initialFrom": {"uri": uri}}))
    assert f"spec.checkpoint.{field}: " in str(refused.value)


@pytest.mark.parametrize(
    "uri", ["s3://bucket/job", "/data/run:1", "data/run:1", "./s3:/x", "file:///data", "memory://x"]
)
def test_a_path_or_uri_is_taken_as_it_is(uri: str) -> None:
    assert checkpoint(uri=uri).uri == uri


def test_a_mistyped_scheme_says_what_is_meant() -> None:
    with pytest.raises(ManifestError, match="s3://bucket/job"):
        checkpoint(uri="s3:/bucket/job")


@pytest.mark.parametrize(("interval", "taken"), [("Auto", True), ("1h30m", True), ("auto", False), ("Autos", False)])
def test_a_cluster_takes_the_same_intervals(interval: str, taken: bool) -> None:
    assert bool(re.search(FIELDS["interval"]["pattern"], interval)) is taken
