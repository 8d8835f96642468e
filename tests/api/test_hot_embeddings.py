"""Which jobs may train in rounds, on rows that workers hold."""

from typing import Any

import pytest

from emberscale_api.errors import InvalidError
from emberscale_api.job import HotEmbeddingsMode, parse_manifest


def document(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "toy"},
        "spec": {"data": {"train": ["data/*.tsv"]}, **spec},
    }


OBSTACLES: dict[str, dict[str, Any]] = {
    "optimizers.sparse.type (Adam)": {"optimizers": {"sparse": {"type": "Adam"}}},
    "optimizers.dense.type (Momentum)": {"optimizers": {"dense": {"type": "Momentum"}}},
    "model.embeddings.admission.minCount (2)": {"model": {"embeddings": {"admission": {"minCount": 2}}}},
    "faultTolerance.strategy (ErasureCoding)": {"faultTolerance": {"strategy": "ErasureCoding"}, "ps": {"replicas": 2}},
}
ADDITIVE: dict[str, dict[str, Any]] = {
    "optimizers": {"sparse": {"type": "RowWiseAdagrad"}, "dense": {"type": "Adagrad"}}
}


def test_a_job_that_says_nothing_trains_batch_by_batch() -> None:
    assert parse_manifest(document()).spec.hot_embeddings.mode is HotEmbeddingsMode.DISABLED


def test_a_job_with_additive_rules_may_train_rounds() -> None:
    spec = parse_manifest(document(hotEmbeddings={"mode": "Enabled", "budget": "64Mi"}, **ADDITIVE)).spec
    assert spec.obstacle_to_rounds == ""
    assert spec.hot_embeddings.budget_bytes == 64 << 20


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_does_not_add_up_is_refused_where_rounds_are_demanded(obstacle: str) -> None:
    spec = {**ADDITIVE, **OBSTACLES[obstacle]}
    if "optimizers" in OBSTACLES[obstacle]:
        spec["optimizers"] = {**ADDITIVE["optimizers"], **OBSTACLES[obstacle]["optimizers"]}
    with pytest.raises(InvalidError) as refused:
        parse_manifest(document(hotEmbeddings={"mode": "Enabled"}, **spec))
    assert obstacle in str(refused.value)
    automatic = parse_manifest(document(hotEmbeddings={"mode": "Auto"}, **spec))
    assert automatic.spec.obstacle_to_rounds == obstacle
