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

    `dense` names the dense features, in the order of their columns; `embeddings` says the dimension of each embedding,
    by the name of its column of ids, in the order of the manifest. The module that the factory returns is called with
    dense float32 [batch, len(dense)] and a dict of the embeddings by name, each float32 [batch, its dimension]; it
    returns logits float32 [batch]. A column of lists has one embedding too, the pooled one.
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
    """Distribution of the weights of a row that is seen for the first time."""

    UNIFORM = "Uniform"
    NORMAL = "Normal"
    ZEROS = "Zeros"


Scale = Annotated[float, Field(ge=0, le=100)]


class InitializerSpec(ManifestPart):
    """`scale` is the bound of the uniform distribution, the standard deviation of the normal one."""

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
    """An id gets a row with the `min_count`-th push that touches it; until then it has its initial weights.

    Pushes are counted in a sketch of counters that ids share and that forgets (`table/admission.py` of the trainer), so
    an id may get its row early where many ids are counted, and late where its pushes lie far apart.
    """

    min_count: int = Field(
        default=1, ge=1, le=255, description="The push that gives an id a row; earlier ones only count. 1: the first"
    )


class EvictionSpec(ManifestPart):
    """Which rows to remove; an id whose row was removed starts anew. Without any field, all rows stay.

    Time is counted in batches of the job, which is exact after a restore or a move; clocks are not.
    """

    ttl_batches: int | None = Field(
        default=None,
        ge=1,
        lt=1 << 32,
        description="Remove rows that no push has touched for so many batches of the job, or up to an eighth more",
    )
    max_rows: int | None = Field(
        default=None,
        ge=BUCKETS,
        lt=1 << 40,
        description="Remove the least frequently pushed rows of a table with more rows than this, over all servers",
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
    pooling: Pooling | None = Field(default=None, description="How the ids of a list column are combined")
    admission: AdmissionSpec | None = None
    eviction: EvictionSpec | None = Field(default=None, description="In place of the default as a whole")


class EmbeddingSpec(ManifestPart):
    """One table per categorical column and per list column; `tables` overrides the defaults by the column's name."""

    dimension: int = Field(default=16, ge=1, le=4096, description="Weights of an embedding row")
    initializer: InitializerSpec = InitializerSpec()
    pooling: Pooling = Field(default=Pooling.SUM, description="How the ids of list columns are combined")
    admission: AdmissionSpec = Field(default=AdmissionSpec(), description="When an id gets a row")
    eviction: EvictionSpec = Field(default=EvictionSpec(), description="Which rows are removed")
    tables: dict[str, TableOverride] = Field(default_factory=dict)


LayerWidths = Annotated[
    tuple[Annotated[int, Field(ge=1, le=65536)], ...],
    Field(max_length=32),
]


class ModelSpec(ManifestPart):
    """Layer widths are those of the hidden layers; the output layer of one logit is added.

    An architecture ignores fields that it does not use; a custom model uses only `embeddings`.
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
            raise ValueError("give either architecture, for a built-in model, or entrypoint, for one of your own")
        return self
