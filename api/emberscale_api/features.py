"""The features that a custom model is built for."""

from collections.abc import Mapping
from dataclasses import dataclass


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
