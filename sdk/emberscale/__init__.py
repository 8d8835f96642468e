"""The public face of Emberscale: `emberscale.train`, and the `emberscale` command line."""

from emberscale.errors import BadInputError, UnwritableError
from emberscale.training import Training, TrainingFailedError, train
from emberscale_api.features import Features
from emberscale_api.job import ManifestError

__all__ = ["BadInputError", "Features", "ManifestError", "Training", "TrainingFailedError", "UnwritableError", "train"]
