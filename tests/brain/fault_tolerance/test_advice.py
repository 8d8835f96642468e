"""Which recovery is cheapest, and when."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emberscale_api.checkpoint import PRIORITY_SHARE
from emberscale_api.job import FaultToleranceStrategy
from emberscale_api.shape import JobShape
from emberscale_brain.fault_tolerance import (
    WITH_PRIORITY,
    WITHOUT_PRIORITY,
    FailureCosts,
    FailureRecord,
    Recovery,
    advise,
    coded_recovery,
    expected_pls,
    failure_costs,
    full_recovery,
    partial_recovery,
)

HOUR = 3600.0
EVERY = frozenset(Recovery)
JOB = FailureCosts(
    total_seconds=56 * HOUR, ps=18, between_failures=28 * HOUR, save=300, load=300, reschedule=600, target_pls=0.1
)

costs = st.builds(
    FailureCosts,
    total_seconds=st.floats(60, 1e7),
    ps=st.integers(1, 64),
    between_failures=st.floats(60, 1e8),
    save=st.floats(0, 3600),
    load=st.floats(0, 3600),
    reschedule=st.floats(0, 3600),
    target_pls=st.floats(0, 0.5),
    saves_priority_rows=st.booleans(),
    parity=st.integers(1, 2),
    parity_slowdown=st.floats(0, 0.5),
    rebuild=st.floats(0, 3600),
)


def test_full_recoverys_interval_is_the_best_one() -> None:
    best = full_recovery(JOB)
    assert best.interval == pytest.approx(math.sqrt(2 * JOB.save * JOB.between_failures))

    def overhead(interval: float) -> float:  # CPR equation 1 over T_total
        return JOB.save / interval + (JOB.load + interval / 2 + JOB.reschedule) / JOB.between_failures

    assert best.overhead == pytest.approx(min(overhead(t) for t in np.linspace(600, 1e5, 20_000)), rel=1e-6)


def test_partial_recoverys_interval_meets_the_target_pls() -> None:
    partial = partial_recovery(replace(JOB, total_seconds=1e7))
    assert partial.interval == pytest.approx(2 * 0.1 * 18 * 28 * HOUR)
    assert partial.expected_pls == pytest.approx(0.1)
    assert partial.expected_pls == pytest.approx(expected_pls(partial.interval, JOB.between_failures, JOB.ps))


def test_cprs_setting_prefers_partial_recovery_to_full() -> None:
    assert partial_recovery(JOB).overhead < 0.5 * full_recovery(JOB).overhead
    assert advise(replace(JOB, parity_slowdown=0.2), offered=EVERY).strategy is Recovery.PARTIAL


def test_no_loss_allowed_falls_back_to_full_recovery() -> None:
    advice = advise(replace(JOB, target_pls=0.0, parity_slowdown=0.2), offered=EVERY)
    assert advice.strategy is Recovery.FULL
    assert advice.costs[Recovery.FULL].expected_pls == 0


def test_frequent_failures_and_slow_checkpoints_are_worth_parity() -> None:
    unstable = replace(JOB, between_failures=HOUR, save=600, target_pls=0.01, parity_slowdown=0.03)
    assert advise(unstable, offered=EVERY).strategy is Recovery.CODED


def test_parity_is_weighed_and_named_where_it_is_not_offered() -> None:
    unstable = replace(JOB, between_failures=HOUR, save=600, target_pls=0.0, parity_slowdown=0.03)
    advice = advise(unstable)
    assert advice.strategy is Recovery.FULL
    assert advice.costs[Recovery.CODED] == coded_recovery(unstable)
    assert "; ErasureCoding, which the manifest rules out, is expected to cost less" in advice.reason
    assert "rules out" not in advise(replace(JOB, parity_slowdown=0.32)).reason
    assert "ErasureCoding" in advise(replace(JOB, parity_slowdown=0.32)).reason


def test_parity_2_costs_more_memory_and_as_much_time_as_parity_1_where_as_many_servers_get_the_changes() -> None:
    shape = JobShape(2, 5, 1, 1, 1 << 30, 1 << 30)
    made = [
        failure_costs(shape, HOUR, FailureRecord(), FailureRecord(), 1.0, 20.0, 15.0, parity=count) for count in (1, 2)
    ]
    assert [costs.parity for costs in made] == [1, 2]
    assert [costs.parity_slowdown for costs in made] == [pytest.approx(0.4), pytest.approx(0.4)]
    assert [costs.parity_memory for costs in made] == [pytest.approx(1 / 4), pytest.approx(2 / 3)]


def test_what_parity_adds_to_the_time_is_over_the_time_without_as_all_overheads_are() -> None:
    """If a sample takes 1.5 times the CPU time, parity adds 50% to the time, but takes a third of the throughput."""
    never = FailureCosts(1e6, 5, between_failures=1e15, save=0, load=0, reschedule=0, parity_slowdown=0.5)
    assert coded_recovery(replace(never, memory_cost_share=0.0)).overhead == pytest.approx(0.5)


def test_parity_is_not_taken_for_costing_less_of_the_throughput_than_of_the_time() -> None:
    shape, failures = JobShape(2, 3, 1, 1, 1 << 30, 1 << 30), FailureRecord(1000, 1000 * 3 * 250.0)
    costs = failure_costs(shape, 10 * HOUR, failures, FailureRecord(), 1.0, 15.0, 240.0)
    failing = replace(costs, parity_slowdown=0.48)
    by_throughput = replace(failing, parity_slowdown=1 - 1 / 1.48)
    strategies = [advise(costs, offered=[Recovery.CODED]).strategy for costs in (by_throughput, failing)]
    assert strategies == [Recovery.CODED, Recovery.FULL]


def test_the_advice_says_what_is_assumed_and_what_a_benchmark_says() -> None:
    shape, one = JobShape(2, 2, 1, 1, 1 << 30, 1 << 30), FailureRecord(1, 100.0)
    told = [
        advise(failure_costs(shape, HOUR, own, FailureRecord(), save, 20.0, 15.0)).reason
        for own, save in ((FailureRecord(), 0.0), (one, 0.0), (one, 2.0))
    ]
    assert "; assumed so far: how often a PS is lost and what a checkpoint costs" in told[0]
    assert "; assumed so far: what a checkpoint costs" in told[1]
    assert "assumed" not in told[2]
    dear = replace(JOB, between_failures=HOUR, save=600, parity_slowdown=0.03)
    parity = advise(dear, offered=[Recovery.CODED]).reason
    assert "of the job's time by a benchmark of parity on another job (FullRecovery" in parity


def test_parity_makes_no_checkpoint_rarer() -> None:
    """The equations do not count that a node may take two servers along, and that rows have no parity at first."""
    costs = failure_costs(
        JobShape(2, 2, 1, 1, 1 << 30, 1 << 30), 168 * HOUR, FailureRecord(), FailureRecord(), 1.0, 20.0, 15.0
    )
    assert coded_recovery(costs).interval == full_recovery(costs).interval < HOUR
    assert f"ErasureCoding {coded_recovery(costs).overhead:.2%} by a benchmark of parity" in advise(costs).reason


def test_a_job_that_hardly_ever_fails_needs_nothing_but_checkpoints() -> None:
    advice = advise(replace(JOB, between_failures=1e9, save=1, total_seconds=HOUR), offered=EVERY)
    assert advice.strategy is Recovery.FULL
    assert "FullRecovery" in advice.reason
    assert "ErasureCoding" in advice.reason


def test_what_a_manifest_does_not_allow_is_told_with_its_cost_and_not_taken() -> None:
    advice, overhead = advise(replace(JOB, target_pls=0.0, parity_slowdown=0.2)), partial_recovery(JOB).overhead
    assert advice.strategy is Recovery.FULL
    assert advice.costs[Recovery.PARTIAL] == partial_recovery(JOB)
    told = f"PartialRecovery {overhead:.2%} with a targetPLS of 0.1, which the manifest does not allow"
    assert told in advice.reason


def test_priority_rows_cost_their_share_of_a_checkpoint_each() -> None:
    """Between two checkpoints of all rows are seven saves of an eighth of the rows each."""
    without, saving = partial_recovery(JOB), partial_recovery(replace(JOB, saves_priority_rows=True))
    assert saving.interval == without.interval
    assert saving.overhead - without.overhead == pytest.approx(7 / 8 * JOB.save / without.interval)


def test_both_kinds_of_partial_recovery_are_told_and_the_one_in_the_manifest_is_weighed() -> None:
    without, saving = advise(JOB, offered=EVERY), advise(replace(JOB, saves_priority_rows=True), offered=EVERY)
    assert without.costs[Recovery.PARTIAL] == saving.costs[WITHOUT_PRIORITY]
    assert without.costs[WITH_PRIORITY] == saving.costs[Recovery.PARTIAL]
    assert len(without.costs) == len(saving.costs) == 4
    dear = replace(JOB, save=3 * HOUR, target_pls=0.01, parity_slowdown=0.5)  # a checkpoint of 3 hours every 10 hours
    assert partial_recovery(dear).overhead < full_recovery(dear).overhead
    assert partial_recovery(replace(dear, saves_priority_rows=True)).overhead == full_recovery(dear).overhead
    assert advise(dear, offered=EVERY).strategy is Recovery.PARTIAL
    assert advise(replace(dear, saves_priority_rows=True), offered=EVERY).strategy is Recovery.FULL


def test_a_target_out_of_reach_is_told_with_what_it_takes_and_what_is_within_reach() -> None:
    far = replace(JOB, target_pls=1e-5)  # at most 36 s between checkpoints that cost 300 s
    assert (
        "; targetPLS 1e-05 is out of reach: it takes a checkpoint every 36.3s, and each costs "
        "5m; 8.3e-05 is within reach, at 101% of the job's time; until then the job saves as "
        "often as with full recovery, and goes back as a whole beyond its target"
    ) in advise(far, offered=EVERY).reason
    assert "out of reach" not in advise(replace(far, target_pls=8.3e-5), offered=EVERY).reason
    assert "out of reach" in advise(replace(far, target_pls=8.2e-5), offered=EVERY).reason
    assert "out of reach" not in advise(replace(far, target_pls=0.0)).reason
    hopeless = replace(far, ps=1, total_seconds=HOUR, save=HOUR, target_pls=0.5)
    assert "; no other is within reach either" not in advise(hopeless, offered=EVERY).reason
    assert "; no other is within reach either" in advise(replace(hopeless, save=2 * HOUR), offered=EVERY).reason


def test_partial_recovery_that_misses_its_target_is_not_taken_however_cheap() -> None:
    crashing = replace(JOB, between_failures=60, save=120, load=0, reschedule=0, parity_slowdown=1.0)
    partial, full = partial_recovery(crashing), full_recovery(crashing)
    assert partial.overhead < full.overhead
    assert advise(crashing, offered=EVERY).strategy is Recovery.PARTIAL
    missed = replace(crashing, target_pls=0.01)
    assert partial_recovery(missed).overhead == full_recovery(missed).overhead
    assert advise(missed, offered={Recovery.PARTIAL}).strategy is Recovery.FULL


def test_one_ps_cannot_keep_parity() -> None:
    assert Recovery.CODED not in advise(replace(JOB, ps=1), offered=EVERY).costs
    assert Recovery.CODED not in advise(replace(JOB, ps=2, parity=2), offered=EVERY).costs


def test_parity_2_makes_roll_backs_rarer() -> None:
    one, two = coded_recovery(JOB), coded_recovery(replace(JOB, parity=2))
    assert two.overhead < one.overhead


@settings(max_examples=200)
@given(costs)
def test_the_advice_is_never_much_dearer_than_any_other_way(job: FailureCosts) -> None:
    advice = advise(job, offered=EVERY)
    partial = advice.costs[Recovery.PARTIAL]
    kept = partial.expected_pls <= job.target_pls * (1 + 1e-9)
    kept &= partial.interval <= job.target_pls * job.ps * job.total_seconds * (1 + 1e-9)
    choices = EVERY if kept else EVERY - {Recovery.PARTIAL}
    cheapest = min(cost.overhead for way, cost in advice.costs.items() if way in choices)
    assert advice.strategy in choices, "what misses the target is not taken"
    assert advice.costs[advice.strategy].overhead <= cheapest + 0.001 + 1e-12
    assert 0 < advice.checkpoint_interval < math.inf
    assert all(math.isfinite(cost.overhead) and cost.overhead >= 0 for cost in advice.costs.values())


@settings(max_examples=100)
@given(costs, st.floats(1.1, 10))
def test_more_failures_never_cost_less(job: FailureCosts, factor: float) -> None:
    worse = replace(job, between_failures=job.between_failures / factor)
    for way in (full_recovery, partial_recovery, coded_recovery):
        assert way(worse).overhead >= way(job).overhead * (1 - 1e-6)


@pytest.mark.parametrize(
    ("field", "value"), [("between_failures", 0.0), ("save", -1.0), ("target_pls", 1.5), ("ps", 0)]
)
def test_impossible_costs_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(JOB, **{field: value})  # type: ignore[arg-type]  # the fields have several types


@given(costs)
def test_what_a_manifest_cannot_say_is_not_advised(job: FailureCosts) -> None:
    advice = advise(job)
    assert advice.strategy.value in set(FaultToleranceStrategy)
    assert advice.strategy in advice.costs
    assert advice.strategy is not Recovery.PARTIAL, "nobody has allowed a loss"


@given(costs)
@example(replace(JOB, total_seconds=1e6, between_failures=1e8, target_pls=0.01))  # more saves than with full recovery
def test_one_loss_at_the_worst_moment_stays_within_the_target_of_partial_recovery(job: FailureCosts) -> None:
    """If a server dies just before the next checkpoint, its share of all samples of the interval is lost.

    A job loses more only if no checkpoint is as quick as its target takes, or if meeting it costs more than full
    recovery; then it saves as often as with full recovery.
    """
    partial, full = partial_recovery(job), full_recovery(job)
    if partial.interval / job.total_seconds / job.ps <= job.target_pls * (1 + 1e-9):
        return
    assert (partial.interval, partial.overhead) == (full.interval, full.overhead)
    longest = job.target_pls * job.ps * min(2 * job.between_failures, job.total_seconds)
    if longest >= max(1.0, job.save):
        saves = job.save * (2 - PRIORITY_SHARE if job.saves_priority_rows else 1)
        overhead = saves / longest + (job.load + job.reschedule) / job.between_failures
        assert overhead >= full.overhead * (1 - 1e-9)


@given(costs)
def test_a_job_with_partial_recovery_pays_no_more_than_with_full_recovery(job: FailureCosts) -> None:
    """Also if its target is out of reach, and the closest interval would take all of the job's time."""
    partial, full = partial_recovery(job), full_recovery(job)
    assert partial.overhead <= full.overhead
    assert partial.expected_pls <= job.target_pls * (1 + 1e-9)


def test_small_losses_are_told_with_two_digits() -> None:
    rare = replace(JOB, between_failures=1e9, save=0.001, load=0, reschedule=0, target_pls=0.1)
    assert "FullRecovery is expected to cost 0.00014% of the job's time" in advise(rare).reason
