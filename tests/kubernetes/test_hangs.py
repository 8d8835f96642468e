"""Processes in pods that hang without dying: the job completes all the same."""

import pytest

from cluster import RECORDS, Place, assert_exact, manifest, submit
from faults import ProcessKiller

pytestmark = pytest.mark.timeout(900)
EPOCHS = 4


@pytest.mark.parametrize("role", ["master", "worker", "ps"])
def test_a_job_completes_though_a_process_of_it_hangs(place: Place, killer: ProcessKiller, role: str) -> None:
    """The operator finds out that a master does not answer; for the others the kubelet takes a minute at most."""
    document = manifest(f"hangs-{role}", place, epochs=EPOCHS)
    document["spec"]["sharding"]["leaseTimeout"] = "10s"
    job = submit(document, place)
    job.wait_for_samples(10_000)
    pod = job.running(role)[0]
    killer.stop(pod)
    status = job.wait_complete(400)
    assert_exact(job, place, EPOCHS * RECORDS)
    if role == "worker":
        return  # the other may have trained the rest before this one was found out
    assert status[role]["restarts"] >= 1
    reasons = {event["reason"] for event in job.events() if pod["metadata"]["name"] in event["message"]}
    assert f"Lost{'Master' if role == 'master' else 'PS'}Pod" in reasons
