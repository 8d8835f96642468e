import pytest
from tests.jobmaster.small_job import job

from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster import lifecycle, progress, takeover
from emberscale_jobmaster.state import JobState

START = takeover.initial(wall=100.0)


def worker(incarnation: str) -> MemberId:
    return MemberId(Role.WORKER, 0, incarnation)


def outcome(state: JobState) -> tuple[JobPhase, str, str]:
    assert state.outcome is not None
    return state.outcome.phase, state.outcome.reason, state.outcome.message


def test_errors_of_the_jobs_own_up_to_the_limit_are_borne() -> None:
    spec = job(runPolicy={"backoffLimit": 2}).spec
    state = START
    for number in range(2):
        state = lifecycle.on_exit(state, spec, worker(f"w{number}"), 1, "Error")
    assert not state.over
    state = lifecycle.on_exit(state, spec, worker("w2"), 1, "Error")
    phase, reason, message = outcome(state)
    assert (phase, reason) == (JobPhase.FAILED, "BackoffLimitExceeded")
    assert "worker-0 with exit code 1" in message
    assert "spec.runPolicy.backoffLimit allows 2" in message


@pytest.mark.parametrize("reason", ["Killed", "NodeLost", "OOMKilled"])
def test_what_others_did_to_a_process_is_not_the_jobs_error(reason: str) -> None:
    spec = job(runPolicy={"backoffLimit": 0}).spec
    assert not lifecycle.on_exit(START, spec, worker("w"), 137, reason).over


def test_an_exit_that_is_reported_twice_counts_once() -> None:
    spec = job(runPolicy={"backoffLimit": 1}).spec
    state = START
    for _ in range(3):
        state = lifecycle.on_exit(state, spec, worker("w"), 1, "Error")
    assert state.own_errors == 1


def test_a_clean_exit_is_no_error() -> None:
    spec = job(runPolicy={"backoffLimit": 0}).spec
    assert not lifecycle.on_exit(START, spec, worker("w"), 0, "Completed").over


def test_a_fatal_failure_fails_the_job_and_another_does_not() -> None:
    assert not lifecycle.on_failure(START, worker("w"), "Busy", "later", fatal=False).over
    failed = lifecycle.on_failure(START, worker("w"), "NonFiniteLoss", "loss is nan", fatal=True)
    assert outcome(failed) == (JobPhase.FAILED, "NonFiniteLoss", "worker-0: loss is nan")


def test_bad_records_beyond_the_limit_fail_the_job_and_the_first_is_named() -> None:
    spec = job(data={"maxBadRecords": 2}).spec
    records = tuple(BadRecord("/data/day_0", line, f"problem {line}") for line in (7, 9, 11))
    state = lifecycle.on_bad_records(START, spec, 2, records[:2])
    assert not state.over
    state = lifecycle.on_bad_records(state, spec, 3, records[2:])
    _, reason, message = outcome(state)
    assert reason == "BadRecords"
    assert message.startswith("/data/day_0:7: problem 7")
    assert "spec.data.maxBadRecords allows 2" in message


def test_the_first_malformed_record_by_file_and_line_is_named_whichever_was_found_first() -> None:
    spec = job(data={"maxBadRecords": 1}).spec
    found = tuple(BadRecord("/data/day_0", line, "blank") for line in (90, 7, 40))
    _, _, message = outcome(lifecycle.on_bad_records(START, spec, 3, found))
    assert message.startswith("/data/day_0:7: blank (at least 3 malformed;")


def test_a_bad_record_that_is_told_again_with_one_that_was_not_counted_is_shown_once() -> None:
    spec, found = job(data={"maxBadRecords": 9}).spec, BadRecord("/data/day_0", 7, "blank")
    state = lifecycle.on_bad_records(lifecycle.on_bad_records(START, spec, 1, (found,)), spec, 2, (found,))
    assert (state.bad_records, state.bad_record_samples) == (2, (found,))


def test_only_time_in_which_the_job_is_active_counts() -> None:
    spec = job(runPolicy={"activeDeadline": 60}).spec
    state = lifecycle.on_time_passed(START, spec, 50.0)
    assert state.clock.active_seconds == 50.0
    state = progress.suspend(state, spec)
    state = lifecycle.on_time_passed(state, spec, 850.0)
    state = takeover.on_takeover(state, spec, wall=1000.0)
    state = lifecycle.on_time_passed(state, spec, 9.0)
    assert state.clock.active_seconds == 59.0
    assert not state.over
    state = lifecycle.on_time_passed(state, spec, 2.5)
    phase, reason, message = outcome(state)
    assert (phase, reason) == (JobPhase.FAILED, "DeadlineExceeded")
    assert "spec.runPolicy.activeDeadline (1m)" in message
