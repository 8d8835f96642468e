"""Dense parameters as rows of pieces, against torch stepping the whole vector."""

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from emberscale_api.job import OptimizerSpec, OptimizerType, TableSpec
from emberscale_api.routing import DENSE_PIECES, piece_length
from emberscale_trainer.table import DensePieces, Reader, TableStore
from snapshots import records_of

RULES = [OptimizerType.SGD, OptimizerType.MOMENTUM, OptimizerType.ADAGRAD, OptimizerType.ADAM]
REFERENCE: dict[OptimizerType, Callable[[torch.nn.Parameter], torch.optim.Optimizer]] = {
    OptimizerType.SGD: lambda p: torch.optim.SGD([p], lr=0.1),
    OptimizerType.MOMENTUM: lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
    OptimizerType.ADAGRAD: lambda p: torch.optim.Adagrad([p], lr=0.1, eps=1e-8),
    OptimizerType.ADAM: lambda p: torch.optim.Adam([p], lr=0.1),
}
ALL = np.arange(DENSE_PIECES, dtype=np.int64)


def parameters(count: int = 1103) -> NDArray[np.float32]:
    return np.random.default_rng(1).normal(size=count).astype(np.float32)


def pulled(store: TableStore, pieces: NDArray[np.int64] = ALL) -> NDArray[np.float32]:
    counts = np.array([0] * (len(store.specs) - 1) + [len(pieces)], dtype=np.uint32)
    out = np.full(store.values_per_request(counts), np.nan, dtype=np.float32)
    store.pull(counts, pieces, out)
    return out


def push(store: TableStore, gradients: NDArray[np.float32], pieces: NDArray[np.int64] = ALL) -> None:
    """Pushes the given pieces of `gradients`: float32 [parameters], of the whole vector."""
    length = store.specs[-1].dimension
    padded = np.zeros((DENSE_PIECES, length), dtype=np.float32)
    padded.reshape(-1)[: len(gradients)] = gradients
    counts = np.array([0] * (len(store.specs) - 1) + [len(pieces)], dtype=np.uint32)
    store.push(counts, pieces, np.ascontiguousarray(padded[pieces]).reshape(-1))


def test_pieces_begin_with_the_given_parameters_and_are_no_rows_before_a_push(
    make_spec: Callable[[], TableSpec],
) -> None:
    initial = parameters()
    store = TableStore([make_spec()], DensePieces.of(initial, OptimizerSpec()))
    values = pulled(store)
    np.testing.assert_array_equal(values[: len(initial)], initial)
    assert not values[len(initial) :].any()
    assert not records_of(store.readers.snapshot(Reader.CHECKPOINT, nullcontext()), 1)
    assert store.rows() == {"C1": 0}


@pytest.mark.parametrize("rule", RULES)
def test_pieces_on_several_servers_step_as_torch_steps_the_whole(rule: OptimizerType) -> None:
    generator = np.random.default_rng(2)
    initial = parameters()
    pieces = DensePieces.of(initial, OptimizerSpec(type=rule, learning_rate=0.1))
    whole, *shares = [TableStore([], pieces) for _ in range(4)]
    parameter = torch.nn.Parameter(torch.from_numpy(initial.copy()))
    optimizer = REFERENCE[rule](parameter)
    for _ in range(5):
        gradients = generator.normal(size=len(initial)).astype(np.float32)
        push(whole, gradients)
        for number, share in enumerate(shares):
            push(share, gradients, ALL[number::3].copy())
        parameter.grad = torch.from_numpy(gradients)
        optimizer.step()
    stepped = pulled(whole).reshape(DENSE_PIECES, -1)
    for number, share in enumerate(shares):
        np.testing.assert_array_equal(pulled(share, ALL[number::3].copy()), stepped[number::3].reshape(-1))
    # torch rounds a product and its sum only once if the machine has such an instruction
    np.testing.assert_allclose(stepped.reshape(-1)[: len(initial)], parameter.detach().numpy(), rtol=1e-6, atol=3e-7)


@pytest.mark.parametrize("rule", RULES)
def test_loaded_pieces_go_on_as_if_nothing_had_happened(rule: OptimizerType) -> None:
    generator = np.random.default_rng(3)
    pieces = DensePieces.of(parameters(170), OptimizerSpec(type=rule, learning_rate=0.1))
    steady, interrupted, restored = (TableStore([], pieces) for _ in range(3))
    gradients = generator.normal(size=(6, 170)).astype(np.float32)
    for gradient in gradients[:3]:
        push(steady, gradient)
        push(interrupted, gradient)
    for chunk in interrupted.readers.snapshot(Reader.CHECKPOINT, nullcontext()).read(0):
        restored.load(0, chunk)
    for gradient in gradients[3:]:
        push(steady, gradient)
        push(restored, gradient)
    np.testing.assert_array_equal(pulled(restored), pulled(steady))


@pytest.mark.parametrize("piece", [DENSE_PIECES, -1, 1 << 44, -(1 << 63)])
def test_a_record_of_a_piece_that_does_not_exist_is_refused(piece: int) -> None:
    """Scans use the numbers of pieces as indexes, without a check."""
    store = TableStore([], DensePieces.of(parameters(), OptimizerSpec()))
    records = store.layouts[0].empty(2)
    fields = store.layouts[0].fields(records)
    fields["key"], fields["pushes"] = [3, piece], 1
    with pytest.raises(ValueError, match="dense pieces"):
        store.load(0, records)
    assert not records_of(store.readers.snapshot(Reader.CHECKPOINT, nullcontext()), 0)


def test_pieces_that_are_longer_than_a_segment_are_held() -> None:
    initial = np.zeros(64 * 300_000, dtype=np.float32)
    store = TableStore([], DensePieces.of(initial, OptimizerSpec(type=OptimizerType.SGD, learning_rate=1.0)))
    some = np.array([0, 1, 17, 63], dtype=np.int64)
    ones = np.ones(len(some) * piece_length(len(initial)), dtype=np.float32)
    counts = np.array([len(some)], dtype=np.uint32)
    for _ in range(2):
        store.push(counts, some, ones)
    assert (pulled(store, some) == -2).all()
    assert set(records_of(store.readers.snapshot(Reader.CHECKPOINT, nullcontext()))) == set(some.tolist())
    assert not pulled(store, np.array([2], dtype=np.int64)).any()


def test_a_rule_for_rows_alone_steps_no_dense_parameters() -> None:
    with pytest.raises(ValueError, match="FTRL does not step dense parameters"):
        DensePieces.of(parameters(), OptimizerSpec(type=OptimizerType.FTRL, learning_rate=0.1))
