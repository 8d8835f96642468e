"""How records are consumed, and how rows and dense parameters are stepped."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Quantity, Seconds, memory_bytes


class OptimizerType(StrEnum):
    """The update rules. `RowWiseAdagrad` keeps one accumulator per row and exists for embeddings only."""

    SGD = "SGD"
    MOMENTUM = "Momentum"
    ADAGRAD = "Adagrad"
    ROW_WISE_ADAGRAD = "RowWiseAdagrad"
    ADAM = "Adam"
    FTRL = "FTRL"

    @property
    def is_additive(self) -> bool:
        """Whether the steps of several workers, taken apart, may be added up in weights and state.

        The state is then a sum over steps, and weights are no function of it.
        """
        return self in (OptimizerType.SGD, OptimizerType.ADAGRAD, OptimizerType.ROW_WISE_ADAGRAD)


LearningRate = Annotated[float, Field(gt=0, le=100)]
Epsilon = Annotated[float, Field(gt=0, lt=1, description="Added to denominators: Adagrad, RowWiseAdagrad, Adam")]
Accumulator = Annotated[float, Field(ge=0, description="Adagrad, RowWiseAdagrad")]
Momentum = Annotated[float, Field(ge=0, lt=1, description="Momentum")]
Beta = Annotated[float, Field(ge=0, lt=1, description="Adam")]
Penalty = Annotated[float, Field(ge=0, description="FTRL")]


class OptimizerSpec(ManifestPart):
    """One update rule with its hyperparameters; a rule ignores the ones it does not use."""

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
    """Overrides of another optimizer; absent fields keep its values."""

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
        """Returns the other optimizer, with these fields replaced."""
        return base.model_copy(update={name: value for name, value in self if value is not None})


class OptimizersSpec(ManifestPart):
    """`sparse` steps embedding rows, `wide` the weights of ids in models with a wide part, `dense` everything else."""

    sparse: OptimizerSpec = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=0.05)
    dense: OptimizerSpec = OptimizerSpec(type=OptimizerType.ADAGRAD, learning_rate=0.01)
    wide: OptimizerOverride | None = Field(
        default=None, description="WideAndDeep, XDeepFM: overrides of sparse for the wide part"
    )


class TrainingSpec(ManifestPart):
    """Asynchronous by default, with a bound on the drift between workers.

    `max_staleness` is how many batches of other workers may be applied between a batch's pull and its push. At 0 a
    worker pulls a batch only when its previous push is applied, and no other worker's push comes between.
    """

    batch_size: int = Field(default=2048, ge=1, le=1 << 20, description="Records of a batch")
    epochs: int = Field(default=1, ge=1, le=10_000, description="Passes over the training data")
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Of the order of records, and of initial weights")
    max_staleness: int = Field(
        default=64, ge=0, le=1 << 20, description="Bound on the drift, in batches; 0 is synchronous"
    )
    staleness_warmup: int = Field(
        default=96,
        ge=0,
        le=1 << 20,
        description="The bound grows from 0: it is the square root of the batches applied so far over this number",
    )
    prefetch_batches: int = Field(default=2, ge=1, le=64, description="Batches that a worker reads ahead")
    pull_ahead: int = Field(
        default=1, ge=0, le=64, description="Batches whose rows a worker pulls before its earlier ones are pushed"
    )


class HotEmbeddingsMode(StrEnum):
    """Whether workers keep rows that consecutive batches share; `Auto`: where it saves traffic and costs no speed."""

    AUTO = "Auto"
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class HotEmbeddingsSpec(ManifestPart):
    """Workers train rounds of consecutive batches on rows that they pull and push once.

    `budget` is the memory of a worker for these rows. A worker alone trains as if each batch saw all those before it;
    with several, the bound on staleness also bounds how many batches a round has.
    """

    mode: HotEmbeddingsMode = HotEmbeddingsMode.DISABLED
    budget: Quantity = Field(default="256Mi", description="Memory of a worker for the rows of its rounds")

    @property
    def budget_bytes(self) -> int:
        """`budget` in bytes."""
        return memory_bytes(self.budget)


class ShardingSpec(ManifestPart):
    """Shards are leased to workers; their size, in batches, follows the worker's speed (DLRover-RM section 5.1)."""

    min_batches: int = Field(default=8, ge=1, description="Batches of a shard, at least")
    max_batches: int = Field(default=64, ge=1, description="Batches of a shard, at most")
    lease_timeout: Seconds = Field(
        default=15.0, gt=0, description="A worker or PS that is silent for this long is replaced"
    )
    heartbeat_interval: Seconds = Field(default=1.0, gt=0, description="Interval between reports to the master")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_batches > self.max_batches:
            raise ValueError(f"minBatches ({self.min_batches}) must not be above maxBatches ({self.max_batches})")
        if self.heartbeat_interval * 2 > self.lease_timeout:
            raise ValueError(
                f"leaseTimeout ({self.lease_timeout:g}s) must be at least twice "
                f"heartbeatInterval ({self.heartbeat_interval:g}s)"
            )
        return self
