"""`emberscale scale`: what it refuses, and what it writes; tests/e2e runs it next to a job."""

import fcntl
import io
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
from rich.console import Console
from structlog.testing import capture_logs
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale._commands.cluster import render
from emberscale._run.folder import open_run
from emberscale._run.record import RunPaths, RunRecord, RunStatus
from emberscale._run.scaling import scaled_numbers
from emberscale_api.job import TrainingJob
from emberscale_api.job.status import CheckpointCost, Condition, JobPhase, Progress, TrainingJobStatus
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.local.requests import WatchedManifest
from training_jobs import training_job


def run_of(root: Path, status: RunStatus = RunStatus.RUNNING, **spec: Any) -> TrainingJob:
    """Makes the folder of a run under way, as `emberscale run` does; returns the manifest."""
    job = training_job(**spec)
    folder = RunFolder(root)
    folder.make()
    folder.manifest.write_text(job.to_json(), encoding="utf-8")
    folder.write_tokens()
    folder.master_address.write_text("127.0.0.1:1", encoding="utf-8")
    manifest = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    record = RunRecord(name="ctr", uid="uid", status=status, started_at=datetime.now(UTC), manifest=manifest)
    RunPaths(root).record.write_text(record.model_dump_json(), encoding="utf-8")
    return job


def scale(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["scale", *arguments])
    return result.exit_code, result.output


_HELD: dict[Path, int] = {}


def release(root: Path) -> None:
    """Releases the folder, as `emberscale run` does at its end."""
    if root in _HELD:
        os.close(_HELD.pop(root))


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run under way, with two workers and a server."""
    root = tmp_path / "runs" / "ctr"
    run_of(root, worker={"replicas": 2}, ps={"replicas": 1})
    _HELD[root] = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(_HELD[root], fcntl.LOCK_EX)
    yield root
    release(root)


def spec_of(root: Path) -> Any:
    return TrainingJob.from_json(RunFolder(root).manifest.read_text()).spec


def test_the_numbers_are_written_where_the_run_sees_them(held: Path) -> None:
    watched = WatchedManifest(RunFolder(held).manifest, spec_of(held))
    code, said = scale(str(held), "worker=4", "ps=3")
    assert (code, said) == (0, f"{held}: workers 2 -> 4, PS 1 -> 3; training continues meanwhile\n")
    assert (watched.read().worker.replicas, watched.read().ps.replicas) == (4, 3)
    assert scale(str(held), "ps=3") == (0, f"{held}: the numbers are unchanged\n")


def test_a_run_is_found_by_its_name(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(held.parent.parent)
    assert scale("ctr", "ps=2")[0] == 0
    assert spec_of(held).ps.replicas == 2


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("worker", "worker: write ROLE=NUMBER, such as worker=4"),
        ("redis=2", "redis=2: only worker and ps can be scaled"),
        ("master=2", "there is exactly one master"),
        ("worker=0", "worker=0: the number must be a whole number from 1 to 1024"),
        ("worker=many", "worker=many: the number must be a whole number"),
        ("worker=1025", "from 1 to 1024"),
    ],
)
def test_words_that_make_no_sense_are_refused(held: Path, word: str, problem: str) -> None:
    before = RunFolder(held).manifest.read_text()
    code, said = scale(str(held), word)
    assert code == 2
    assert problem in said
    assert RunFolder(held).manifest.read_text() == before


def test_a_role_is_named_once(held: Path) -> None:
    assert "ps is given twice" in scale(str(held), "ps=2", "ps=3")[1]


@pytest.mark.parametrize(
    ("number", "problem"), [(1, "spec.worker.minReplicas is 2; give 2 or more"), (9, "spec.worker.maxReplicas is 8")]
)
def test_numbers_out_of_bounds_are_refused_with_the_bound(held: Path, number: int, problem: str) -> None:
    run_of(held, worker={"minReplicas": 2, "maxReplicas": 8})
    code, said = scale(str(held), f"worker={number}")
    assert code == 2
    assert problem in said


def test_numbers_that_contradict_another_field_are_refused_in_a_line(held: Path) -> None:
    run_of(held, ps={"replicas": 2}, faultTolerance={"strategy": "ErasureCoding"})
    problem = "faultTolerance.parity (1) needs at least 2 parameter servers: set ps.replicas to at least 2"
    assert scale(str(held), "ps=1") == (2, f"error: ps=1: {problem}\n")
    assert spec_of(held).ps.replicas == 2


def test_a_number_takes_the_place_of_bounds(held: Path) -> None:
    run_of(held, worker={"minReplicas": 2, "maxReplicas": 8})
    assert "workers 2..8 -> 5" in scale(str(held), "worker=5")[1]
    assert (spec_of(held).worker.replicas, spec_of(held).worker.max_replicas) == (5, None)


@pytest.mark.parametrize(
    ("status", "problem"),
    [
        (RunStatus.COMPLETE, "it is Complete"),
        (RunStatus.SUSPENDED, "it is Suspended; continue it with `emberscale run FILE --resume"),
        (RunStatus.RUNNING, "it was cut short; continue it with"),
    ],
)
def test_a_run_that_does_not_run_is_refused(tmp_path: Path, status: RunStatus, problem: str) -> None:
    run_of(tmp_path, status)
    code, said = scale(str(tmp_path), "ps=2")
    assert code == 2
    assert problem in said


@pytest.mark.parametrize("missing", ["token", "master_address"])
def test_a_run_that_just_starts_or_saves_its_state_to_end_is_refused(held: Path, missing: str) -> None:
    getattr(RunFolder(held), missing).unlink()
    code, said = scale(str(held), "ps=2")
    assert code == 2
    assert "the run is just starting, or about to end" in said


def test_without_a_run_the_cluster_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    monkeypatch.chdir(tmp_path)
    code, said = scale("ctr", "ps=2")
    assert code == 2
    assert "ctr: runs/ctr holds no run (one elsewhere is named by its folder), and no cluster" in said
    assert "runs/ctr holds no run" not in scale("ctr", "ps=2", "--namespace", "ads")[1]
    assert "./ctr: holds no run" in scale("./ctr", "ps=2")[1]


def test_a_resumed_run_keeps_its_numbers_unless_the_manifest_names_others(tmp_path: Path) -> None:
    job = run_of(tmp_path, ps={"replicas": 1}, worker={"replicas": 2})
    paths = RunPaths(tmp_path)
    record = RunRecord.model_validate_json(paths.record.read_text())
    assert scaled_numbers(paths, record, job) == {}
    scaled = job.model_copy(update={"spec": job.spec.resized(ps=3, worker=4)})
    RunFolder(tmp_path).manifest.write_text(scaled.to_json())
    assert scaled_numbers(paths, record, job) == {"ps": 3, "worker": 4}
    edited = job.model_copy(update={"spec": job.spec.resized(ps=2)})
    assert scaled_numbers(paths, record, edited) == {"worker": 4}


def test_an_edit_before_the_first_look_is_seen(held: Path) -> None:
    given = spec_of(held)
    assert scale(str(held), "ps=3")[0] == 0
    assert WatchedManifest(RunFolder(held).manifest, given).read().ps.replicas == 3


def test_bounds_that_were_edited_take_the_place_of_a_number(tmp_path: Path) -> None:
    job = run_of(tmp_path, worker={"minReplicas": 1, "maxReplicas": 4})
    paths = RunPaths(tmp_path)
    record = RunRecord.model_validate_json(paths.record.read_text())
    scaled = job.model_copy(update={"spec": job.spec.resized(worker=4)})
    RunFolder(tmp_path).manifest.write_text(scaled.to_json())
    assert scaled_numbers(paths, record, job) == {"worker": 4}
    fewer = job.spec.worker.model_copy(update={"max_replicas": 2})
    edited = job.model_copy(update={"spec": job.spec.model_copy(update={"worker": fewer})})
    assert scaled_numbers(paths, record, edited) == {}


def test_a_manifest_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    job = training_job(ps={"replicas": 2})
    file = tmp_path / "manifest.json"
    file.write_text(job.to_json())
    watched = WatchedManifest(file, job.spec)
    file.unlink()
    assert watched.read() == job.spec
    for edited in (b"{", b"\xff"):
        file.write_bytes(edited)
        assert watched.read() == job.spec


def test_an_edit_that_could_not_be_read_is_seen_at_the_next_look(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = WatchedManifest(RunFolder(held).manifest, spec_of(held))
    assert scale(str(held), "ps=3")[0] == 0
    with monkeypatch.context() as failing:
        failing.setattr(Path, "read_text", Mock(side_effect=OSError(5, "Input/output error")))
        with capture_logs() as logs:
            for _ in range(10):  # as in a second
                assert watched.read().ps.replicas == 1
    assert [entry["event"] for entry in logs] == ["edited_manifest_unreadable"], "told once"
    assert watched.read().ps.replicas == 3


def test_a_run_that_begins_takes_no_edit_before_it_has_written_its_manifest(held: Path) -> None:
    # as after SIGKILL of `emberscale run`: no process holds the folder, and the token and the record are there
    begins = training_job(worker={"replicas": 2}, ps={"replicas": 1})
    release(held)
    with open_run(held, begins, resume=True, overwrite=False) as run:
        run.save(status=RunStatus.RUNNING)
        code, said = scale(str(held), "ps=3")
    assert (code, "just starting" in said) == (2, True)


def test_looking_at_a_folder_keeps_no_run_from_beginning_in_it(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release(held)
    looking = [os.open(held, os.O_RDONLY | os.O_DIRECTORY)]
    fcntl.flock(looking[0], fcntl.LOCK_SH)
    monkeypatch.setattr(time, "sleep", lambda _: os.close(looking.pop()))  # the look ends while the run waits for it
    with open_run(held, training_job(worker={"replicas": 2}, ps={"replicas": 1}), resume=True, overwrite=False) as run:
        assert not looking, "the run waited"
        assert run.record.launches == 2


def test_looking_at_a_folder_does_not_show_as_a_run_there(held: Path) -> None:
    release(held)
    looking = os.open(held, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    code, said = scale(str(held), "ps=3")
    os.close(looking)
    assert (code, "was cut short" in said) == (2, True)


@pytest.mark.parametrize(
    ("status", "reason", "shown"),
    [("True", "CopiedRows", True), ("False", "EndedMembers", False), ("False", "GaveUpScaling", True)],
)
def test_the_status_shows_a_change_that_goes_on_or_was_given_up(
    status: Literal["True", "False"], reason: str, shown: bool
) -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    condition = Condition(type="Scaling", status=status, last_transition_time=moment, reason=reason, message="so far")
    console = Console(file=io.StringIO(), width=100)
    console.print(render("ctr", TrainingJobStatus(conditions=(condition,))))
    assert isinstance(console.file, io.StringIO)
    assert (f"{reason}: so far" in console.file.getvalue()) is shown


@pytest.mark.parametrize(
    ("phase", "reason", "shown"),
    [(JobPhase.TRAINING, "SharedNodes", True), (JobPhase.COMPLETE, "Complete", False)],
)
def test_the_status_tells_of_parity_while_the_job_has_servers(phase: JobPhase, reason: str, shown: bool) -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    condition = Condition(
        type="Protected", status="False", last_transition_time=moment, reason=reason, message="the job rests"
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(render("ctr", TrainingJobStatus(phase=phase, conditions=(condition,))))
    assert isinstance(console.file, io.StringIO)
    assert ("Parity" in console.file.getvalue()) is shown


def test_the_status_shows_what_the_newest_checkpoint_cost() -> None:
    costs = (
        CheckpointCost(checkpoint="7", seconds=9.0, held_seconds=0.5, written_bytes=1, bytes=2),
        CheckpointCost(checkpoint="8", seconds=2.0, held_seconds=0.012, written_bytes=3_000_000, bytes=21_000_000),
    )
    console = Console(file=io.StringIO(), width=200)
    told = Progress(samples=1, expected_samples=2, percent="50%", checkpoints=costs, restore_seconds=14.0)
    console.print(render("ctr", TrainingJobStatus(progress=told)))
    assert isinstance(console.file, io.StringIO)
    line = next(line for line in console.file.getvalue().splitlines() if "Checkpoint" in line)
    assert line.split(maxsplit=1)[1].strip() == (
        "8: 2.86 MiB in 2s, pushes held 12ms; a restore reads 20 MiB, about 14s"
    )
