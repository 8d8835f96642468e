"""What the brain is told of a model's size is the model's size."""

from typing import Any

import pytest
from tests.jobmaster.fakes import job

from emberscale_api.job import resolve_model
from emberscale_jobmaster.brain_messages import dense_parameters
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
