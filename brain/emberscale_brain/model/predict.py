"""DLRover-RM equations 1-6 as a linear model: iteration seconds = features(shape) . coefficients; and its predictions.

The features are, in the order of `COEFFICIENTS`: m / cpu_w (equation 2), w / (p cpu_p) (3), (M / p) / (B / w) (4),
m D / p (5), 1 and w / cpu_p. Each equation has its own constant beta, but measurements determine only their sum, so one
feature stands for all four.

The last feature is not in the paper, which divides the update evenly among the PS. Every batch calls every PS, and the
fixed cost of a call (receiving, locking, a call for each table, answering) does not depend on the number of PS.
Measured at batches of 512, a PS took about 1 ms of processor time a batch as one of one, of two and of three.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from emberscale_api.shape import JobShape
from emberscale_brain.planner.types import COEFFICIENTS, JobMetadata, ThroughputFit

FEATURES = len(COEFFICIENTS)


@dataclass(frozen=True, slots=True)
class ModelConstants:
    """The constants of a running job: m, M (bytes), D (floats per sample) and B (bytes/s)."""

    batch_size: float
    dense_bytes: float
    embedding_dimension: float
    network_bytes_per_second: float

    @classmethod
    def of(cls, metadata: JobMetadata, network_bytes_per_second: float) -> "ModelConstants":
        """The constants of a job on a network."""
        return cls(metadata.batch_size, metadata.dense_bytes, metadata.embedding_dimension, network_bytes_per_second)


def features(
    constants: ModelConstants, workers: ArrayLike, ps: ArrayLike, worker_cpu: ArrayLike, ps_cpu: ArrayLike
) -> NDArray[np.float64]:
    """Features of shapes given as arrays that broadcast together; float64[..., 6]."""
    w, p, cpu_w, cpu_p = (np.asarray(x, dtype=np.float64) for x in (workers, ps, worker_cpu, ps_cpu))
    columns = np.broadcast_arrays(
        constants.batch_size / cpu_w,
        w / (p * cpu_p),
        (constants.dense_bytes / p) / (constants.network_bytes_per_second / w),
        constants.batch_size * constants.embedding_dimension / p,
        1.0,
        w / cpu_p,
    )
    return np.stack(columns, axis=-1)


def shape_features(constants: ModelConstants, shape: JobShape) -> NDArray[np.float64]:
    """Features of one shape; float64[6]."""
    return features(constants, shape.workers, shape.ps, shape.worker_cpu, shape.ps_cpu)


_LEAST_SECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class Coefficients:
    """A fit as arrays: `mean` float64[6], `covariance` float64[6, 6]; and how far the terms overlap."""

    mean: NDArray[np.float64]
    covariance: NDArray[np.float64]
    overlap: float = 1.0

    @classmethod
    def of(cls, fit: ThroughputFit) -> "Coefficients":
        """The arrays of a fit."""
        return cls(np.array(fit.coefficients), np.array(fit.covariance), fit.overlap)

    def iteration_seconds(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds of an iteration for features float64[..., 6]; float64[...]."""
        if self.overlap == 1:
            return np.maximum(x @ self.mean, _LEAST_SECONDS)
        together: NDArray[np.float64] = ((x * self.mean) ** self.overlap).sum(axis=-1) ** (1 / self.overlap)
        return np.maximum(together, _LEAST_SECONDS)

    def slopes(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the gradient of the seconds by coefficient, float64[..., 6]; times the coefficients, the seconds."""
        if self.overlap == 1:
            return x
        share = x * self.mean / self.iteration_seconds(x)[..., None]
        moved: NDArray[np.float64] = x * share ** (self.overlap - 1)
        return moved

    def uncertainty(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """Relative standard deviation of the predicted time, and of the throughput; float64[...]."""
        slopes = self.slopes(x)
        variance = np.einsum("...i,ij,...j->...", slopes, self.covariance, slopes)
        relative: NDArray[np.float64] = np.sqrt(np.maximum(variance, 0.0)) / self.iteration_seconds(x)
        return relative


def throughput(constants: ModelConstants, fit: ThroughputFit, shape: JobShape) -> tuple[float, float]:
    """Samples per second that a shape is predicted to train (equation 1), and its relative standard deviation."""
    x = shape_features(constants, shape)
    model = Coefficients.of(fit)
    return shape.workers * constants.batch_size / float(model.iteration_seconds(x)), float(model.uncertainty(x))
