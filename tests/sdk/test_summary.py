"""What a person reads when a run has ended."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from emberscale._reports.summary_table import summary_table
from emberscale._run.summary import summarize
from emberscale_api.job.running import AdmissionCounts, JobStatus, Traffic
from emberscale_api.job.status import EvaluationResult, JobPhase
from emberscale_operator.local import RunOutcome

NAN = float("nan")


def printed(status: JobStatus, restarts: dict[str, int] | None = None) -> str:
    outcome = RunOutcome(JobPhase.SUSPENDED, "Suspended", "", status, {}, restarts or {}, 1.0)
    written = io.StringIO()
    Console(file=written, width=200).print(summary_table(summarize("toy", outcome, 1.0), Path("runs/toy")))
    return written.getvalue()


def test_a_measure_that_nobody_knows_has_no_line() -> None:
    text = printed(JobStatus(samples=744_576, expected_samples=10**6, loss=NAN, auc=NAN))
    assert "744,576" in text
    assert "nan" not in text
    assert "AUC" not in text


def test_what_is_known_is_told_without_what_is_not() -> None:
    """Data of one class has a log loss and no AUC."""
    evaluations = tuple(EvaluationResult(epoch=n, samples=10, logloss=0.25, calibration=1.0) for n in (1, 2))
    status = JobStatus(samples=10, expected_samples=10, evaluations=evaluations)
    text = printed(status)
    assert "log loss" in text
    assert "0.2500   on held-out data" in text
    assert "calibration" in text
    assert "nan" not in text


@pytest.mark.parametrize(("count", "told"), [(1, "1 worker restart, 1 recovery from"), (2, "2 worker restarts, 2 rec")])
def test_one_of_a_thing_is_singular(count: int, told: str) -> None:
    status = JobStatus(recoveries=count, bad_records=count, truncated_records=count)
    text = printed(status, {"worker": count})
    assert told in text
    assert ("records" in text) == (count > 1)


def test_what_became_of_ids_is_told_where_not_all_have_rows() -> None:
    status = JobStatus(rows={"C1": 5})
    assert "evicted" not in printed(status)
    status = replace(status, admission={"C1": AdmissionCounts(7, 1, 2), "C2": AdmissionCounts(3000)})
    assert "3,007 admitted   2 evicted   1 push only counted" in printed(status).replace("  \n", "")


def test_rounds_are_told_where_there_were_some() -> None:
    assert "rounds" not in printed(JobStatus(traffic=Traffic(bytes=900)))
    traffic = Traffic(bytes=900, rounds=3, round_batches=48, round_bytes=410, single_bytes=1000)
    assert "16.0 batches each, 0.41x of the bytes" in printed(JobStatus(traffic=traffic))
