"""What a job takes of the brain's advice on how to recover."""

import pytest
from tests.jobmaster.driven import Driven, advise

from emberscale_api.job import FaultToleranceStrategy
from emberscale_jobmaster.events import FailuresExpected


@pytest.mark.parametrize(
    ("strategy", "interval"), [(FaultToleranceStrategy.AUTO, 1000.0), (FaultToleranceStrategy.FULL_RECOVERY, None)]
)
def test_a_job_with_full_recovery_keeps_the_default_interval_between_checkpoints(
    strategy: FaultToleranceStrategy, interval: float | None
) -> None:
    driven = Driven()
    tolerance = driven.spec.fault_tolerance.model_copy(update={"strategy": strategy})
    driven.spec = driven.spec.model_copy(update={"fault_tolerance": tolerance})
    driven.start()
    advise(driven, FaultToleranceStrategy.FULL_RECOVERY)
    assert driven.job.advised_interval == interval


@pytest.mark.parametrize(("seconds", "noted"), [(1050.0, 1000.0), (950.0, 1000.0), (1200.0, 1200.0), (800.0, 800.0)])
def test_an_expectation_of_failures_is_noted_once_it_has_changed_by_a_tenth(seconds: float, noted: float) -> None:
    driven = Driven()
    driven.start()
    for expected in (1000.0, seconds):
        driven.tell(FailuresExpected(now=driven.now, between_failures=expected))
    assert driven.job.between_failures == noted
