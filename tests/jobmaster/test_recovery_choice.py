"""Which recovery a failure gets: one pure function."""

from dataclasses import replace
from typing import Any

import pytest
from tests.jobmaster.small_job import job

from emberscale_api.job import FaultToleranceStrategy
from emberscale_jobmaster.figures import allowed_pls
from emberscale_jobmaster.recovery import Failure, Partial, Protection, RollBack, choose
from emberscale_jobmaster.state import JobState

LOST = Failure((1,), "ps-1 is lost", is_loss=True)
PROTECTED = Protection(has_checkpoint=True, survivors=3, allowed_pls=0.1)


def test_a_lost_server_is_recovered_alone_where_the_job_allows_it() -> None:
    assert choose(LOST, replace(PROTECTED, pls=0.1)) == Partial()


def test_a_job_that_may_lose_nothing_goes_back_without_a_word() -> None:
    assert choose(LOST, replace(PROTECTED, allowed_pls=0.0)) == RollBack()


def test_a_job_whose_parity_does_not_cover_a_loss_says_why() -> None:
    assert choose(LOST, Protection(has_checkpoint=True, uncovered="rows move")) == RollBack("rows move")


@pytest.mark.parametrize(
    ("failure", "protection", "pls", "why"),
    [
        (Failure((1,), "ps-1 holds other rows"), PROTECTED, 0.0, "ps-1 holds other rows"),
        (LOST, replace(PROTECTED, has_checkpoint=False), 0.0, "no checkpoint"),
        (LOST, replace(PROTECTED, survivors=0), 0.0, "no parameter server has kept its rows"),
        (LOST, PROTECTED, 0.1001, "would be 0.1001, and faultTolerance.targetPLS allows 0.1"),
    ],
    ids=["unknown history", "no checkpoint", "no survivor", "beyond the target"],
)
def test_a_job_that_cannot_recover_partially_goes_back_and_says_why(
    failure: Failure, protection: Protection, pls: float, why: str
) -> None:
    chosen = choose(failure, replace(protection, pls=pls))
    assert isinstance(chosen, RollBack)
    assert why in chosen.why


@pytest.mark.parametrize(
    ("manifest", "advised", "allowed"),
    [
        ({}, True, 0.0),
        ({"targetPLS": 0.2}, False, 0.0),
        ({"targetPLS": 0.2}, True, 0.2),
        ({"strategy": "PartialRecovery"}, False, 0.1),
        ({"strategy": "PartialRecovery", "targetPLS": 0.2}, False, 0.2),
        ({"strategy": "FullRecovery"}, True, 0.0),
    ],
)
def test_nothing_is_lost_unless_the_manifest_allows_it(manifest: dict[str, Any], advised: bool, allowed: float) -> None:
    spec = job(faultTolerance=manifest).spec
    strategy = FaultToleranceStrategy.PARTIAL_RECOVERY if advised else FaultToleranceStrategy.FULL_RECOVERY
    assert allowed_pls(replace(JobState(), advised_strategy=strategy), spec) == allowed
