"""Multi-layer perceptrons, and their gradients without a graph.

A batch of 512 takes some ten microseconds in each layer but the widest. PyTorch's autograd takes longer than that for
the bookkeeping: nodes of a graph, a new tensor for each gradient of a parameter, and its addition to zeros. `MLPPasses`
calls the same products of matrices directly, and writes gradients to their final place. It looks up parameters,
gradients and transposed weights once, since that takes as long as some of the products.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from emberscale_trainer.jit import typed_kernel
from emberscale_trainer.jit.memory import float32, load_float32, store_float32
from emberscale_trainer.jit.vector import VECTOR_BYTES, WHOLE, load8, pick8, splat8, store8


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

    def layers(self) -> Iterator[tuple[nn.Linear, bool]]:
        """The linear layers, and whether a ReLU follows."""
        return zip(self._linear, self._activated, strict=True)


class _Layer(NamedTuple):
    """A linear layer's parameters, views of them, and the gradients to write."""

    weight: Tensor
    turned_weight: Tensor
    bias: Tensor
    of_weight: Tensor
    of_bias: Tensor
    activated: bool


class MLPPasses:
    """The forward and backward pass of an MLP whose parameters and gradients stay where they are in memory.

    To be called while PyTorch records no graph.
    """

    def __init__(self, mlp: MLP) -> None:
        """Raises ValueError if a parameter has no gradient, whose memory the backward pass would fill."""
        self._layers = []
        for layer, activated in mlp.layers():
            if layer.weight.grad is None or layer.bias.grad is None:
                raise ValueError("the parameters of the MLP have no gradients to write")
            weight, bias = layer.weight.detach(), layer.bias.detach()
            self._layers.append(_Layer(weight, weight.t(), bias, layer.weight.grad, layer.bias.grad, activated))

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """Returns `inputs`, float32 [B, widths[0]], and the output of each layer, float32 [B, width]."""
        outputs = [inputs]
        for layer in self._layers:
            output = torch.addmm(layer.bias, outputs[-1], layer.turned_weight)
            outputs.append(output.relu_() if layer.activated else output)
        return outputs

    def backward(self, outputs: Sequence[Tensor], gradient: Tensor) -> Tensor:
        """Replaces the parameters' gradients by those of one batch; returns the gradient of the first layer's output.

        `outputs` is the result of `forward`, and `gradient` that of the last of them, which is overwritten. The
        returned gradient is that before the activation, float32 [B, widths[1]]; `backward_to_inputs` continues from it.
        """
        for number in reversed(range(len(self._layers))):
            layer = self._layers[number]
            _pull_back(gradient, outputs[number + 1] if layer.activated else None, layer.of_bias)
            torch.mm(gradient.t(), outputs[number], out=layer.of_weight)
            if number:
                gradient = torch.mm(gradient, layer.weight)
        return gradient

    def backward_to_inputs(self, gradient: Tensor, of_inputs: Tensor) -> None:
        """Writes the gradient of the inputs, float32 [B, widths[0]], which follows from that of the first output."""
        torch.mm(gradient, self._layers[0].weight, out=of_inputs)


_FLOAT = 4
_BLOCK = 64
"""Samples that are summed one after another; sums of blocks are added to each other, against errors of rounding."""


def _pull_back(gradient: Tensor, activated: Tensor | None, of_bias: Tensor) -> None:
    """Takes the gradient of a layer's output back to its sums, and writes their total over the batch to `of_bias`.

    With `activated`, the output of the ReLU, `gradient` becomes 0 in place where that is not positive. PyTorch takes
    two passes for this, and new memory for the first.
    """
    batch, width = gradient.shape
    if not gradient.is_contiguous() or not (activated is None or activated.is_contiguous()):
        raise ValueError(f"gradients and outputs of shape {(batch, width)} are not contiguous")
    outputs = 0 if activated is None else activated.data_ptr()
    _pull_back_rows(gradient.data_ptr(), outputs, batch, width, of_bias.data_ptr())


@typed_kernel("void(i8, i8, i8, i8, i8)")
def _pull_back_rows(gradient, outputs, batch, width, of_bias):  # type: ignore[no-untyped-def]  # Numba infers the types
    # Numba types this from the signature above. All but batch and width are addresses; that of outputs may be 0.
    row_bytes, whole, none = _FLOAT * width, _FLOAT * (width & WHOLE), float32(0)
    for column in range(0, whole, VECTOR_BYTES):
        totals = splat8(none)
        for block in range(0, batch, _BLOCK):
            sums = splat8(none)
            for sample in range(block, min(block + _BLOCK, batch)):
                at = row_bytes * sample + column
                values = load8(gradient + at)
                if outputs:
                    values = pick8(none, load8(outputs + at), values, none)
                    store8(gradient + at, values)
                sums = sums + values
            totals = totals + sums
        store8(of_bias + column, totals)
    for column in range(whole, row_bytes, _FLOAT):
        total = none
        for block in range(0, batch, _BLOCK):
            part_sum = none
            for sample in range(block, min(block + _BLOCK, batch)):
                at = row_bytes * sample + column
                value = load_float32(gradient + at)
                if outputs and not load_float32(outputs + at) > none:
                    value = none
                    store_float32(gradient + at, value)
                part_sum += value
            total += part_sum
        store_float32(of_bias + column, total)
