"""What a window of reports says about a shape, and which windows say nothing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.jobmaster.pure import Pure

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import Rebuilds
from emberscale_jobmaster.ledger import Lease, Ledger
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.profiling import Moment, measure, moment
from emberscale_jobmaster.reports import Vitals, WorkReport
from eventually import unwrap

ROLES = {"worker": {"replicas": 2}, "ps": {"replicas": 1}}
MEMBERS = [MemberId(Role.PS, 0, "ps-0"), MemberId(Role.WORKER, 0, "w"), MemberId(Role.WORKER, 1, "v")]


LEASED = 40


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


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20))
def test_samples_of_unfinished_shards_count(steps: list[tuple[int, bool]]) -> None:
    """A worker reports batches as it trains them, and now and then commits all that it has trained."""
    pure, worker = training(), MEMBERS[1]
    size, done, committed = pure.spec.training.batch_size, 0, 0
    reports = [(worker, 0.0, 0)]
    now = moment(pure.state, seen_after(reports), pure.spec, 0.0)
    for batches, commits in steps:
        trained = min(batches, LEASED - done)
        done += trained
        committed = done if commits else committed
        reports.append((worker, float(len(reports)), trained * size))
        lease = Lease(1, worker, 0, 0, LEASED, committed)
        ledger = Ledger(100, ((LEASED, 100),), ((0, committed),) if committed else (), leases={1: lease})
        now = moment(replace(pure.state, ledger=ledger), seen_after(reports), pure.spec, 0.0, now)
        assert now.samples == done * size


def test_what_is_trained_again_counts_once() -> None:
    pure, worker = training(), MEMBERS[1]
    size, reports = pure.spec.training.batch_size, [(MEMBERS[1], 0.0, 0)]
    before = moment(pure.state, seen_after(reports), pure.spec, 0.0)
    state = replace(pure.state, ledger=Ledger(100, ((4, 100),), leases={1: Lease(1, worker, 0, 0, 4, 0)}))
    reports.append((worker, 1.0, 50 * size))
    again = moment(state, seen_after(reports), pure.spec, 1.0, before)
    assert again.samples == 4 * size  # no more than the shard
    rolled_back = moment(replace(state, recoveries=1), seen_after(reports), pure.spec, 2.0, again)
    assert rolled_back.samples == 0


def test_a_window_with_a_move_knows_no_rows_and_no_memory_of_theirs() -> None:
    """Servers that have not reported since then report rows that others have reported, too."""
    pure = training()
    before, after = at(pure, 10.0, []), at(pure, 20.0, [])
    moved = unwrap(measure(before, replace(after, routing_version=after.routing_version + 1), pure.spec))
    assert (moved.rows, moved.ps_memory, moved.restarted) == (0, 0, True)
    assert unwrap(measure(before, after, pure.spec)).ps_memory == 1 << 20


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
