"""What a window of reports says about a shape, and which windows say nothing."""

from dataclasses import replace

import pytest
from tests.jobmaster.pure import Pure

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import Rebuilds
from emberscale_jobmaster.observations import Observations, Vitals, WorkReport
from emberscale_jobmaster.profiling import Moment, measure, moment
from eventually import unwrap

ROLES = {"worker": {"replicas": 2}, "ps": {"replicas": 1}}
MEMBERS = [MemberId(Role.PS, 0, "ps-0"), MemberId(Role.WORKER, 0, "w"), MemberId(Role.WORKER, 1, "v")]


def training() -> Pure:
    pure = Pure(**ROLES)
    pure.start_training(records=100_000)
    pure.register(Role.WORKER, 1, "v")
    return pure


def seen_after(reports: list[tuple[MemberId, float, int]]) -> Observations:
    """Each report is (who, when, samples)."""
    seen = Observations()
    for member in MEMBERS:
        seen = seen.heard(member).beat(member, Vitals(memory_bytes=1 << 20), {})
    for sequence, (member, at, samples) in enumerate(reports):
        work = WorkReport(samples, 0.0, (), (), {"compute": 0.5})
        seen = seen.worked(member, sequence + 1, work, at)
    return seen


def at(pure: Pure, now: float, reports: list[tuple[MemberId, float, int]]) -> Moment:
    return replace(moment(pure.state, seen_after(reports), pure.spec, now), training_seconds=now)


def test_a_workers_speed_is_between_its_own_reports_however_long_ago_the_last_came() -> None:
    pure, (_, one, other) = training(), MEMBERS
    first = [(one, 9.2, 500), (other, 9.9, 700)]
    later = [*first, (one, 19.2, 1000), (other, 18.9, 1800)]  # 100 a second; 200 a second
    measured = unwrap(measure(at(pure, 10.0, first), at(pure, 20.0, later), pure.spec))
    assert measured.throughput == pytest.approx(300)
    assert measured.iteration_seconds == pytest.approx(2 * pure.spec.training.batch_size / 300)
    assert not measured.restarted


def test_a_window_in_which_nobody_trained_says_nothing() -> None:
    pure, (_, one, other) = training(), MEMBERS
    told = [(one, 9.0, 500), (other, 9.0, 500)]
    measured = measure(at(pure, 10.0, told), at(pure, 20.0, [*told, (one, 19.0, 0), (other, 19.0, 0)]), pure.spec)
    assert measured is not None
    assert measured.throughput == 0
    assert measured.restarted


def test_a_window_with_a_worker_that_came_in_it_says_nothing() -> None:
    pure, (_, one, other) = training(), MEMBERS
    before = at(pure, 10.0, [(one, 9.0, 500), (other, 9.0, 500)])
    pure.register(Role.WORKER, 1, "successor")
    later = [(one, 9.0, 500), (one, 19.0, 900), (MemberId(Role.WORKER, 1, "successor"), 19.0, 100)]
    measured = unwrap(measure(before, at(pure, 20.0, later), pure.spec))
    assert measured.restarted


def test_a_job_without_limits_has_no_size_before_it_trains() -> None:
    pure = Pure(**ROLES)
    nothing = at(pure, 10.0, []), at(pure, 20.0, [])
    assert measure(*nothing, pure.spec) is None
    limits = {"resources": {"limits": {"cpu": 2, "memory": "1Gi"}}}
    limited = Pure(worker={"replicas": 2, **limits}, ps={"replicas": 1, **limits})
    measured = unwrap(measure(at(limited, 10.0, []), at(limited, 20.0, []), limited.spec))
    assert (measured.shape.worker_cpu, measured.restarted) == (2, True)


def test_a_lost_server_counts_as_a_failure_whichever_way_the_job_recovers() -> None:
    pure = training()
    state = replace(pure.state, recoveries=1, reloads=2, rebuilt=Rebuilds(count=4))
    assert moment(state, Observations(), pure.spec, 0.0).failures == 7
