"""Multi-layer perceptrons, and their gradients without a graph.

A batch of 512 takes some ten microseconds in each layer but the widest. PyTorch's autograd takes longer than that for
the bookkeeping: nodes of a graph, a new tensor for each gradient of a parameter, and its addition to zeros. `outputs`
and `pull_back` call the same products of matrices directly, and write gradients to their final place.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

_threshold_backward = torch.ops.aten.threshold_backward.default


class MLP(nn.Sequential):
    """Linear layers from widths[0] to widths[-1] features, with ReLU between them and optionally after the last."""

    def __init__(self, widths: Sequence[int], activate_last: bool) -> None:
        linear = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
        activated = [activate_last or number < len(linear) - 1 for number in range(len(linear))]
        layers: list[nn.Module] = []
        for layer, followed in zip(linear, activated, strict=True):
            layers.append(layer)
            if followed:
                layers.append(nn.ReLU(inplace=True))  # the backward pass of a linear layer does not need its output
        super().__init__(*layers)
        self._linear, self._activated = linear, activated

    def outputs(self, inputs: Tensor) -> list[Tensor]:
        """Returns `inputs`, float32 [B, widths[0]], and the output of each layer, float32 [B, width].

        To be called while PyTorch records no graph.
        """
        outputs = [inputs]
        for layer, activated in zip(self._linear, self._activated, strict=True):
            output = torch.addmm(layer.bias, outputs[-1], layer.weight.t())
            outputs.append(output.relu_() if activated else output)
        return outputs

    def pull_back(self, outputs: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """Replaces the parameters' gradients by those of one batch; returns the gradient of the first layer's output.

        `outputs` is the result of `outputs`, and `gradient` the gradient of the last of them. The returned gradient is
        that before the activation, float32 [B, widths[1]]; `of_inputs` continues from it.
        """
        for number in reversed(range(len(self._linear))):
            layer = self._linear[number]
            if self._activated[number]:
                gradient = _threshold_backward(gradient, outputs[number + 1], 0)
            layer.bias.grad = torch.sum(gradient, 0, out=layer.bias.grad)
            layer.weight.grad = torch.mm(gradient.t(), outputs[number], out=layer.weight.grad)
            if number:
                gradient = torch.mm(gradient, layer.weight)
        return gradient

    def of_inputs(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of the inputs, float32 [B, widths[0]], from that of the first layer's output."""
        return torch.mm(gradient, self._linear[0].weight)
