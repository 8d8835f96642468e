"""When pods fail: a gamma law fitted to what CPR, section 3.1, reports of 20,000 production training jobs.

The paper gives no table, but two ranges over job sizes: a median time to failure of 8-17 hours and a mean of 14-30.
Their quotients, 8/14 and 17/30, agree (0.571 and 0.567), and the median of a gamma law over its mean depends on its
shape only: 0.569 means a shape of 0.675. Below 1 it is the paper's pattern: failures crowd at the beginning and are
nearly uniform after it. The mean falls linearly with the number of nodes, so the law is drawn in pod-hours.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaincinv

CPR_MEDIAN_HOURS = (8.0, 17.0)
CPR_MEAN_HOURS = (14.0, 30.0)


def gamma_shape(median_over_mean: float) -> float:
    """The shape of the gamma law whose median is this fraction of its mean; above 0 and below 1."""
    if not 0.05 < median_over_mean < 0.98:
        raise ValueError(f"no usable gamma law has a median of {median_over_mean:g} times its mean: give 0.05 to 0.98")
    return float(brentq(lambda shape: gammaincinv(shape, 0.5) / shape - median_over_mean, 0.1, 20.0))


def cpr_shape() -> float:
    """The shape that fits both ends of CPR's ranges."""
    quotients = [median / mean for median, mean in zip(CPR_MEDIAN_HOURS, CPR_MEAN_HOURS, strict=True)]
    return gamma_shape(sum(quotients) / len(quotients))


@dataclass(frozen=True, slots=True)
class FailureLaw:
    """Time to the next failure of a job, in pod-seconds: a job of n pods ages n pod-seconds a second."""

    mean_pod_seconds: float
    shape: float

    def draw(self, random: np.random.Generator) -> float:
        """Pod-seconds until the next failure."""
        return float(random.gamma(self.shape, self.mean_pod_seconds / self.shape))

    @classmethod
    def from_daily_rate(cls, daily_pod_failures: float, shape: float) -> "FailureLaw":
        """The law under which a pod fails with this probability a day, in the long run."""
        return cls(86_400 / daily_pod_failures, shape)
