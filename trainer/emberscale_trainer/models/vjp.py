"""The logits of a batch, and the way back from their gradient: a vector-Jacobian product (VJP) of a model.

PyTorch's autograd takes the gradients of any model. Those of a DLRM are taken without a graph, and also straight from
and to the rows that its embeddings come from: embeddings and their gradients, side by side for a whole batch, would not
fit into the second-level cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from emberscale_trainer.models.architectures import DLRM
from emberscale_trainer.models.flat import FlatParameters
from emberscale_trainer.models.interaction import Lookup, interaction_gradients, interactions
from emberscale_trainer.models.mlp import MLPPasses

PullBack = Callable[[Tensor], Tensor | None]
"""Takes the gradient of logits, float32 [B], back, and overwrites it: to the gradients of the parameters, which it
replaces, and to that of the embeddings, float32 [B, width], which it returns; None if the logits do not depend on them.
"""

VJP = Callable[[Tensor, Tensor], tuple[Tensor, PullBack]]
"""Takes dense features float32 [B, dense] and embeddings float32 [B, width]. Returns the logits float32 [B], without a
graph, and the pull-back of their gradient, to call once."""


def vjp_of(model: nn.Module, flat: FlatParameters) -> VJP:
    """Returns the VJP of a model whose parameters and gradients are those of `flat`."""
    if isinstance(model, DLRM):
        return DLRMVJP(model)

    def by_autograd(dense: Tensor, embeddings: Tensor) -> tuple[Tensor, PullBack]:
        embeddings.requires_grad_()
        logits: Tensor = model(dense, embeddings)

        def pull_back(gradient: Tensor) -> Tensor | None:
            flat.clear_gradients()
            logits.backward(gradient)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return embeddings.grad

        return logits.detach(), pull_back

    return by_autograd


class DLRMVJP:
    """The VJP of a DLRM, whose parameters and gradients stay where they are in memory."""

    def __init__(self, model: DLRM) -> None:
        self._dimension = model.dimension
        self._bottom = None if model.bottom is None else MLPPasses(model.bottom)
        self._top = MLPPasses(model.top)

    @torch.no_grad()
    def __call__(self, dense: Tensor, embeddings: Tensor | Lookup) -> tuple[Tensor, PullBack]:
        """As `VJP`. The gradient of a lookup is that of its rows, float32 [values]."""
        below = [dense[:, :0]] if self._bottom is None else self._bottom.forward(dense)
        above = self._top.forward(interactions(below[-1], embeddings, self._dimension))

        @torch.no_grad()
        def pull_back(gradient: Tensor) -> Tensor:
            of_hidden = self._top.backward(above, gradient.unsqueeze(1))
            self._top.backward_to_inputs(of_hidden, above[0])  # which nothing needs any more
            of_bottom, of_embeddings = interaction_gradients(above[0], below[-1], embeddings, self._dimension)
            if self._bottom is not None:
                self._bottom.backward(below, of_bottom)
            return of_embeddings

        return above[-1].squeeze(1), pull_back
