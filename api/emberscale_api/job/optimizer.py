"""Optimizers of embedding rows and of dense parameters."""

from enum import StrEnum

from pydantic import Field

from emberscale_api.job.schema import ManifestPart


class OptimizerType(StrEnum):
    """The update rules. `RowWiseAdagrad` keeps one accumulator a row and exists for embeddings only."""

    SGD = "SGD"
    MOMENTUM = "Momentum"
    ADAGRAD = "Adagrad"
    ROW_WISE_ADAGRAD = "RowWiseAdagrad"
    ADAM = "Adam"
    FTRL = "FTRL"


class OptimizerSpec(ManifestPart):
    """One update rule with its hyperparameters; those that a rule does not use are ignored by it."""

    type: OptimizerType = OptimizerType.ADAGRAD
    learning_rate: float = Field(default=0.01, gt=0, le=100)
    epsilon: float = Field(default=1e-8, gt=0, lt=1, description="Added to denominators: Adagrad, RowWiseAdagrad, Adam")
    initial_accumulator: float = Field(default=0.0, ge=0, description="Adagrad, RowWiseAdagrad")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="Momentum")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Adam")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Adam")
    l1: float = Field(default=0.0, ge=0, description="FTRL")
    l2: float = Field(default=0.0, ge=0, description="FTRL")
    ftrl_beta: float = Field(default=1.0, ge=0, description="FTRL")


class OptimizersSpec(ManifestPart):
    """`sparse` steps embedding rows, `wide` the weights of ids in models with a wide part, `dense` everything else."""

    sparse: OptimizerSpec = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=0.05)
    dense: OptimizerSpec = OptimizerSpec(type=OptimizerType.ADAGRAD, learning_rate=0.01)
    wide: OptimizerSpec | None = Field(
        default=None, description="WideAndDeep, XDeepFM: of the wide part; that of sparse where not given"
    )
