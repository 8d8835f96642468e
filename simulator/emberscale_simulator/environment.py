"""What all jobs of a simulation share, as a scenario says it."""

from dataclasses import dataclass

from emberscale_simulator.mechanics import FailureLaw, gamma_shape
from emberscale_simulator.scenario import Scenario, StartUpSpec, StragglerSpec


@dataclass(frozen=True, slots=True)
class Environment:
    """What all jobs of a simulation share. `profile_noise` is the logarithm's standard deviation of one window.

    `silent_failures` is the share of failed pods whose processes do not end, but go silent.
    """

    failures: FailureLaw | None
    stragglers: StragglerSpec
    start_up: StartUpSpec
    profile_noise: float
    profile_interval: float
    ps_memory_skew: float
    silent_failures: float = 0.0


def make_environment(scenario: Scenario) -> Environment:
    """What all jobs of a scenario share.

    Without failures a day there is no law of failures.
    """
    failures = scenario.failures
    law = None
    if failures.daily_pod_failures > 0:
        law = FailureLaw.from_daily_rate(failures.daily_pod_failures, gamma_shape(failures.median_over_mean))
    return Environment(
        failures=law,
        stragglers=scenario.stragglers,
        start_up=scenario.start_up,
        profile_noise=scenario.profiling.noise,
        profile_interval=scenario.profiling.interval,
        ps_memory_skew=scenario.ps_memory_skew,
        silent_failures=failures.silent,
    )
