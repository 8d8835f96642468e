"""Exports a trained model for serving without Emberscale: plain torch tensors and a program."""

from emberscale._serving.export import ExportedModel, ExportError, export_checkpoint

__all__ = ["ExportError", "ExportedModel", "export_checkpoint"]
