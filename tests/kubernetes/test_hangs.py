"""Processes in pods that hang without dying: others take their places, and the job completes."""

import pytest

from cluster import Place, assert_exact, manifest, submit
from faults import ProcessKiller

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("role", ["master", "worker", "ps"])
def test_a_pod_whose_process_hangs_is_replaced(place: Place, killer: ProcessKiller, role: str) -> None:
    """The operator finds out that a master does not answer; for the others the kubelet takes a minute at most."""
    job = submit(manifest(f"hangs-{role}", place), place)
    job.wait_for_samples(10_000)
    pod = job.running(role)[0]
    killer.stop(pod)
    status = job.wait_complete(240)
    assert_exact(job, place)
    assert status[role]["restarts"] >= 1
    reasons = {event["reason"] for event in job.events() if pod["metadata"]["name"] in event["message"]}
    noun = {"master": "Master", "worker": "Worker", "ps": "PS"}[role]
    assert f"Lost{noun}Pod" in reasons
