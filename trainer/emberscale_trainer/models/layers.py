"""What several models are made of."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(widths: Sequence[int], activate_last: bool) -> nn.Sequential:
    """Linear layers from widths[0] to widths[-1] features, with ReLU between them and, if asked, after the last."""
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if activate_last or number < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
