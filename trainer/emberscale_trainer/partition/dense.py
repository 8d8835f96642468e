"""A slice of the flat dense vector, stepped by the kernels that step rows: it is one long row."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from emberscale_api.job import OptimizerSpec, OptimizerType
from emberscale_trainer.table import kernels, optimizers, warm_up

DenseState = dict[str, NDArray[np.float32]]
"""`values` and the optimizer's state by its torch name: float32 [slice], but `step`, if there is one, float32 [1]."""

_STATES: dict[OptimizerType, tuple[str, ...]] = {
    OptimizerType.SGD: (),
    OptimizerType.MOMENTUM: ("momentum_buffer",),
    OptimizerType.ADAGRAD: ("sum",),
    OptimizerType.ADAM: ("exp_avg", "exp_avg_sq", "step"),
}


class DenseSlice:
    """Element-wise rules only, those of torch.optim, so that stepping slices on several servers is stepping the whole.

    torch.optim itself would take ten times as long for a slice of some thousand parameters, all of it in overhead.
    """

    def __init__(self, values: NDArray[np.float32], spec: OptimizerSpec) -> None:
        """Raises ValueError for a rule that does not step dense parameters."""
        if spec.type not in _STATES:
            raise ValueError(f"{spec.type} does not step dense parameters")
        warm_up()
        self._spec = spec
        self._parameters = np.array(optimizers.parameters_of(spec), np.float64)
        names = ("values", *_STATES[spec.type])
        lengths = [1 if name == "step" else len(values) for name in names]
        edges = np.cumsum([0, *lengths])
        self._buffer = np.zeros(edges[-1], np.float32)
        self._parts: DenseState = {
            name: self._buffer[start:stop] for name, start, stop in zip(names, edges, edges[1:], strict=False)
        }
        self.values[:] = values
        if spec.type is OptimizerType.ADAGRAD:
            self._parts["sum"][:] = spec.initial_accumulator

    def __len__(self) -> int:
        return len(self.values)

    @property
    def values(self) -> NDArray[np.float32]:
        """The parameters, float32 [slice]; a view that the next step changes."""
        return self._parts["values"]

    def check(self, gradients: NDArray[np.float32]) -> None:
        """Raises ValueError for gradients that `step` would refuse."""
        if gradients.dtype != np.float32 or gradients.shape != self.values.shape or not gradients.flags.c_contiguous:
            raise ValueError(f"gradients are float32[{len(self)}], not {gradients.dtype}{gradients.shape}")

    def step(self, gradients: NDArray[np.float32]) -> None:
        """One optimizer step with `gradients`, float32 [slice]. Raises ValueError for others."""
        self.check(gradients)
        if self._spec.type is OptimizerType.ADAM:
            # torch.optim.Adam corrects the mean square for bias before it adds epsilon, the rule of rows after
            steps = int(self._parts["step"][0]) + 1
            self._parameters[1] = self._spec.epsilon * math.sqrt(1.0 - self._spec.beta2**steps)
        kernels.step_dense(
            optimizers.CODES[self._spec.type],
            self._buffer.ctypes.data,
            gradients.ctypes.data,
            len(self),
            self._parameters.ctypes.data,
        )

    def state(self) -> DenseState:
        """A copy of the parameters and of the optimizer's state."""
        return {name: part.copy() for name, part in self._parts.items()}

    def restore(self, state: Mapping[str, NDArray[np.float32]]) -> None:
        """Takes over what `state` returned, cut to this slice."""
        for name, part in self._parts.items():
            part[:] = state[name]
