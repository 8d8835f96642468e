"""Optimizers of embedding rows and of dense parameters."""

from enum import StrEnum
from typing import Annotated

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


LearningRate = Annotated[float, Field(gt=0, le=100)]
Epsilon = Annotated[float, Field(gt=0, lt=1, description="Added to denominators: Adagrad, RowWiseAdagrad, Adam")]
Accumulator = Annotated[float, Field(ge=0, description="Adagrad, RowWiseAdagrad")]
Momentum = Annotated[float, Field(ge=0, lt=1, description="Momentum")]
Beta = Annotated[float, Field(ge=0, lt=1, description="Adam")]
Penalty = Annotated[float, Field(ge=0, description="FTRL")]


class OptimizerSpec(ManifestPart):
    """One update rule with its hyperparameters; those that a rule does not use are ignored by it."""

    type: OptimizerType = OptimizerType.ADAGRAD
    learning_rate: LearningRate = 0.01
    epsilon: Epsilon = 1e-8
    initial_accumulator: Accumulator = 0.0
    momentum: Momentum = 0.9
    beta1: Beta = 0.9
    beta2: Beta = 0.999
    l1: Penalty = 0.0
    l2: Penalty = 0.0
    ftrl_beta: Penalty = 1.0


class OptimizerOverride(ManifestPart):
    """What differs from another optimizer; a field that is absent is that optimizer's."""

    type: OptimizerType | None = None
    learning_rate: LearningRate | None = None
    epsilon: Epsilon | None = None
    initial_accumulator: Accumulator | None = None
    momentum: Momentum | None = None
    beta1: Beta | None = None
    beta2: Beta | None = None
    l1: Penalty | None = None
    l2: Penalty | None = None
    ftrl_beta: Penalty | None = None

    def over(self, base: OptimizerSpec) -> OptimizerSpec:
        """The other optimizer with these fields in the place of its own."""
        return base.model_copy(update={name: value for name, value in self if value is not None})


class OptimizersSpec(ManifestPart):
    """`sparse` steps embedding rows, `wide` the weights of ids in models with a wide part, `dense` everything else."""

    sparse: OptimizerSpec = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=0.05)
    dense: OptimizerSpec = OptimizerSpec(type=OptimizerType.ADAGRAD, learning_rate=0.01)
    wide: OptimizerOverride | None = Field(
        default=None, description="WideAndDeep, XDeepFM: what differs from sparse for the wide part"
    )
