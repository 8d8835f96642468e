"""The models, and the transfer of their parameters."""

from emberscale_trainer.models.architectures import FlatParameters, build_model, vjp

__all__ = ["FlatParameters", "build_model", "vjp"]
