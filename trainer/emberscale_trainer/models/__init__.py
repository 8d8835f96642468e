"""The models, and how their parameters travel."""

from emberscale_trainer.models.architectures import FlatParameters, build_model, vjp

__all__ = ["FlatParameters", "build_model", "vjp"]
