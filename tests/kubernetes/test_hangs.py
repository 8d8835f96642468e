"""Processes in pods that hang without dying are replaced, and the job goes on."""

import pytest

from cluster import ENDLESS, Place, assert_exact_so_far, manifest, submit
from faults import ProcessKiller

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("role", "reason"), [("master", "LostMasterPod"), ("worker", "LostWorkerPod"), ("ps", "LostPSPod")]
)
def test_a_process_that_hangs_is_replaced_and_the_job_goes_on(
    place: Place, killer: ProcessKiller, role: str, reason: str
) -> None:
    """The operator detects a master that does not answer; the kubelet detects the others within a minute."""
    document = manifest(f"hangs-{role}", place, epochs=ENDLESS)
    document["spec"]["sharding"]["leaseTimeout"] = "10s"
    job = submit(document, place)
    job.wait_for_samples(1)
    pod = job.running(role)[0]
    killer.stop(pod)

    def told() -> bool:
        of_pod = [event for event in job.events() if pod["metadata"]["name"] in event["message"]]
        return reason in {event["reason"] for event in of_pod}

    job.until("it is found out", lambda _: told() or None, seconds=400)
    job.until("it is replaced", lambda status: status[role].get("restarts") and job.running(role), seconds=240)
    job.wait_for_samples(job.samples() + 1)
    assert_exact_so_far(job, place)
