"""The models, and how their parameters travel."""

from emberscale_trainer.models.dlrm import DLRM, build_model
from emberscale_trainer.models.flat import FlatParameters

__all__ = ["DLRM", "FlatParameters", "build_model"]
