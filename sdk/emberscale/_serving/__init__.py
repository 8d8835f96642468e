"""What a trained model is served from, where there is no Emberscale: plain torch tensors and a program."""

from emberscale._serving.export import ExportedModel, ExportError, export_checkpoint

__all__ = ["ExportError", "ExportedModel", "export_checkpoint"]
