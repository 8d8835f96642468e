"""The initial dense parameters, which parameter servers make without PyTorch."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tests.jobmaster.small_job import job

from emberscale_api.job import resolve_model
from emberscale_api.job.dense import dense_parameters
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.models.initial import initial_parameters

MODELS: list[dict[str, Any]] = [
    {"architecture": "DLRM", "bottomMlp": [8], "topMlp": [16, 8]},
    {"architecture": "DLRM", "embeddings": {"dimension": 4}},
    {"architecture": "WideAndDeep", "deepMlp": [32, 16]},
    {"architecture": "XDeepFM", "cinLayers": [4, 3], "deepMlp": [8]},
    {"architecture": "DCNv2", "crossLayers": 2},
    {"architecture": "DCNv2", "crossRank": 5},
    {"architecture": "DCNv2", "crossRank": 60_000},
]
NO_DENSE = {"columns": {"label": "label", "categorical": ["a", "b", "c"]}, "format": "Parquet"}


@pytest.mark.parametrize("data", [{}, NO_DENSE], ids=["dense", "no dense"])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_shapes_are_those_of_the_module_that_is_trained(model: dict[str, Any], data: dict[str, Any]) -> None:
    spec = job(model=model, data=data).spec
    resolved = resolve_model(spec)
    built = build_model(spec.model, resolved, seed=0)
    assert [one.shape for one in dense_parameters(spec.model, resolved)] == [
        tuple(parameter.shape) for parameter in built.parameters()
    ]


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_ranges_are_those_of_the_layers_of_pytorch(model: dict[str, Any]) -> None:
    spec = job(model=model).spec
    resolved = resolve_model(spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        built = build_model(spec.model, resolved, seed=0)
        for layer in built.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.reset_parameters()
            if isinstance(layer, torch.nn.ParameterList):
                for weights in layer:
                    torch.nn.init.xavier_uniform_(weights)
    ours = build_model(spec.model, resolved, seed=0)
    for bound, theirs, mine in zip(
        [one.bound for one in dense_parameters(spec.model, resolved)],
        built.parameters(),
        ours.parameters(),
        strict=True,
    ):
        for values in (theirs.detach().numpy(), mine.detach().numpy()):
            assert np.abs(values).max() <= bound
            if values.size > 1000:
                assert np.abs(values).max() > 0.98 * bound
                assert values.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)
                assert abs(values.mean()) < 0.1 * bound


def test_a_seed_gives_the_same_values_everywhere_and_another_seed_others() -> None:
    spec = job(model=MODELS[0]).spec
    resolved = resolve_model(spec)
    first = initial_parameters(spec.model, resolved, 3)
    assert first.dtype == np.float32
    assert np.array_equal(first, initial_parameters(spec.model, resolved, 3))
    assert np.array_equal(first, flat_copy(build_model(spec.model, resolved, 3)).numpy())
    assert np.mean(first == initial_parameters(spec.model, resolved, 4)) < 0.01


def test_a_parameter_server_does_not_import_pytorch() -> None:
    imported = "import emberscale_trainer.server.__main__, sys; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", imported], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
