"""A module's dense parameters as one flat vector, of which parameter servers hold pieces."""

import torch
from torch import Tensor, nn


class FlatParameters:
    """Re-homes a module's parameters and gradients into two flat float32 vectors, in the order of `parameters()`.

    The module's parameters become views: writing `values` changes the model, and a backward pass fills `gradients`.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = list(module.parameters())
        total = sum(parameter.numel() for parameter in parameters)
        self.values = torch.empty(total, dtype=torch.float32)
        self.gradients = torch.zeros(total, dtype=torch.float32)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            view = self.values[start:stop].view_as(parameter)
            view.copy_(parameter.detach())
            parameter.data = view
            parameter.grad = self.gradients[start:stop].view_as(parameter)
            start = stop

    def __len__(self) -> int:
        return self.values.numel()

    def clear_gradients(self) -> None:
        """Zeroes the gradients in place, so that they stay views."""
        self.gradients.zero_()


def flat_copy(module: nn.Module) -> Tensor:
    """The module's parameters as one new flat float32 vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def load_flat(module: nn.Module, values: Tensor) -> None:
    """The inverse of `flat_copy`: copies a flat float32 vector into the module's parameters."""
    start = 0
    with torch.no_grad():
        for parameter in module.parameters():
            stop = start + parameter.numel()
            parameter.copy_(values[start:stop].view_as(parameter))
            start = stop
