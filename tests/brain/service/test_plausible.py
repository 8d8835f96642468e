import math
from collections.abc import Callable
from typing import Any

import pytest

from emberscale_api.rpc import brain_pb2 as pb
from emberscale_brain.planner.types import JobId, ShapeBounds
from emberscale_brain.service.requests import (
    MOST_PROFILES,
    MalformedRequestError,
    check_count,
    job_from,
    outcome_from,
    profile_from,
    start_up_from,
    submission_from,
)

NOW = 1000.0
Submission = Callable[..., pb.SubmitJobRequest]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"job_uid": "u" * 256}, "job_uid: has 256 characters, 255 are allowed"),
        ({"owner": "o" * 256}, "owner: has 256 characters"),
        ({"owner": "a\0b"}, "owner: must not contain NUL"),
        ({"description": pb.JobDescription(name="n" * 300)}, "description.name: has 300"),
        ({"description": pb.JobDescription(architecture="a" * 300)}, "description.architecture: has 300"),
        ({"description": pb.JobDescription(batch_size=1 << 31)}, "description.batch_size: must be from 0 to"),
        (
            {"description": pb.JobDescription(total_samples=1 << 61)},
            "description.total_samples: must be from 0 to 1e.15",
        ),
        ({"description": pb.JobDescription(total_samples=(1 << 64) - 1)}, "description.total_samples: must be"),
        ({"limits": pb.ShapeLimits(most=pb.Shape(workers=(1 << 32) - 1))}, "limits.most.workers: must be from 0"),
        ({"limits": pb.ShapeLimits(most=pb.Shape(worker_cpu=math.inf))}, "limits.most.worker_cpu: .* not inf"),
        ({"limits": pb.ShapeLimits(least=pb.Shape(ps_memory=1 << 63))}, "limits.least.ps_memory: must be"),
        ({"limits": pb.ShapeLimits(cpu_step=math.nan)}, "limits.cpu_step: .* not nan"),
        ({"limits": pb.ShapeLimits(cpu_step=1e-9)}, "limits.cpu_step: must be from 0.001"),
        ({"current": pb.Shape(worker_cpu=math.inf)}, "current.worker_cpu: .* not inf"),
        ({"priority": math.inf}, "priority: must be"),
        ({"submitted_at": math.nan}, "submitted_at: .* not nan"),
        ({"last_plan": (1 << 64) - 1}, "last_plan: must be"),
    ],
)
def test_a_submission_that_the_database_or_a_planner_could_not_take_is_refused(
    submission: Submission, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(MalformedRequestError, match=problem):
        submission_from(submission(**changes), ShapeBounds(), NOW)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"sequence": 1 << 63}, "sequence: must be"),
        ({"shape": pb.Shape(worker_memory=1 << 63)}, "shape.worker_memory: must be"),
        ({"shape": pb.Shape(workers=1 << 31)}, "shape.workers: must be"),
        ({"stage_fractions": {"a\0": 0.1}}, "stage_fractions: must not contain"),
        ({"stage_fractions": {str(number): 0.1 for number in range(65)}}, "stage_fractions: 65 of them; up to 64"),
    ],
)
def test_a_profile_that_the_database_could_not_take_is_refused(changes: dict[str, Any], problem: str) -> None:
    message = pb.Profile(sequence=1, shape=pb.Shape(workers=1, ps=1, worker_cpu=1, ps_cpu=1))
    message.MergeFrom(pb.Profile(**changes))
    with pytest.raises(MalformedRequestError, match=problem):
        profile_from(JobId("a"), message)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (pb.ReportOutcomeRequest(job_uid="a", phase="Complete", rows=1 << 63), "rows: must be"),
        (pb.ReportOutcomeRequest(job_uid="a", phase="Complete", finished_at=math.nan), "finished_at: .* not nan"),
        (pb.ReportOutcomeRequest(job_uid="a", phase="Done"), "phase: must be Complete, Failed, Suspended"),
        (pb.ReportOutcomeRequest(job_uid="a" * 300, phase="Failed"), "job_uid: has 300"),
    ],
)
def test_an_outcome_that_the_database_could_not_take_is_refused(
    request_: pb.ReportOutcomeRequest, problem: str
) -> None:
    with pytest.raises(MalformedRequestError, match=problem):
        outcome_from(request_, NOW)


def test_what_is_from_the_future_counts_as_of_now(submission: Submission) -> None:
    assert submission_from(submission(submitted_at=NOW + 1e9), ShapeBounds(), NOW).submitted_at == NOW
    start_up = start_up_from(JobId("a"), pb.StartUp(role="ps", seconds=1, time=NOW + 1e9), NOW)
    assert start_up.time == NOW
    ended = outcome_from(pb.ReportOutcomeRequest(job_uid="a", phase="Failed", finished_at=NOW + 1e9), NOW)
    assert ended.finished_at == NOW


def test_one_request_holds_only_so_much() -> None:
    check_count("profiles", range(MOST_PROFILES), MOST_PROFILES)
    with pytest.raises(MalformedRequestError, match=f"profiles: {MOST_PROFILES + 1} of them"):
        check_count("profiles", range(MOST_PROFILES + 1), MOST_PROFILES)
    with pytest.raises(MalformedRequestError, match="job_uid: must not contain"):
        job_from("a\0")
