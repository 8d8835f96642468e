"""The references of `training_throughput`: the same DLRM without parameter servers, one process of it.

Run as a program it trains one of them over records held in memory and prints its samples/s.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from whole_run import OPTIMIZERS

DIMENSION, TABLES, DENSE = 16, 26, 13
BOTTOM, TOP = (64, 32), (64, 32)
WARM_UP = 20
"""The first batches, which do not count for the rate."""

_EPSILON = 1e-8
_SPARSE_RATE, _DENSE_RATE = (OPTIMIZERS[part]["learningRate"] for part in ("sparse", "dense"))


class RowWiseAdagrad:
    """Adagrad with one accumulator per row, of the mean of the squared elements, as in Emberscale and FBGEMM.

    `torch.optim.Adagrad` has one for each element, and is slower.
    """

    def __init__(self, weights: Sequence[Tensor], learning_rate: float, epsilon: float) -> None:
        self.weights = weights
        self.accumulators = [torch.zeros(len(weight)) for weight in weights]
        self._learning_rate = learning_rate
        self._epsilon = epsilon

    @torch.no_grad()
    def step(self) -> None:
        """Applies the sparse gradients."""
        for weight, accumulator in zip(self.weights, self.accumulators, strict=True):
            assert weight.grad is not None
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            accumulator[rows] += values.pow(2).mean(dim=1)
            scale = accumulator[rows].sqrt_().add_(self._epsilon)
            weight.index_add_(0, rows, values / scale[:, None], alpha=-self._learning_rate)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for weight in self.weights:
            weight.grad = None


class _Optimizer(Protocol):
    def step(self) -> object: ...

    def zero_grad(self) -> object: ...


class _DLRM(nn.Module):
    """The model of Naumov et al. (2019); subclasses look up its embeddings, float32 [B, TABLES, DIMENSION]."""

    def __init__(self) -> None:
        super().__init__()
        vectors = TABLES + 1
        self.bottom = _mlp([DENSE, *BOTTOM, DIMENSION], activate_last=True)
        self.top = _mlp([DIMENSION + vectors * (vectors - 1) // 2, *TOP, 1], activate_last=False)
        lower = torch.tril_indices(vectors, vectors, offset=-1)
        self._pairs = lower[0] * vectors + lower[1]

    def logits(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Returns logits float32 [B] from dense features [B, DENSE] and embeddings."""
        vectors = torch.cat([self.bottom(dense).unsqueeze(1), embeddings], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).view(len(dense), -1)
        logits: Tensor = self.top(torch.cat([vectors[:, 0], products.index_select(1, self._pairs)], dim=1))
        return logits.squeeze(1)


class PlainDLRM(_DLRM):
    """All tables end to end in one `nn.EmbeddingBag(sparse=True)`: 1.5 times as fast as one call per table."""

    def __init__(self, rows_of_tables: list[int], batch: int) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(sum(rows_of_tables), DIMENSION, mode="sum", sparse=True)
        nn.init.uniform_(self.table.weight, -0.05, 0.05)
        self._offsets = torch.arange(batch * TABLES)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Returns logits float32 [B] from dense features [B, DENSE] and row numbers [B * TABLES], sample by sample."""
        return self.logits(dense, self.table(ids, self._offsets).view(len(dense), TABLES, DIMENSION))


class FbgemmDLRM(_DLRM):
    """FBGEMM's table-batched embeddings with row-wise Adagrad fused into the backward pass, as TorchRec runs them."""

    def __init__(self, rows_of_tables: list[int], batch: int) -> None:
        super().__init__()
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as batched
        from fbgemm_gpu.split_embedding_configs import EmbOptimType

        place = (batched.EmbeddingLocation.HOST, batched.ComputeDevice.CPU)
        self.tables = batched.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIMENSION, *place) for rows in rows_of_tables],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=_SPARSE_RATE,
            eps=_EPSILON,
        )
        self.tables.init_embedding_weights_uniform(-0.05, 0.05)
        self._offsets = torch.arange(batch * TABLES + 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        """Returns logits float32 [B] from dense features [B, DENSE] and row numbers [TABLES * B], table by table."""
        return self.logits(dense, self.tables(ids, self._offsets).view(len(dense), TABLES, DIMENSION))


def _mlp(widths: list[int], activate_last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if activate_last or number < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _plain(rows_of_tables: list[int], batch: int) -> tuple[_DLRM, list[_Optimizer]]:
    model = PlainDLRM(rows_of_tables, batch)
    tables = RowWiseAdagrad([model.table.weight], _SPARSE_RATE, _EPSILON)
    return model, [tables, _dense_optimizer(model)]


def _fbgemm(rows_of_tables: list[int], batch: int) -> tuple[_DLRM, list[_Optimizer]]:
    model = FbgemmDLRM(rows_of_tables, batch)
    return model, [_dense_optimizer(model)]


def _dense_optimizer(model: _DLRM) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([*model.bottom.parameters(), *model.top.parameters()], lr=_DENSE_RATE)


_Builder = Callable[[list[int], int], tuple[_DLRM, list[_Optimizer]]]
REFERENCES: dict[str, _Builder] = {"plain": _plain, "fbgemm": _fbgemm}


def train(reference: str, records: Path, threads: int, batch: int) -> float:
    """Trains over the records after a line on standard input; returns the samples/s.

    Row numbers are prepared beforehand, in the order in which the reference looks them up.
    """
    torch.set_num_threads(threads)
    with np.load(records) as loaded:
        labels, dense = torch.from_numpy(loaded["labels"]), torch.from_numpy(loaded["dense"])
        ids, firsts = loaded["ids"], loaded["firsts"]
    torch.manual_seed(0)
    model, optimizers = REFERENCES[reference](np.diff(firsts).tolist(), batch)
    batches = []
    for at in range(0, len(labels) - batch + 1, batch):
        rows = ids[at : at + batch]
        by_table = (rows - firsts[:-1]).T if reference == "fbgemm" else rows
        numbers = torch.from_numpy(np.ascontiguousarray(by_table).reshape(-1))
        batches.append((labels[at : at + batch], dense[at : at + batch], numbers))
    print("ready", flush=True)
    sys.stdin.readline()
    for number, (wanted, features, numbers) in enumerate(batches):
        if number == WARM_UP:
            began = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(features, numbers), wanted)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for optimizer in optimizers:
            optimizer.step()
    return (len(batches) - WARM_UP) * batch / (time.perf_counter() - began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reference", choices=REFERENCES)
    parser.add_argument("records", type=Path)
    parser.add_argument("threads", type=int)
    parser.add_argument("batch", type=int)
    given = parser.parse_args()
    print(train(given.reference, given.records, given.threads, given.batch))
