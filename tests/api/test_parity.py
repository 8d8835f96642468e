"""Manifests of jobs whose parameter servers hold parity of each other's rows."""

from typing import Any

import pytest
from pydantic import ValidationError

from emberscale_api.job import Durability, FaultToleranceStrategy, TrainingJobSpec, can_keep_parity, stripe_width


def spec(ps: dict[str, Any], **tolerance: Any) -> TrainingJobSpec:
    asked = {"strategy": "ErasureCoding", **tolerance}
    return TrainingJobSpec.model_validate({"data": {"train": ["/data"]}, "ps": ps, "faultTolerance": asked})


@pytest.mark.parametrize("ps", [{"replicas": 2}, {"minReplicas": 2}, {"minReplicas": 3, "maxReplicas": 4}])
def test_parity_takes_two_servers(ps: dict[str, Any]) -> None:
    assert can_keep_parity(spec(ps).ps.initial_replicas, 1)


def test_parity_2_takes_three_servers() -> None:
    assert can_keep_parity(spec({"replicas": 3}, parity=2).ps.initial_replicas, 2)
    with pytest.raises(
        ValidationError, match=r"parity \(2\) needs at least 3 parameter servers: set ps.replicas to at least 3"
    ):
        spec({"replicas": 2}, parity=2)


@pytest.mark.parametrize(
    ("servers", "parity", "width"), [(2, 1, 1), (5, 1, 4), (6, 1, 4), (1000, 1, 4), (3, 2, 1), (6, 2, 4), (300, 2, 4)]
)
def test_few_servers_share_parity_in_a_large_job(servers: int, parity: int, width: int) -> None:
    assert spec({"replicas": servers}, parity=parity).ps.replicas == servers
    assert stripe_width(servers, parity) == width


@pytest.mark.parametrize(
    ("ps", "field"), [({"replicas": 1}, "replicas"), ({}, "minReplicas"), ({"maxReplicas": 4}, "minReplicas")]
)
def test_with_fewer_a_manifest_is_refused_by_the_field_that_must_change(ps: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=rf"needs at least 2 parameter servers: set ps.{field} to at least 2"):
        spec(ps)


def test_more_parity_than_two_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 2"):
        spec({"replicas": 5}, parity=3)


def test_a_job_with_parity_is_not_scaled_below_it() -> None:
    job = spec({"replicas": 3})
    assert job.resized(ps=2).ps.replicas == 2
    with pytest.raises(ValidationError, match="needs at least 2 parameter servers"):
        job.resized(ps=1)


def test_other_strategies_take_one() -> None:
    for strategy in (FaultToleranceStrategy.AUTO, FaultToleranceStrategy.FULL_RECOVERY):
        assert spec({"replicas": 1}, strategy=strategy).ps.replicas == 1


def test_durability_is_sync_unless_the_manifest_says_otherwise() -> None:
    assert spec({"replicas": 2}).fault_tolerance.durability is Durability.SYNC
    assert spec({"replicas": 2}, durability="Async").fault_tolerance.durability is Durability.ASYNC
    assert spec({"replicas": 2}, strategy="Auto", durability="Async").fault_tolerance.durability is Durability.ASYNC


@pytest.mark.parametrize("strategy", ["FullRecovery", "PartialRecovery"])
def test_durability_takes_a_strategy_that_may_keep_parity(strategy: str) -> None:
    assert spec({"replicas": 2}, strategy=strategy, durability="Sync").fault_tolerance.durability is Durability.SYNC
    told = rf"durability: {strategy} keeps no parity; remove durability, or choose ErasureCoding or Auto"
    with pytest.raises(ValidationError, match=told):
        spec({"replicas": 2}, strategy=strategy, durability="Async")
    with pytest.raises(ValidationError, match="Input should be 'Sync' or 'Async'"):
        spec({"replicas": 2}, durability="Eventually")
