"""The model: its architecture, its embedding tables, and the features that a custom model is built for."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from emberscale_api.job.schema import ManifestPart
from emberscale_api.job.training import OptimizerOverride
from emberscale_api.routing import BUCKETS


@dataclass(frozen=True)
class Features:
    """The argument of `spec.model.entrypoint`'s factory.

    `dense` names the dense features, in the order of their columns. `embeddings` maps each column of ids to the
    dimension of its embedding, in the order of the manifest; a list column has one embedding, the pooled one.

    The factory returns a module that takes dense float32 [batch, len(dense)] and a dict of the embeddings by name, each
    float32 [batch, its dimension], and that returns logits float32 [batch].
    """

    dense: tuple[str, ...]
    embeddings: Mapping[str, int]


ENTRYPOINT = r"^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"


def _entrypoint(text: str) -> str:
    if not re.match(ENTRYPOINT, text):
        raise ValueError("must name a module and a function in it, such as package.module:factory")
    if text.startswith("__main__:"):
        raise ValueError(
            "names a function of the notebook or script itself, which no other process can import: put the function "
            "into a file beside it, such as model.py, and write model:factory"
        )
    return text


class Architecture(StrEnum):
    """Built-in models. Those with a wide part also learn one weight per id."""

    DLRM = "DLRM"
    WIDE_AND_DEEP = "WideAndDeep"
    XDEEPFM = "XDeepFM"
    DCN_V2 = "DCNv2"

    @property
    def has_wide_part(self) -> bool:
        """Whether each id also has a weight of its own."""
        return self in (Architecture.WIDE_AND_DEEP, Architecture.XDEEPFM)

    @property
    def needs_one_dimension(self) -> bool:
        """Whether embeddings meet element by element, so that all need the same dimension."""
        return self in (Architecture.DLRM, Architecture.XDEEPFM)


class InitializerType(StrEnum):
    """The distribution of the weights of a new row."""

    UNIFORM = "Uniform"
    NORMAL = "Normal"
    ZEROS = "Zeros"


Scale = Annotated[float, Field(ge=0, le=100)]


class InitializerSpec(ManifestPart):
    """How the weights of a new row are drawn.

    `scale` is the bound of the uniform distribution, and the standard deviation of the normal one.
    """

    type: InitializerType = InitializerType.UNIFORM
    scale: Scale = 0.05


class InitializerOverride(ManifestPart):
    """Overrides of another initializer; absent fields keep its values."""

    type: InitializerType | None = None
    scale: Scale | None = None

    def over(self, base: InitializerSpec) -> InitializerSpec:
        """Returns the other initializer, with these fields replaced."""
        return base.model_copy(update={name: value for name, value in self if value is not None})


class Pooling(StrEnum):
    """How the embeddings of a list become one vector; an empty list becomes zeros."""

    SUM = "Sum"
    MEAN = "Mean"


class AdmissionSpec(ManifestPart):
    """An id gets a row at the `min_count`-th push that touches it; until then it has its initial weights.

    Servers estimate the counts: ids share counters, and counters are halved from time to time. An id may get its row
    early in a table with many ids, and late if its pushes are far apart.
    """

    min_count: int = Field(
        default=1,
        ge=1,
        le=255,
        description="Pushes that an id needs to get a row; with 1, it gets one at its first push",
    )


class EvictionSpec(ManifestPart):
    """Which rows to remove; an id whose row was removed starts over. Without any field, all rows stay.

    Time counts in batches of the job, which stays exact across restores and moves; clock time does not.
    """

    ttl_batches: int | None = Field(
        default=None,
        ge=1,
        lt=1 << 32,
        description="Remove a row that no push has touched for this many batches of the job, or up to an eighth more",
    )
    max_rows: int | None = Field(
        default=None,
        ge=BUCKETS,
        lt=1 << 40,
        description="Remove the least frequently pushed rows of a table that has more rows than this on all servers",
    )

    @property
    def removes_rows(self) -> bool:
        """Whether any row is ever removed."""
        return self.ttl_batches is not None or self.max_rows is not None


class TableOverride(ManifestPart):
    """Overrides for one table: of `model.embeddings` and, for its optimizer, of `optimizers.sparse`."""

    dimension: int | None = Field(default=None, ge=1, le=4096)
    optimizer: OptimizerOverride | None = None
    initializer: InitializerOverride | None = None
    pooling: Pooling | None = Field(
        default=None, description="For list columns: how the embeddings of a list become one vector, Sum or Mean"
    )
    admission: AdmissionSpec | None = None
    eviction: EvictionSpec | None = Field(
        default=None, description="Replaces embeddings.eviction as a whole; a field that is absent here is off"
    )


class EmbeddingSpec(ManifestPart):
    """One table per categorical column and per list column; `tables` overrides the defaults by column name."""

    dimension: int = Field(default=16, ge=1, le=4096, description="Weights per embedding row")
    initializer: InitializerSpec = InitializerSpec()
    pooling: Pooling = Field(
        default=Pooling.SUM, description="How the embeddings of a list become one vector: Sum or Mean"
    )
    admission: AdmissionSpec = Field(default=AdmissionSpec(), description="When an id gets a row")
    eviction: EvictionSpec = Field(default=EvictionSpec(), description="Which rows to remove")
    tables: dict[str, TableOverride] = Field(default_factory=dict)


LayerWidths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65536)], ...],
    Field(max_length=32),
]


class ModelSpec(ManifestPart):
    """A built-in architecture, or a custom model.

    Layer widths are those of the hidden layers; the model adds an output layer of one logit. An architecture ignores
    the fields that it does not use; a custom model uses only `embeddings`.
    """

    architecture: Architecture | None = Field(
        default=None, description="A built-in model; DLRM by default, unless entrypoint is given"
    )
    entrypoint: Annotated[str, AfterValidator(_entrypoint)] | None = Field(
        default=None,
        max_length=256,
        description="A custom model: package.module:factory, where factory(features) returns a torch.nn.Module",
    )
    embeddings: EmbeddingSpec = EmbeddingSpec()
    bottom_mlp: LayerWidths = Field(default=(64, 32), description="DLRM: hidden layers over the dense features")
    top_mlp: LayerWidths = Field(default=(64, 32), description="DLRM: hidden layers over the interactions")
    deep_mlp: LayerWidths = Field(
        default=(64, 32), description="WideAndDeep, XDeepFM, DCNv2: hidden layers of the deep part"
    )
    cin_layers: LayerWidths = Field(
        default=(32, 32), min_length=1, description="XDeepFM: feature maps of each layer of the interaction network"
    )
    cross_layers: int = Field(default=3, ge=1, le=32, description="DCNv2: number of cross layers")
    cross_rank: int | None = Field(
        default=None, ge=1, le=65536, description="DCNv2: rank of the cross layers' matrices; full rank by default"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or given.get("architecture") is not None:
            return given
        return {**given, "architecture": None if given.get("entrypoint") is not None else Architecture.DLRM}

    @model_validator(mode="after")
    def _not_two_models(self) -> Self:
        if self.architecture is not None and self.entrypoint is not None:
            raise ValueError("give either architecture, for a built-in model, or entrypoint, for a custom model")
        return self
