"""What a fit says about shapes, and how sure it is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberscale_api.shape import JobShape
from emberscale_brain.model.features import ModelConstants, shape_features
from emberscale_brain.planner.types import ThroughputFit

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
        """How the seconds move with each coefficient; float64[..., 6]. Times the coefficients they add up to them."""
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


def rmsle(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    """Root mean squared logarithmic error; both above 0."""
    return float(np.sqrt(np.mean((np.log(predicted) - np.log(measured)) ** 2)))
