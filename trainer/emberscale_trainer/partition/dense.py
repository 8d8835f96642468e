"""A slice of the flat dense vector, stepped by torch.optim."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from emberscale_api.job import OptimizerSpec, OptimizerType

DenseState = dict[str, NDArray[np.float32]]
"""`values` and the optimizer's state by its torch name: float32 [slice], but `step`, if there is one, float32 [1]."""


class DenseSlice:
    """Element-wise rules only, so that stepping slices on several servers is stepping the whole."""

    def __init__(self, values: NDArray[np.float32], spec: OptimizerSpec) -> None:
        self._parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
        self._parameter.grad = torch.zeros_like(self._parameter)
        self._optimizer = _build(self._parameter, spec)

    def __len__(self) -> int:
        return self._parameter.numel()

    @property
    def values(self) -> NDArray[np.float32]:
        """The parameters, float32 [slice]; a view that the next step changes."""
        view: NDArray[np.float32] = self._parameter.detach().numpy()
        return view

    def step(self, gradients: NDArray[np.float32]) -> None:
        """One optimizer step with `gradients`, float32 [slice]."""
        if len(self):
            self._parameter.grad = torch.from_numpy(gradients)
            self._optimizer.step()

    def state(self) -> DenseState:
        """A copy of the parameters and of the optimizer's state."""
        state: DenseState = {"values": self.values.copy()}
        for name, value in self._optimizer.state.get(self._parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[name] = value.detach().to(torch.float32).reshape(-1).numpy().copy()
        return state

    def restore(self, state: Mapping[str, NDArray[np.float32]]) -> None:
        """Takes over what `state` returned, cut to this slice."""
        with torch.no_grad():
            self._parameter.copy_(torch.from_numpy(state["values"]))
        entries: dict[str, torch.Tensor] = {}
        for name, value in state.items():
            if name == "step":
                entries[name] = torch.tensor(float(value[0]), dtype=torch.float32)
            elif name != "values":
                entries[name] = torch.from_numpy(value.copy())
        if entries:
            self._optimizer.state[self._parameter].update(entries)
        else:
            self._optimizer.state.pop(self._parameter, None)


def _build(parameter: torch.nn.Parameter, spec: OptimizerSpec) -> torch.optim.Optimizer:
    if spec.type is OptimizerType.SGD:
        return torch.optim.SGD([parameter], lr=spec.learning_rate)
    if spec.type is OptimizerType.MOMENTUM:
        return torch.optim.SGD([parameter], lr=spec.learning_rate, momentum=spec.momentum)
    if spec.type is OptimizerType.ADAGRAD:
        return torch.optim.Adagrad(
            [parameter],
            lr=spec.learning_rate,
            eps=spec.epsilon,
            initial_accumulator_value=spec.initial_accumulator,
        )
    if spec.type is OptimizerType.ADAM:
        return torch.optim.Adam([parameter], lr=spec.learning_rate, betas=(spec.beta1, spec.beta2), eps=spec.epsilon)
    raise ValueError(f"{spec.type} does not step dense parameters")
