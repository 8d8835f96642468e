"""Reasons for people: what was decided, what it is expected to bring, and what that rests on."""

from emberscale_api.job.duration import measured_time
from emberscale_api.shape import GIB
from emberscale_brain.planner.candidates import Candidates
from emberscale_brain.planner.types import MemoryForecast, ThroughputFit


def counted(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def fit_in_words(fit: ThroughputFit) -> str:
    """What the model rests on and how sure it is."""
    if not fit.profiles:
        return "The model is that of similar jobs; this job has no measurements yet."
    text = (
        f"The fit rests on {counted(fit.profiles, 'profile')} of {counted(fit.distinct_shapes, 'shape')}, "
        f"RMSLE {fit.rmsle:.3f}"
    )
    if fit.outliers:
        text += f", {counted(fit.outliers, 'outlier')} set aside"
    if fit.prior_share >= 0.05:
        text += f"; {fit.prior_share:.0%} of it is the prior"
    return text + "."


def gain_in_words(candidates: Candidates, now: int, then: int, remaining_samples: float) -> str:
    """What going from one row to another brings and costs: throughput, cost, time and standstill."""
    before, after = float(candidates.gross[now]), float(candidates.gross[then])
    saved = remaining_samples / before - remaining_samples / max(float(candidates.net[then]), 1e-12)
    cost = float(candidates.cost[then] - candidates.cost[now])
    dearer = "more" if cost >= 0 else "less"
    sooner = f"done {measured_time(saved)} sooner" if saved >= 0 else f"done {measured_time(-saved)} later"
    speed = f"{before:,.0f} -> {after:,.0f} samples/s, +-{candidates.doubt[then]:.1%}"
    return (
        f"{after / before - 1:+.1%} throughput ({speed}) for {abs(cost):.3g}/h {dearer}; {sooner}, "
        f"{measured_time(float(candidates.pause[then]))} of standstill"
    )


def memory_in_words(forecast: MemoryForecast, limit: int) -> str:
    """When a PS is expected to be full."""
    gib = float(GIB)
    return (
        f"at the end the largest PS is expected to need {forecast.expected / gib:.3g} GiB "
        f"({forecast.lower / gib:.3g} to {forecast.upper / gib:.3g}, {forecast.law}) of {limit / gib:.3g} GiB"
    )
