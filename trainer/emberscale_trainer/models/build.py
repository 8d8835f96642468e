"""From the manifest to a model."""

import torch
from torch import nn

from emberscale_api.job import Architecture, ModelSpec, ResolvedModel
from emberscale_trainer.models.dcn import DCNv2
from emberscale_trainer.models.dlrm import DLRM
from emberscale_trainer.models.entrypoint import OwnModel, features_of
from emberscale_trainer.models.wide_and_deep import WideAndDeep
from emberscale_trainer.models.xdeepfm import XDeepFM


def build_model(spec: ModelSpec, resolved: ResolvedModel, seed: int) -> nn.Module:
    """The manifest's model with initial dense parameters that depend on the seed alone.

    It takes dense features float32 [B, dense] and float32 [B, sum of the tables' dimensions], the vectors of all tables
    side by side in their order, and returns logits float32 [B]. Raises EntrypointError.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return OwnModel(spec.entrypoint, features_of(resolved)) if spec.entrypoint else _built_in(spec, resolved)


def _built_in(spec: ModelSpec, resolved: ResolvedModel) -> nn.Module:
    dense = len(resolved.columns.dense)
    tables = len(resolved.embeddings)
    width = sum(table.dimension for table in resolved.embeddings)
    dimension = resolved.embeddings[0].dimension
    match spec.architecture:
        case Architecture.WIDE_AND_DEEP:
            return WideAndDeep(dense, width, spec.deep_mlp)
        case Architecture.XDEEPFM:
            return XDeepFM(dense, tables, dimension, spec.cin_layers, spec.deep_mlp)
        case Architecture.DCN_V2:
            return DCNv2(dense, width, spec.cross_layers, spec.cross_rank, spec.deep_mlp)
        case _:
            return DLRM(dense, tables, dimension, spec.bottom_mlp, spec.top_mlp)
