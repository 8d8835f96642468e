"""Forward and backward over one batch whose rows have been pulled, and the number of threads that compute."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from emberscale_api.job import TrainingJob, resolve_model
from emberscale_api.routing import DENSE_PIECES, piece_length
from emberscale_trainer.data.source import Batch
from emberscale_trainer.models.architectures import build_model
from emberscale_trainer.models.flat import FlatParameters
from emberscale_trainer.models.interaction import Lookup
from emberscale_trainer.models.loss import log_loss
from emberscale_trainer.models.vjp import DLRMVJP, PullBack, vjp_of
from emberscale_trainer.table import require_finite
from emberscale_trainer.worker.keys import KeyPlan
from emberscale_trainer.worker.local_rows import LocalRows
from emberscale_trainer.worker.rows import EmbeddingLayout
from emberscale_trainer.worker.servers import Pulled


def threads_of(cpu_cores: float | None) -> int:
    """Returns the number of threads for these cores; one for a fraction of a core, or if no number is given."""
    return max(1, int(cpu_cores or 1))


class ComputeThreads:
    """The number of compute threads: set from any thread, adopted by the one that computes, as PyTorch requires."""

    def __init__(self) -> None:
        self._wanted = torch.get_num_threads()

    def want(self, cpu_cores: float) -> None:
        """Takes the new number of cores of this process; 0 (no limit) changes nothing."""
        if cpu_cores > 0:
            self._wanted = threads_of(cpu_cores)

    def adopt(self) -> None:
        """Applies the number to the calling thread."""
        if torch.get_num_threads() != self._wanted:
            torch.set_num_threads(self._wanted)


REMEDY = (
    "scale dense features, for example by denseTransform (see docs/data.md), or lower the learning rates; in a model "
    "of your own, look for what may divide by 0"
)
"""What to do about losses and gradients that are NaN or infinite."""


class NonFiniteLossError(Exception):
    """The loss is NaN or infinite; further training would only spread it."""


@dataclass(frozen=True)
class Gradients:
    """The gradients to push: `rows` float32 [plan.values]; `dense` float32 [all pieces], padded with zeros."""

    rows: NDArray[np.float32]
    dense: NDArray[np.float32]


@dataclass(frozen=True)
class Predictions:
    """`probabilities` float32 [batch]; `loss_sum` is the log loss summed over the batch."""

    probabilities: NDArray[np.float32]
    loss_sum: float


_NO_PREDICTIONS = Predictions(np.empty(0, dtype=np.float32), 0.0)


class ModelReplica:
    """A worker's copy of the dense model. Each pull overwrites its parameters."""

    def __init__(self, job: TrainingJob) -> None:
        """Raises EntrypointError if the user's model cannot be constructed."""
        resolved = resolve_model(job.spec)
        self._model: nn.Module = build_model(job.spec.model, resolved, job.spec.training.seed)
        self._flat = FlatParameters(self._model)
        self._vjp = vjp_of(self._model, self._flat)
        self.layout = EmbeddingLayout(resolved.tables)
        self.tables = resolved.tables

    @property
    def parameters(self) -> int:
        """Length of the flat dense vector."""
        return len(self._flat)

    def train(self, batch: Batch, plan: KeyPlan, pulled: Pulled) -> tuple[Gradients, Predictions]:
        """Gradients of the mean log loss over the batch.

        Raises NonFiniteLossError, NonFiniteGradientError and EntrypointError.
        """
        if not len(batch.labels):
            return Gradients(np.zeros(plan.values, np.float32), self._padded(None)), _NO_PREDICTIONS
        dense = self._prepare(pulled.dense, batch)
        if isinstance(self._vjp, DLRMVJP) and not plan.lists:
            lookup = Lookup(torch.from_numpy(pulled.rows), torch.from_numpy(plan.offsets))
            of_rows, predictions = self._pulled_back(batch, *self._vjp(dense, lookup))
        else:
            embeddings = self._embeddings(plan, pulled.rows)
            of_embeddings, predictions = self._pulled_back(batch, *self._vjp(dense, embeddings))
            of_rows = self.layout.scatter(of_embeddings, plan)
        gradients = Gradients(of_rows, self._padded(self._flat.gradients.numpy()))
        require_finite(gradients.rows, f"rows of batch {batch.number}")
        require_finite(gradients.dense, f"dense parameters of batch {batch.number}")
        return gradients, predictions

    def train_locally(self, batch: Batch, plan: KeyPlan, local: LocalRows) -> Predictions:
        """Steps the rows and the dense parameters of a round, which are in `local`, by one of its batches.

        `plan` is that of the batch within its round. Raises as `train` does.
        """
        if not len(batch.labels):
            return _NO_PREDICTIONS
        dense = self._prepare(local.dense, batch)
        of_embeddings, predictions = self._pulled_back(batch, *self._vjp(dense, self._embeddings(plan, local.rows)))
        of_embeddings = np.ascontiguousarray(of_embeddings)
        of_dense = self._flat.gradients.numpy()
        require_finite(of_embeddings.reshape(-1), f"embeddings of batch {batch.number}")
        require_finite(of_dense, f"dense parameters of batch {batch.number}")
        local.step(plan, of_embeddings, self._padded(of_dense))
        return predictions

    def _prepare(self, dense: NDArray[np.float32], batch: Batch) -> torch.Tensor:
        """Takes over the dense parameters to train with; returns the batch's dense features."""
        self._switch(training=True)
        self._load(dense)
        return torch.from_numpy(batch.dense)

    def _pulled_back(
        self, batch: Batch, logits: torch.Tensor, pull_back: PullBack
    ) -> tuple[NDArray[np.float32], Predictions]:
        """Takes the gradient of the loss back; returns that of the embeddings or of their rows, and the predictions."""
        loss = log_loss(logits.numpy(), batch.labels)
        if not np.isfinite(loss.total):
            raise NonFiniteLossError(f"the loss of batch {batch.number} is {loss.total / len(batch.labels)}: {REMEDY}")
        of_embeddings = pull_back(torch.from_numpy(loss.gradient))
        if of_embeddings is None:
            raise NonFiniteLossError("the model's output does not depend on its embeddings")
        return of_embeddings.numpy(), Predictions(loss.probabilities, loss.total)

    def evaluate(self, batch: Batch, plan: KeyPlan, pulled: Pulled) -> Predictions:
        """Returns predictions and loss without gradients. Raises NonFiniteLossError and EntrypointError."""
        self._switch(training=False)
        with torch.no_grad():
            self._load(pulled.dense)
            logits = self._model(torch.from_numpy(batch.dense), self._embeddings(plan, pulled.rows))
            loss = log_loss(logits.numpy(), batch.labels)
        if not np.isfinite(loss.total):  # the master refuses such a sum
            mean = loss.total / len(batch.labels)
            raise NonFiniteLossError(f"the loss of batch {batch.number} of an evaluation is {mean}: {REMEDY}")
        return Predictions(loss.probabilities, loss.total)

    def _load(self, dense: NDArray[np.float32]) -> None:
        self._flat.values.copy_(torch.from_numpy(dense[: self.parameters]))

    def _embeddings(self, plan: KeyPlan, rows: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(self.layout.gather(rows, plan))

    def _padded(self, gradients: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Returns a copy of the flat gradients, padded to whole pieces; zeros if there are none."""
        padded = np.empty(DENSE_PIECES * piece_length(self.parameters), np.float32)
        padded[: self.parameters] = 0 if gradients is None else gradients
        padded[self.parameters :] = 0
        return padded

    def _switch(self, training: bool) -> None:
        """Sets the mode: layers such as dropout differ between training and evaluation."""
        if self._model.training is not training:
            self._model.train(training)
