"""How workers train batches, and how optimizers step rows and dense parameters."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.units import Quantity, Seconds, memory_bytes
from emberscale_api.readable import duration_text


class OptimizerType(StrEnum):
    """The update rule. `RowWiseAdagrad` keeps one accumulator per row; it and `FTRL` are for embeddings only."""

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


LearningRate = Annotated[float, Field(gt=0, le=100, description="Step size")]
Epsilon = Annotated[float, Field(gt=0, lt=1, description="Adagrad, RowWiseAdagrad, Adam: added to denominators")]
Accumulator = Annotated[float, Field(ge=0, description="Adagrad, RowWiseAdagrad: initial value of the accumulator")]
Momentum = Annotated[float, Field(ge=0, lt=1, description="Momentum: decay rate of the velocity")]
Beta1 = Annotated[float, Field(ge=0, lt=1, description="Adam: decay rate of the first moment")]
Beta2 = Annotated[float, Field(ge=0, lt=1, description="Adam: decay rate of the second moment")]
L1 = Annotated[float, Field(ge=0, description="FTRL: L1 penalty")]
L2 = Annotated[float, Field(ge=0, description="FTRL: L2 penalty")]
FTRLBeta = Annotated[float, Field(ge=0, description="FTRL: beta of the per-coordinate learning rate")]


class OptimizerSpec(ManifestPart):
    """One update rule with its hyperparameters; a rule ignores the ones it does not use."""

    type: OptimizerType = OptimizerType.ADAGRAD
    learning_rate: LearningRate = 0.01
    epsilon: Epsilon = 1e-8
    initial_accumulator: Accumulator = 0.0
    momentum: Momentum = 0.9
    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.999
    l1: L1 = 0.0
    l2: L2 = 0.0
    ftrl_beta: FTRLBeta = 1.0


class OptimizerOverride(ManifestPart):
    """Overrides of another optimizer; absent fields keep its values."""

    type: OptimizerType | None = None
    learning_rate: LearningRate | None = None
    epsilon: Epsilon | None = None
    initial_accumulator: Accumulator | None = None
    momentum: Momentum | None = None
    beta1: Beta1 | None = None
    beta2: Beta2 | None = None
    l1: L1 | None = None
    l2: L2 | None = None
    ftrl_beta: FTRLBeta | None = None

    def over(self, base: OptimizerSpec) -> OptimizerSpec:
        """Returns the other optimizer, with these fields replaced."""
        return base.model_copy(update={name: value for name, value in self if value is not None})


class OptimizersSpec(ManifestPart):
    """`sparse` steps embedding rows, `wide` the weights of ids in models with a wide part, `dense` everything else."""

    sparse: OptimizerSpec = OptimizerSpec(type=OptimizerType.ROW_WISE_ADAGRAD, learning_rate=0.05)
    dense: OptimizerSpec = OptimizerSpec(type=OptimizerType.ADAGRAD, learning_rate=0.01)
    wide: OptimizerOverride | None = Field(
        default=None, description="WideAndDeep, XDeepFM: overrides sparse for the wide part"
    )


class TrainingSpec(ManifestPart):
    """Training is asynchronous by default, with a bound on staleness.

    `max_staleness` is the number of batches of other workers that servers may apply between the pull and the push of a
    batch. With 0, a worker pulls only after its previous push is applied, and no push of another worker comes between.
    """

    batch_size: int = Field(default=2048, ge=1, le=1 << 20, description="Records per batch")
    epochs: int = Field(default=1, ge=1, le=10_000, description="Passes over the training data")
    seed: int = Field(default=0, ge=0, lt=1 << 63, description="Seed of the record order and of the initial weights")
    max_staleness: int = Field(
        default=64, ge=0, le=1 << 20, description="Bound on staleness, in batches; 0 is synchronous"
    )
    staleness_warmup: int = Field(
        default=96,
        ge=0,
        le=1 << 20,
        description="The bound on staleness starts at 0 and grows as sqrt(applied batches / this number), up to "
        "maxStaleness; with 0, it starts at maxStaleness",
    )
    prefetch_batches: int = Field(default=2, ge=1, le=64, description="Batches that a worker reads ahead")
    pull_ahead: int = Field(
        default=1, ge=0, le=64, description="Batches whose rows a worker pulls before it has pushed the earlier ones"
    )


class HotEmbeddingsMode(StrEnum):
    """Whether workers train rounds; with `Auto`, each worker does while that saves traffic and costs no speed."""

    AUTO = "Auto"
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class HotEmbeddingsSpec(ManifestPart):
    """Workers train rounds: consecutive batches on rows that a worker pulls and pushes once.

    `budget` is the memory of a worker for these rows. With one worker, each batch sees the updates of all batches
    before it. With several, the bound on staleness also bounds the batches of a round.
    """

    mode: HotEmbeddingsMode = HotEmbeddingsMode.DISABLED
    budget: Quantity = Field(default="256Mi", description="Memory of a worker for the rows of a round")

    @property
    def budget_bytes(self) -> int:
        """`budget` in bytes."""
        return memory_bytes(self.budget)


class ShardingSpec(ManifestPart):
    """The master leases shards to workers, and sizes a shard by the worker's speed (DLRover-RM section 5.1)."""

    min_batches: int = Field(default=8, ge=1, description="Least number of batches in a shard")
    max_batches: int = Field(default=64, ge=1, description="Greatest number of batches in a shard")
    lease_timeout: Seconds = Field(
        default=15.0, gt=0, description="The job replaces a worker or PS that sends no heartbeat for this long"
    )
    heartbeat_interval: Seconds = Field(default=1.0, gt=0, description="Interval between heartbeats to the master")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_batches > self.max_batches:
            raise ValueError(f"minBatches ({self.min_batches}) must not be above maxBatches ({self.max_batches})")
        if self.heartbeat_interval * 2 > self.lease_timeout:
            raise ValueError(
                f"leaseTimeout ({duration_text(self.lease_timeout)}) must be at least twice "
                f"heartbeatInterval ({duration_text(self.heartbeat_interval)})"
            )
        return self
