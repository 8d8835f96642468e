"""A dry step of a user's own model, before any process of a job starts.

python -m emberscale_trainer.models.rehearsal < job.json prints `{"problem", "trace", "remarks"}`. It is a separate
process, so that the model is loaded as the workers will load it.
"""

import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout

import torch
from torch import nn

from emberscale_api.job import TrainingJob, resolve_model
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.entrypoint import OwnModel
from emberscale_trainer.models.refusals import EntrypointError, their_frames

_SAMPLES = 4
_MANY = 256


def rehearse(job: TrainingJob) -> list[str]:
    """Trains and evaluates one small random batch, and a batch of one sample, as an epoch may end with.

    Returns remarks. Raises EntrypointError.
    """
    resolved = resolve_model(job.spec)
    model = build_model(job.spec.model, resolved, job.spec.training.seed)
    if not isinstance(model, OwnModel):
        return []
    entrypoint = job.spec.model.entrypoint or ""
    names = [table.name for table in resolved.embeddings]
    unused: list[str] = []
    finite = True
    for samples in (_SAMPLES, 1):
        dense = torch.randn(samples, len(resolved.columns.dense))
        vectors = [torch.randn(samples, table.dimension, requires_grad=True) for table in resolved.embeddings]
        logits = model.train().call(dense, dict(zip(names, vectors, strict=True)))
        finite = finite and bool(torch.isfinite(logits).all())
        unused = _backward(entrypoint, logits, vectors, names)
        with torch.no_grad():
            model.eval().call(dense, dict(zip(names, vectors, strict=True)))  # theirs to change: a new one each time
    remarks = [f"the model does not use {', '.join(unused)}"] if unused else []
    if not finite:
        remarks.append("some outputs for random inputs are NaN or infinite, which ends a job")
    dimensions = {table.name: table.dimension for table in resolved.embeddings}
    if _returns_probabilities(model, len(resolved.columns.dense), dimensions):
        remarks.append(
            "every output lies between 0 and 1: the model seems to return probabilities; return logits, without a "
            "sigmoid at the end"
        )
    return remarks


def _returns_probabilities(model: OwnModel, dense: int, dimensions: Mapping[str, int]) -> bool:
    """Whether all outputs for many and large inputs lie between 0 and 1."""
    embeddings = {name: 3 * torch.randn(_MANY, dimension) for name, dimension in dimensions.items()}
    with torch.no_grad():
        outputs = model.eval().call(3 * torch.randn(_MANY, dense), embeddings)
    return bool(((outputs >= 0) & (outputs <= 1)).all())


def _backward(entrypoint: str, logits: torch.Tensor, vectors: list[torch.Tensor], names: list[str]) -> list[str]:
    """Returns the names of the embeddings that get no gradient. Raises EntrypointError if none gets any."""
    nothing = "no embedding gets a gradient; expected logits that depend on them, without detach() or no_grad()"
    if not logits.requires_grad:
        raise EntrypointError(entrypoint, nothing)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.zeros_like(logits))
    with their_frames(entrypoint, "the backward pass raised"):
        gradients = torch.autograd.grad(loss, vectors, allow_unused=True)
    unused = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
    if len(unused) == len(names):
        raise EntrypointError(entrypoint, nothing)
    return unused


def main() -> None:
    """Reads a manifest as JSON from standard input."""
    job = TrainingJob.from_json(sys.stdin.read())
    result: dict[str, object] = {"problem": "", "trace": "", "remarks": []}
    with redirect_stdout(sys.stderr):  # the user's code may print, too
        try:
            result["remarks"] = rehearse(job)
        except EntrypointError as error:
            result["problem"], result["trace"] = error.problem, error.frames
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
