"""The model: its architecture and its embedding tables."""

from enum import StrEnum

from pydantic import Field

from emberscale_api.job.optimizer import OptimizerSpec
from emberscale_api.job.schema import ManifestPart


class Architecture(StrEnum):
    """Built-in models."""

    DLRM = "DLRM"


class InitializerType(StrEnum):
    """Distribution of the weights of a row that is seen for the first time."""

    UNIFORM = "Uniform"
    NORMAL = "Normal"
    ZEROS = "Zeros"


class InitializerSpec(ManifestPart):
    """`scale` is the bound of the uniform distribution, the standard deviation of the normal one."""

    type: InitializerType = InitializerType.UNIFORM
    scale: float = Field(default=0.05, ge=0, le=100)


class Pooling(StrEnum):
    """How the embeddings of a list become one vector; an empty list becomes zeros."""

    SUM = "Sum"
    MEAN = "Mean"


class TableOverride(ManifestPart):
    """What differs for one table from `model.embeddings`."""

    dimension: int | None = Field(default=None, ge=1, le=4096)
    optimizer: OptimizerSpec | None = None
    initializer: InitializerSpec | None = None
    pooling: Pooling | None = Field(default=None, description="Of a list column")


class EmbeddingSpec(ManifestPart):
    """One table a categorical column and a list column; `tables` overrides the defaults by the column's name."""

    dimension: int = Field(default=16, ge=1, le=4096)
    initializer: InitializerSpec = InitializerSpec()
    pooling: Pooling = Field(default=Pooling.SUM, description="Of list columns")
    tables: dict[str, TableOverride] = Field(default_factory=dict)


class ModelSpec(ManifestPart):
    """Layer widths are those of the hidden layers; the output layer of one logit is added."""

    architecture: Architecture = Architecture.DLRM
    embeddings: EmbeddingSpec = EmbeddingSpec()
    bottom_mlp: tuple[int, ...] = Field(default=(64, 32), description="Hidden layers over the dense features")
    top_mlp: tuple[int, ...] = Field(default=(64, 32), description="Hidden layers over the interactions")
