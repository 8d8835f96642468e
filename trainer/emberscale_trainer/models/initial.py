"""The initial dense parameters of a model, as one flat vector."""

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import ModelSpec, ResolvedModel
from emberscale_api.job.dense import dense_parameters


def initial_parameters(spec: ModelSpec, resolved: ResolvedModel, seed: int) -> NDArray[np.float32]:
    """Returns the flat vector, float32 [parameters], which depends on the arguments alone.

    Imports PyTorch only for a model of the user's own: a parameter server without it starts in half the time. Raises
    EntrypointError.
    """
    if spec.entrypoint:
        from emberscale_trainer.models.entrypoint import features_of, initial_of

        return initial_of(spec.entrypoint, features_of(resolved), seed)
    random = np.random.default_rng(seed)
    parts = [
        (2 * random.random(parameter.length, np.float32) - 1) * np.float32(parameter.bound)
        for parameter in dense_parameters(spec, resolved)
    ]
    return np.concatenate(parts)
