"""Training without processes: the worker's and the servers' own code, called in turn."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from emberscale_api.job import OptimizerSpec, OptimizerType, Pooling, ResolvedModel, TrainingJob, resolve_model
from emberscale_trainer.data.source import Batch
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import flat_copy
from emberscale_trainer.table import DensePieces, TableStore
from emberscale_trainer.worker.compute import ModelReplica
from emberscale_trainer.worker.keys import KeyPlan, KeyPlanner
from emberscale_trainer.worker.servers import Pulled
from master_stand_in import even_table


class InProcessTraining:
    """One worker and some parameter servers, strictly one batch after another."""

    def __init__(self, job: TrainingJob, servers: int = 2) -> None:
        self._replica = ModelReplica(job)
        initial = flat_copy(build_model(job.spec.model, resolve_model(job.spec), job.spec.training.seed)).numpy()
        self._planner = KeyPlanner(even_table(servers), self._replica.tables, len(initial))
        self._pieces = DensePieces.of(initial, job.spec.optimizers.dense)
        self._dense_length = self._pieces.initial.size
        self.stores = [self.empty_store() for _ in range(servers)]

    def empty_store(self) -> TableStore:
        """Returns the tables of a server without rows."""
        return TableStore(self._replica.tables, self._pieces)

    def train(self, batch: Batch) -> float:
        """Trains on a batch; its mean loss before the step."""
        plan = self._planner.plan(batch.ids, batch.lists)
        gradients, predictions = self._replica.train(batch, plan, self._pull(plan))
        for server, store in enumerate(self.stores):
            pieces = [gradients.dense[start:stop] for start, stop in plan.dense_runs[server]]
            values = np.concatenate([gradients.rows[plan.values_of(server)], *pieces])
            store.push(plan.counts[server], plan.keys[server], values)
        return predictions.loss_sum / max(1, len(batch.labels))

    def predict(self, batch: Batch) -> NDArray[np.float32]:
        """Probabilities float32 [batch]."""
        plan = self._planner.plan(batch.ids, batch.lists)
        return self._replica.evaluate(batch, plan, self._pull(plan)).probabilities

    def _pull(self, plan: KeyPlan) -> Pulled:
        rows = np.empty(plan.values, dtype=np.float32)
        dense = np.empty(self._dense_length, dtype=np.float32)
        for server, store in enumerate(self.stores):
            answer = np.empty(store.values_per_request(plan.counts[server]), dtype=np.float32)
            store.pull(plan.counts[server], plan.keys[server], answer)
            part = rows[plan.values_of(server)]
            part[:] = answer[: len(part)]
            read = len(part)
            for start, stop in plan.dense_runs[server]:
                dense[start:stop] = answer[read : read + stop - start]
                read += stop - start
        return Pulled(rows, dense)


class PlainTraining:
    """The same with PyTorch alone: one nn.EmbeddingBag and one optimizer per table; ids are below `ids`."""

    def __init__(self, job: TrainingJob, ids: int) -> None:
        self._resolved = resolve_model(job.spec)
        self._model = build_model(job.spec.model, self._resolved, job.spec.training.seed)
        self._bags = [
            nn.EmbeddingBag(
                ids,
                table.dimension,
                mode="mean" if table.pooling is Pooling.MEAN else "sum",
                include_last_offset=True,
                _weight=torch.from_numpy(_initial_rows(self._resolved, table.number, ids)),
            )
            for table in self._resolved.tables
        ]
        self._optimizers = [
            _optimizer(table.optimizer, list(bag.parameters()))
            for table, bag in zip(self._resolved.tables, self._bags, strict=True)
        ]
        self._optimizers.append(_optimizer(job.spec.optimizers.dense, list(self._model.parameters())))

    def train(self, batch: Batch) -> float:
        """Trains on a batch; its mean loss before the step."""
        loss = nn.functional.binary_cross_entropy_with_logits(self._logits(batch), torch.from_numpy(batch.labels))
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.item()

    def predict(self, batch: Batch) -> NDArray[np.float32]:
        """Probabilities float32 [batch]."""
        with torch.no_grad():
            probabilities: NDArray[np.float32] = torch.sigmoid(self._logits(batch)).numpy()
        return probabilities

    def _logits(self, batch: Batch) -> torch.Tensor:
        records, columns = batch.ids.shape
        vectors = []
        for table, bag in zip(self._resolved.tables, self._bags, strict=True):
            if table.column < columns:
                values, edges = batch.ids[:, table.column], np.arange(records + 1)
            else:
                lists = batch.lists[table.column - columns]
                values, edges = lists.values, lists.offsets
            vectors.append(bag(torch.from_numpy(np.ascontiguousarray(values)), torch.from_numpy(edges)))
        logits: torch.Tensor = self._model(torch.from_numpy(batch.dense), torch.cat(vectors, dim=1))
        return logits


def _initial_rows(resolved: ResolvedModel, number: int, ids: int) -> NDArray[np.float32]:
    counts = np.zeros(len(resolved.tables), dtype=np.uint32)
    counts[number] = ids
    rows = np.empty(ids * resolved.tables[number].dimension, dtype=np.float32)
    TableStore(resolved.tables).pull(counts, np.arange(ids), rows)
    return rows.reshape(ids, -1)


def _optimizer(spec: OptimizerSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns an optimizer, for the rules that do not change a row without a gradient."""
    if spec.type is OptimizerType.SGD:
        return torch.optim.SGD(parameters, lr=spec.learning_rate)
    if spec.type is OptimizerType.ADAGRAD:
        return torch.optim.Adagrad(
            parameters, lr=spec.learning_rate, eps=spec.epsilon, initial_accumulator_value=spec.initial_accumulator
        )
    raise ValueError(f"no plain counterpart of {spec.type} here")
