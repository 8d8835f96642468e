"""A user's own model: `spec.model.entrypoint: package.module:factory`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from emberscale_api.job import ResolvedModel
from emberscale_api.job.model import Features
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.models.refusals import EntrypointError, summary, their_frames, trace

_CALL = "forward(dense, embeddings)"
_SHOWN = 3


def features_of(resolved: ResolvedModel) -> Features:
    """Returns the argument of the factory."""
    return Features(resolved.columns.dense, {table.name: table.dimension for table in resolved.embeddings})


class OwnModel(nn.Module):
    """A user's module behind the interface of the built-in models.

    `forward` takes dense features float32 [B, dense] and embeddings float32 [B, sum of dimensions], and returns logits
    float32 [B]. Raises EntrypointError if the module does not.
    """

    def __init__(self, entrypoint: str, features: Features) -> None:
        super().__init__()
        self._entrypoint = entrypoint
        self._dimensions = dict(features.embeddings)
        self._contract = _contract(features)
        self.inner = _made(entrypoint, features)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits of a batch."""
        vectors = torch.split(embeddings, list(self._dimensions.values()), dim=1)
        return self.call(dense, dict(zip(self._dimensions, vectors, strict=True)))

    def call(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """Logits of a batch, from the embeddings by name. Raises EntrypointError."""
        with their_frames(self._entrypoint, f"{_CALL} {self._contract} raised"):
            logits = self.inner(dense, embeddings)
        batch = dense.shape[0]
        if not isinstance(logits, Tensor) or logits.dtype != torch.float32 or logits.shape != (batch,):
            raise EntrypointError(
                self._entrypoint,
                f"{_CALL} {self._contract} returned {described(logits)} for {batch} samples; expected one logit "
                f"a sample: a float32 tensor of shape [{batch}]",
            )
        return logits


def own_model(entrypoint: str, features: Features, seed: int) -> OwnModel:
    """Makes the user's model; its initial parameters depend on the seed alone. Raises EntrypointError."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OwnModel(entrypoint, features)


def initial_of(entrypoint: str, features: Features, seed: int) -> NDArray[np.float32]:
    """The initial parameters of the user's model as one flat vector, float32 [parameters]. Raises EntrypointError."""
    flat: NDArray[np.float32] = flat_copy(own_model(entrypoint, features, seed)).numpy()
    return flat


def _contract(features: Features) -> str:
    """Describes the arguments of the module."""
    shown = [f"{name}: [B, {dimension}]" for name, dimension in features.embeddings.items()]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return f"with dense [B, {len(features.dense)}] and embeddings {{{', '.join(shown[:_SHOWN])}{more}}}"


def described(value: object) -> str:
    """Describes type and shape."""
    if isinstance(value, Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {list(value.shape)}"
    return f"an object of type {type(value).__name__}"


def _made(entrypoint: str, features: Features) -> nn.Module:
    factory = _factory(entrypoint)
    with their_frames(entrypoint, "the factory raised"):
        module = factory(features)
    if not isinstance(module, nn.Module):
        raise EntrypointError(entrypoint, f"the factory returned {described(module)}; expected a torch.nn.Module")
    parameters = dict(module.named_parameters())
    if not parameters:
        raise EntrypointError(entrypoint, "the module has no parameters; expected at least one, such as a bias")
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise EntrypointError(
                entrypoint,
                f"the parameter {name} has no shape yet; expected layers with sizes, such as nn.Linear instead of "
                "nn.LazyLinear",
            )
        if parameter.dtype != torch.float32:
            raise EntrypointError(entrypoint, f"the parameter {name} is {described(parameter)}; expected float32")
    kept = module.state_dict().keys() - parameters.keys()
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    if kept - shared:
        raise EntrypointError(
            entrypoint,
            f"the module keeps {', '.join(sorted(kept - shared))}, which no optimizer steps: each worker would have "
            "another. Use LayerNorm for BatchNorm, and register_buffer(..., persistent=False) for constants",
        )
    return module


def _factory(entrypoint: str) -> Callable[[Features], object]:
    module_name, _, name = entrypoint.partition(":")
    module = _imported(entrypoint, module_name)
    factory = getattr(module, name, None)
    if factory is None:
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        found = ", ".join(there) or "nothing"
        place = getattr(module, "__file__", None) or f"the module {module_name}"
        raise EntrypointError(
            entrypoint, f"{place} has no {name}; what can be called there: {found}{_hidden(module_name, place)}"
        )
    if not callable(factory):
        raise EntrypointError(entrypoint, f"{name} is {described(factory)}; expected a function of the features")
    return factory  # type: ignore[no-any-return]  # arbitrary user code; its result is checked


def _hidden(name: str, place: str) -> str:
    """Says that the module at `place` was loaded instead of the file of that name in the working directory, if so."""
    file = Path.cwd() / f"{name.replace('.', '/')}.py"
    return f"; {file.name} here has its name: rename it" if file.exists() and file != Path(place) else ""


def _imported(entrypoint: str, name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise EntrypointError(
                entrypoint, f"there is no module {error.name}, neither in {folder} nor on the PYTHONPATH"
            ) from error
        raise EntrypointError(entrypoint, f"importing it raised {summary(error)}", trace(error)) from error
    except (Exception, SystemExit) as error:
        raise EntrypointError(entrypoint, f"importing it raised {summary(error)}", trace(error)) from error
