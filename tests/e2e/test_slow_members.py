"""How much work a worker or a parameter server still gets on 3% of a core, by counts."""

import re
from collections.abc import Callable

from emberscale_api.routing import BUCKETS
from emberscale_api.rpc import master_pb2 as pb
from local_jobs import ENDLESS, Job
from throttle import Throttle

SHARE = 0.03


def member(status: pb.JobStatus, role: "pb.Role.ValueType", index: int) -> pb.MemberStatus:
    (found,) = (one for one in status.members if (one.member.role, one.member.index) == (role, index))
    return found


def test_a_worker_that_becomes_slow_is_given_next_to_nothing(make_job: Callable[..., Job]) -> None:
    job = make_job({"training": {"epochs": ENDLESS}, "worker": {"replicas": 3}})
    job.start()
    assert job.wait_for(lambda: job.samples() > 50_000)
    with Throttle(SHARE) as throttle:
        throttle.add(job.member("worker", 1).pid)
        assert job.wait_for(lambda: member(job.status(), pb.WORKER, 1).HasField("slowness"), timeout=600)
        found = job.status()
        assert job.wait_for(lambda: _leased(job, found, 0) > 400, timeout=600)
        assert _leased(job, found, 1) < 100, "a fair share would be more than 400"
    finished = job.stop()
    assert re.search(r"^worker-1 is \d+ times slower than its peers: ", finished.stderr, re.MULTILINE)


def test_a_parameter_server_that_becomes_slow_gives_its_buckets_away_or_is_replaced(
    make_job: Callable[..., Job],
) -> None:
    job = make_job({"training": {"epochs": ENDLESS}, "ps": {"replicas": 3}})
    job.start()
    assert job.wait_for(lambda: job.samples() > 50_000)
    assert member(job.status(), pb.PS, 1).buckets in (341, 342)
    with Throttle(SHARE) as throttle:
        slow = job.member("ps", 1)
        throttle.add(slow.pid)
        assert job.wait_for(lambda: member(job.status(), pb.PS, 1).buckets < 150 or not slow.is_running(), timeout=600)
    assert job.trains_on()
    status = job.status()
    assert sum(one.buckets for one in status.members) == BUCKETS
    assert status.recoveries <= 1
    finished = job.stop()
    assert re.search(r"^ps-1 is \d+ times slower than its peers", finished.stderr, re.MULTILINE)


def _leased(job: Job, since: pb.JobStatus, worker: int) -> int:
    """Returns the number of batches that a worker has leased since that status."""
    before, now = (member(status, pb.WORKER, worker) for status in (since, job.status()))
    return now.leased_batches - before.leased_batches
