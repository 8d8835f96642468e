"""The models, and how their parameters travel."""

from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import FlatParameters

__all__ = ["FlatParameters", "build_model"]
