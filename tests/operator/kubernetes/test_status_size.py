"""The API server stores no object beyond 1.5 MiB: a status that it refuses ends a job's progress."""

import json

import pytest

from emberscale_api.job.roles import MAX_REPLICAS, Role
from emberscale_api.job.status import TrainingJobStatus
from emberscale_operator.kubernetes.pod_state import PodView, Waiting
from emberscale_operator.kubernetes.record import members_of
from emberscale_operator.kubernetes.status import to_document
from emberscale_operator.machine import History, Instance, InstanceId, InstanceState, Lives, Resources
from memory_api import START

MOST_BYTES = 1 << 20
"""The rest is for the spec, and for what the API server notes of who wrote which field."""
UNSCHEDULABLE = "0/300 nodes are available: 12 node(s) had untolerated taint(s), 288 Insufficient memory. " * 8


def waiting(number: int) -> TrainingJobStatus:
    """Returns the status of a job whose servers and workers, so many each, all wait for a node."""
    ids = [InstanceId(role, index, 12) for role in (Role.PS, Role.WORKER) for index in range(number)]
    views = [
        PodView(
            name=f"a-job-of-a-team-{one.role}-{one.index}-{one.incarnation}",
            uid=f"{one.index:036}",
            node="",
            address="",
            instance=Instance(one, InstanceState.PENDING, Resources(), started_at=START),
            waiting=Waiting("Unschedulable", UNSCHEDULABLE),
        )
        for one in ids
    ]
    lives = Lives(last_incarnation=12, counted=11, restarts=11, streak=3, ready_at=START, faults=2)
    history = History({(one.role, one.index): lives for one in ids})
    return TrainingJobStatus(members=members_of(history, views, {}, (), ()))


@pytest.mark.parametrize("number", [100, 500, MAX_REPLICAS])
def test_the_status_of_a_job_whose_members_all_wait_can_be_stored(number: int) -> None:
    assert len(json.dumps(to_document(waiting(number)))) < MOST_BYTES


def test_the_members_of_a_job_of_common_size_say_at_length_what_they_wait_for() -> None:
    assert {member.message for member in waiting(100).members} == {UNSCHEDULABLE[:512]}
