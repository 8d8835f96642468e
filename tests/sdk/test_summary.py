"""The summary of a run, as printed for people."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from emberscale._reports.summary_table import summary_table
from emberscale._run.audit import AuditReport, Counts
from emberscale._run.hot import hot_document
from emberscale._run.summary import summarize
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.job.running import AdmissionCounts, JobStatus, MemberNow, Traffic
from emberscale_api.job.status import CheckpointCost, EvaluationResult, JobPhase
from emberscale_operator.local.snapshot import RunOutcome

NAN = float("nan")


def printed(status: JobStatus, restarts: dict[str, int] | None = None) -> str:
    outcome = RunOutcome(JobPhase.SUSPENDED, "Suspended", "", status, {}, restarts or {})
    written = io.StringIO()
    Console(file=written, width=200).print(summary_table(summarize("toy", outcome, 1.0), Path("runs/toy")))
    return written.getvalue()


def test_a_measure_that_nobody_knows_has_no_line() -> None:
    text = printed(JobStatus(samples=744_576, expected_samples=10**6, loss=NAN, auc=NAN))
    assert "744,576" in text
    assert "nan" not in text
    assert "AUC" not in text


def test_what_is_known_is_told_without_what_is_not() -> None:
    """Data with a single class has a log loss but no AUC."""
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


@pytest.mark.parametrize("saved", [8, 10])
def test_a_run_that_can_be_resumed_says_how(saved: int) -> None:
    outcome = RunOutcome(JobPhase.SUSPENDED, "Suspended", "", JobStatus(samples=10), {}, {})
    summary = replace(summarize("toy", outcome, 1.0), checkpoint="00000007", checkpoint_samples=saved)
    written = io.StringIO()
    Console(file=written, width=200).print(summary_table(summary, Path("runs/toy")))
    assert f"{saved} in checkpoint 00000007, from which --resume continues" in written.getvalue()


@pytest.mark.parametrize(("status", "told"), [(JobStatus(samples=5, expected_samples=20), "8 of 20"), (None, "8")])
def test_what_is_saved_is_trained_whatever_an_older_status_says(status: JobStatus | None, told: str) -> None:
    """A second Ctrl-C ends the master before it tells of the checkpoint that it has taken for the first."""
    outcome = RunOutcome(None, "Interrupted", "", status, {}, {})
    summary = summarize("toy", outcome, 1.0, AuditReport({0: Counts(once=8)}, (), "00000002", 1))
    written = io.StringIO()
    Console(file=written, width=200).print(summary_table(summary, Path("runs/toy")))
    assert (summary.samples, summary.checkpoint_samples) == (8, 8)
    assert ["samples", *told.split()] in [line.split() for line in written.getvalue().splitlines()]


def test_a_run_without_a_persistent_checkpoint_names_no_flash_checkpoint_that_ended_with_it() -> None:
    """The job went back to that one, and then ended without another."""
    outcome = RunOutcome(JobPhase.FAILED, "BadRecords", "", JobStatus(checkpoint="flash-00000004"), {}, {})
    assert summarize("toy", outcome, 1.0).checkpoint is None
    outcome = replace(outcome, status=JobStatus(checkpoint="00000003"))
    assert summarize("toy", outcome, 1.0).checkpoint == "00000003"


def test_rounds_are_told_where_there_were_some() -> None:
    assert "rounds" not in printed(JobStatus(traffic=Traffic(bytes=900)))
    traffic = Traffic(bytes=900, rounds=3, round_batches=48, round_bytes=410, single_bytes=1000)
    assert "16.0 batches each, 0.41x of the bytes" in printed(JobStatus(traffic=traffic))


def test_what_a_restore_would_take_is_told_at_the_rate_of_the_writes() -> None:
    costs = (
        CheckpointCost(
            checkpoint="00000001", seconds=4.0, held_seconds=0.01, written_bytes=100_000_000, bytes=100_000_000
        ),
        CheckpointCost(
            checkpoint="00000002", seconds=1.0, held_seconds=0.01, written_bytes=25_000_000, bytes=125_000_000
        ),
    )
    text = printed(JobStatus(checkpoints=costs))
    assert "a restore reads 119 MiB, 5s at the rate of these writes" in text


@pytest.mark.parametrize(("seconds", "written"), [(0.0, 10), (1.0, 0)])
def test_without_a_rate_only_the_bytes_of_a_restore_are_told(seconds: float, written: int) -> None:
    text = printed(
        JobStatus(
            checkpoints=(
                CheckpointCost(
                    checkpoint="00000001", seconds=seconds, held_seconds=0.0, written_bytes=written, bytes=2_000_000
                ),
            )
        )
    )
    assert "a restore reads 1.91 MiB" in text
    assert "at the rate" not in text


def test_the_decision_on_rounds_is_told_with_what_they_saved() -> None:
    pays, pending = RoundsDecision(True, "EstimatePays", "0.41x"), RoundsDecision(False, "EstimatePending", "no lease")
    workers = [MemberNow(MemberId(Role.WORKER, index), rounds=one) for index, one in enumerate((pays, pays, pending))]
    status = JobStatus(members=tuple(workers[:2]))
    assert "on: 0.41x" in printed(status)
    assert "in rounds" not in printed(status)
    traffic = Traffic(0, 3, 48, 410 << 20, 1000 << 20, batches=60, round_rows=40, single_rows=100)
    status = replace(status, members=tuple(workers), traffic=traffic)
    text = printed(status)
    assert "on in 2 of 3 workers: 0.41x; off in 1 of 3 workers: no lease" in text
    assert "48 of 60 batches in rounds, 60% of their rows were there already, 590 MiB saved" in text
    document = hot_document(status)
    assert list(document["workers"]) == ["worker-0", "worker-1", "worker-2"]
    assert (document["bytes_ratio"], document["single_batches"]) == (0.41, 12)
    assert hot_document(JobStatus(traffic=traffic)) == {}
