"""The brain is told the true size of a model, and the bound that eviction sets, if any."""

from typing import Any

import pytest
from tests.jobmaster.fakes import job

from emberscale_api.job import resolve_model
from emberscale_jobmaster.brain_messages import dense_parameters, most_rows
from emberscale_trainer.models import build_model


@pytest.mark.parametrize(
    "model",
    [
        {"architecture": "DLRM", "bottomMlp": [8], "topMlp": [16, 8]},
        {"architecture": "WideAndDeep", "deepMlp": [32, 16]},
        {"architecture": "XDeepFM", "cinLayers": [4, 3], "deepMlp": [8]},
        {"architecture": "DCNv2", "crossLayers": 2},
        {"architecture": "DCNv2", "crossRank": 5},
        {"architecture": "DCNv2", "crossRank": 60_000},
        {"architecture": "DLRM", "embeddings": {"dimension": 4}},
    ],
)
def test_parameters_are_those_of_the_model_that_is_trained(model: dict[str, Any]) -> None:
    spec = job(model=model).spec
    built = build_model(spec.model, resolve_model(spec), seed=0)
    assert dense_parameters(spec) == sum(parameter.numel() for parameter in built.parameters())


def test_the_brain_is_told_what_eviction_leaves_of_all_tables() -> None:
    spec = job(model={"embeddings": {"eviction": {"maxRows": 100_000}}}).spec
    tables = len(resolve_model(spec).tables)
    # up to 97 batches may pass before eviction looks at a bucket
    assert most_rows(spec) == tables * (100_000 + 97 * spec.training.batch_size)


def test_one_table_without_a_bound_leaves_all_of_them_without() -> None:
    evicted = {"eviction": {"maxRows": 100_000}, "tables": {"C3": {"eviction": {"ttlBatches": 50}}}}
    assert most_rows(job(model={"embeddings": evicted}).spec) == 0
    assert most_rows(job().spec) == 0
