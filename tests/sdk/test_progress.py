"""The progress of a job in a terminal."""

import io
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from emberscale._console import open_console
from emberscale._progress import PlainProgress, live_view, remarks
from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.running import FlashStatus, JobStatus, MemberNow, ScalingStep, Sizing, SlowMember
from emberscale_api.job.status import ROLLED_BACK_STEP, EvaluationResult, JobPhase
from emberscale_operator.local.snapshot import MemberExit, RunView
from emberscale_operator.machine import ExitReason


def snapshot(
    status: JobStatus | None = None,
    seconds: float = 1.0,
    exits: tuple[MemberExit, ...] = (),
    suspending: bool = False,
    unforked: tuple[str, ...] = (),
) -> RunView:
    return RunView(seconds, status, (), {"worker": len(exits)}, exits, suspending, unforked)


def training(samples: int = 500, **fields: Any) -> JobStatus:
    status = JobStatus(
        phase=JobPhase.TRAINING,
        samples=samples,
        expected_samples=1000,
        samples_per_second=50_000,
        loss=0.48,
        auc=0.76,
        eta_seconds=75,
        epochs=1,
    )
    return replace(status, **fields)


def plain(*snapshots: RunView) -> list[str]:
    written = io.StringIO()
    progress = PlainProgress(open_console(file=written, width=200))
    for shown in snapshots:
        progress.show(shown)
    return written.getvalue().splitlines()


@pytest.mark.parametrize(("seconds", "told"), [(0.000127, "0s"), (1.234, "1.2s"), (100.04, "1m40s")])
def test_the_time_since_the_start_is_told_to_a_tenth_of_a_second(seconds: float, told: str) -> None:
    (line,) = plain(snapshot(seconds=seconds))
    assert line.split() == [told, "Starting"]


def test_a_line_holds_all_that_matters() -> None:
    (line,) = plain(snapshot(training()))
    for part in (
        "Training",
        "50.0%",
        "500 of 1,000 samples",
        "50,000 samples/s",
        "loss 0.4800",
        "AUC 0.7600",
        "ETA 1m15s",
    ):
        assert part in line


def test_lines_come_every_few_seconds_and_at_every_change_of_phase() -> None:
    lines = plain(
        snapshot(None, 0.0),
        snapshot(training(), 1.0),
        snapshot(training(), 2.0),
        snapshot(training(), 5.9),
        snapshot(training(), 6.1),
        snapshot(JobStatus(phase=JobPhase.SAVING), 6.2),
    )
    assert [line.split()[:2] for line in lines] == [
        ["0s", "Starting"],
        ["1s", "Training"],
        ["6.1s", "Training"],
        ["6.2s", "Saving"],
    ]


def test_what_is_not_known_is_not_shown() -> None:
    (line,) = plain(snapshot(training(0, expected_samples=0, loss=float("nan"), auc=0.0, eta_seconds=-1.0)))
    assert "nan" not in line
    assert "ETA" not in line
    assert "%" not in line


def test_the_place_of_a_malformed_record_is_shown_as_it_is() -> None:
    message = "[a]/b.csv:100: price is 'abc', not a number"
    (line,) = plain(snapshot(JobStatus(phase=JobPhase.FAILED, message=message)))
    assert message in line


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (MemberExit("ps-0", ExitReason.KILLED, -9, None), "ps-0 was killed by SIGKILL"),
        (MemberExit("ps-1", ExitReason.KILLED, 3, None), "ps-1 ended: a new process takes its place"),
        (MemberExit("ps-0", ExitReason.ERROR, 3, None), "ps-0 failed with exit code 3; see logs/ps-0.log"),
        (MemberExit("ps-0", ExitReason.ERROR, -11, None), "ps-0 failed with SIGSEGV"),
        (MemberExit("ps-0", ExitReason.OOM_KILLED, -9, 1 << 30, 3 << 29), "its limit of 1 GiB, now 1.5 GiB"),
        (MemberExit("ps-0", ExitReason.OOM_KILLED, -9, 1 << 30, 1 << 30), "its limit of 1 GiB, and gets no more"),
        (MemberExit("ps-0", ExitReason.OOM_KILLED, -9, 1 << 30), "its limit of 1 GiB, and gets no more"),
        (MemberExit("ps-0", ExitReason.COMPLETED, 0, None), "ps-0 ended before the job did"),
    ],
)
def test_an_end_is_told_once_with_its_cause(ended: MemberExit, told: str) -> None:
    before, after = snapshot(training()), snapshot(training(), exits=(ended,))
    (line,) = remarks(before, after)
    assert told in line
    assert remarks(after, after) == []


@pytest.mark.parametrize(
    ("phase", "reason", "is_told"),
    [
        (JobPhase.SAVING, ExitReason.COMPLETED, False),
        (JobPhase.COMPLETE, ExitReason.COMPLETED, False),
        (JobPhase.TRAINING, ExitReason.COMPLETED, True),
        (JobPhase.SAVING, ExitReason.ERROR, True),
    ],
)
def test_the_end_of_a_process_is_no_news_once_all_is_trained(
    phase: JobPhase, reason: ExitReason, is_told: bool
) -> None:
    before = snapshot(training(phase=phase))
    after = snapshot(training(phase=phase), exits=(MemberExit("worker-1", reason, 0, None),))
    assert bool(remarks(before, after)) == is_told


def test_a_start_that_takes_long_says_once_what_it_waits_for() -> None:
    waiting = [snapshot(seconds=seconds, unforked=("ps-0", "ps-1")) for seconds in (10.0, 30.0)]
    views = [snapshot(seconds=9.0), *waiting, snapshot(seconds=31.0)]
    (told,) = [line for before, after in pairwise(views) for line in remarks(before, after)]
    assert told.startswith("ps-0, ps-1: ")


def test_a_full_disk_is_told_once_in_the_place_of_all_that_fails_by_it() -> None:
    failed = MemberExit("redis-0", ExitReason.ERROR, 1, None, disk_is_full=True)
    once, thrice = snapshot(training(), exits=(failed,)), snapshot(training(), exits=(failed, failed, failed))
    (line,) = remarks(snapshot(training()), once)
    assert "is full" in line
    assert "free some space" in line
    assert remarks(once, thrice) == []
    assert remarks(snapshot(training()), thrice) == [line]


def test_an_evaluation_that_has_counted_nothing_yet_names_no_number() -> None:
    (line,) = plain(snapshot(JobStatus(phase=JobPhase.EVALUATING)))
    assert line.endswith("Evaluating")


def test_the_first_malformed_record_is_told_whatever_was_found_last() -> None:
    found = tuple(BadRecord("a.tsv", line, "40 fields expected, 3 found") for line in (90, 7, 40))
    status = training(bad_records=3, bad_record_samples=found)
    (remark,) = remarks(snapshot(training()), snapshot(status))
    assert "the first at a.tsv:7:" in remark


def test_a_rollback_is_told() -> None:
    before, after = snapshot(training()), snapshot(training(recoveries=1, checkpoint="00000003"))
    assert remarks(before, after) == ["a parameter server was lost: training went back to checkpoint 00000003"]


@pytest.mark.parametrize(
    ("persistent", "newest"),
    [
        ("", "flash-00000002"),
        ("00000001", "flash-00000002"),
        ("00000003", "00000003"),
        ("s3://b/a/9", "flash-00000002"),
    ],
)
def test_a_rollback_goes_to_the_newest_checkpoint_of_either_tier(persistent: str, newest: str) -> None:
    status = training(recoveries=1, checkpoint=persistent, flash=FlashStatus(checkpoint="flash-00000002"))
    (told,) = remarks(snapshot(training()), snapshot(status))
    assert told.endswith(f"training went back to checkpoint {newest}")


def test_a_rollback_without_a_checkpoint_is_a_new_beginning() -> None:
    before, after = snapshot(training()), snapshot(training(recoveries=1))
    assert remarks(before, after) == ["a parameter server was lost: training began anew"]


def test_a_rollback_with_a_reason_is_told_with_it() -> None:
    why = "ps-2 is lost; the whole job goes back to a checkpoint: parity 1 covers the loss of 1 at a time"
    sizing = Sizing(steps=(ScalingStep(1, ROLLED_BACK_STEP, why),))
    before, after = snapshot(training()), snapshot(training(recoveries=1, checkpoint="00000003", sizing=sizing))
    reason, went = remarks(before, after)
    assert why in reason
    assert went == "training went back to checkpoint 00000003"


def test_a_malformed_record_is_told_with_its_file_and_line() -> None:
    status = training(bad_records=1, bad_record_samples=(BadRecord("a.tsv", 7, "40 fields expected, 3 found"),))
    (line,) = remarks(snapshot(training()), snapshot(status))
    assert "a.tsv:7: 40 fields expected" in line


def test_a_warning_is_told_once_also_if_it_is_there_from_the_first() -> None:
    warned = snapshot(training(warnings=("a damaged checkpoint was skipped",)))
    assert remarks(None, warned) == ["warning: a damaged checkpoint was skipped"]
    assert remarks(snapshot(training()), warned) == ["warning: a damaged checkpoint was skipped"]
    assert remarks(warned, warned) == []


def test_an_evaluation_is_told() -> None:
    result = EvaluationResult(epoch=1, samples=9, auc=0.79, logloss=0.44, normalized_entropy=0.88, calibration=1.02)
    assert remarks(snapshot(training()), snapshot(training(evaluations=(result,)))) == [
        "epoch 1: held-out AUC 0.7900, log loss 0.4400, normalised entropy 0.8800, calibration 1.020"
    ]


def test_the_first_ctrl_c_is_answered_once() -> None:
    asked = snapshot(training(), suspending=True)
    (line,) = remarks(snapshot(training()), asked)
    assert "taking a checkpoint" in line
    assert remarks(asked, asked) == []


@pytest.mark.parametrize("status", [None, JobStatus(phase=JobPhase.PENDING), JobStatus(phase=JobPhase.RESTORING)])
def test_ctrl_c_promises_no_checkpoint_where_there_is_nothing_to_save(status: JobStatus | None) -> None:
    (line,) = remarks(snapshot(status), snapshot(status, suspending=True))
    assert "nothing new to save" in line


def test_ctrl_c_at_the_end_says_that_the_job_is_over() -> None:
    status = JobStatus(phase=JobPhase.COMPLETE)
    (line,) = remarks(snapshot(status), snapshot(status, suspending=True))
    assert "the job is over, and its processes end" in line


@pytest.mark.parametrize(
    "status", [None, training(), training(0, expected_samples=0), JobStatus(phase=JobPhase.EVALUATING)]
)
def test_the_live_view_fits_a_narrow_terminal(status: JobStatus | None) -> None:
    written = io.StringIO()
    Console(file=written, width=80).print(live_view("criteo-dlrm", snapshot(status)))
    lines = written.getvalue().splitlines()
    assert len(lines) == 3
    assert "criteo-dlrm" in lines[0]


def test_who_is_slow_is_told_when_it_begins_changes_and_ends() -> None:
    def status(factor: float = 0.0, remedy: str = "") -> JobStatus:
        slowness = SlowMember(factor, seconds=7, remedy=remedy) if factor else None
        return training(members=(MemberNow(MemberId(Role.WORKER, 2), slowness=slowness),))

    views = [
        snapshot(status()),
        snapshot(status(30, "it gets smaller shards")),
        snapshot(status(40, "it gets smaller shards")),
        snapshot(status(40, "it rests")),
        snapshot(status()),
    ]
    assert [remarks(before, after) for before, after in pairwise(views)] == [
        ["worker-2 is 30 times slower than its peers: it gets smaller shards"],
        [],
        ["worker-2 is 40 times slower than its peers: it rests"],
        ["worker-2 is no longer slower than its peers"],
    ]
