"""A user's own model: `spec.model.entrypoint: package.module:factory`.

Users have to fix errors in their own models, so they see the frames of their code and what was expected, not the frames
of this program.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from emberscale_api.errors import InvalidError
from emberscale_api.job import ResolvedModel
from emberscale_api.job.model import Features

REASON = "ModelRefused"
"""The reason in the job's status when a user's model fails."""

_CALL = "forward(dense, embeddings)"
_SHOWN = 3
_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)


class EntrypointError(InvalidError):
    """The user's model cannot be made or called. `frames` are those of the user's code, or empty."""

    def __init__(self, entrypoint: str, problem: str, frames: str = "") -> None:
        super().__init__(f"{frames}spec.model.entrypoint: {entrypoint}: {problem}")
        self.entrypoint = entrypoint
        self.problem = problem
        self.frames = frames


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


@contextmanager
def their_frames(entrypoint: str, doing: str) -> Iterator[None]:
    """Turns errors of the body into an EntrypointError with the frames of the user's code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise EntrypointError(entrypoint, f"{doing} {_summary(error)}", _trace(error)) from error


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
        raise EntrypointError(entrypoint, f"{module.__file__} has no {name}; what can be called there: {found}")
    if not callable(factory):
        raise EntrypointError(entrypoint, f"{name} is {described(factory)}; expected a function of the features")
    return factory  # type: ignore[no-any-return]  # arbitrary user code; its result is checked


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
        raise EntrypointError(entrypoint, f"importing it raised {_summary(error)}", _trace(error)) from error
    except (Exception, SystemExit) as error:
        raise EntrypointError(entrypoint, f"importing it raised {_summary(error)}", _trace(error)) from error


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)[-1:]).strip().partition("\n")[0]


def _trace(error: BaseException) -> str:
    """Returns the frames of the user's code, as Python prints them."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    if not frames and not isinstance(error, SyntaxError):
        return ""
    only = traceback.format_exception_only(error)
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames), *only])


def _is_machinery(file: str) -> bool:
    return file.startswith((_OURS, _TORCH, "<frozen importlib", importlib.__file__ or "<frozen"))
