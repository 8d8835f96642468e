"""`emberscale run`: the real command, real processes, a real Redis; only the training is simulated."""

import csv
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.sdk.conftest import Start, start_command, write_manifest
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale._run.interruption import Interruption
from eventually import eventually
from redis_process import FlashServer

# half a dozen processes start, on a machine that may be busy; no test passes because of a timeout
_PATIENCE = 240
pytestmark = pytest.mark.timeout(3 * _PATIENCE)
ENDLESS = {"STAND_IN_SAMPLES": "1000000000"}


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=_PATIENCE)
    return process.returncode, out, err


def run_here(manifest: Path, *arguments: str) -> tuple[int, str, str]:
    """Calls `emberscale run` in this process and the manifest's folder, for runs that are refused or over."""
    with chdir(manifest.parent):
        done = CliRunner().invoke(app, ["run", str(manifest), *arguments])
    return done.exit_code, done.stdout, done.stderr


def read_summary(printed: str) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(printed)
    return summary


@pytest.fixture
def training(start: Start, manifest: Path, tmp_path: Path) -> Callable[..., tuple["subprocess.Popen[str]", Any]]:
    """Starts a run and waits until samples are trained; returns the run and all its processes."""

    def begin(
        *options: str, environment: Mapping[str, str] = ENDLESS
    ) -> tuple["subprocess.Popen[str]", list[psutil.Process]]:
        process = start("run", str(manifest), "--output", "json", *options, environment=environment)
        metrics = tmp_path / "runs" / "toy" / "metrics.csv"

        def trains() -> bool:
            return metrics.exists() and ",Training," in metrics.read_text()

        try:
            eventually(lambda: trains() or process.poll() is not None, "the run trains", _PATIENCE / 2)
        finally:
            if not trains():
                process.kill()
                pytest.fail(f"the run never trained: {process.communicate()}")
        return process, psutil.Process(process.pid).children(recursive=True)

    return begin


def none_left(processes: list[psutil.Process]) -> bool:
    return psutil.wait_procs(processes, timeout=60)[1] == []


@dataclass(frozen=True)
class CompleteRun:
    """A Complete run in a folder with its manifest, and its output."""

    folder: Path
    code: int
    out: str
    err: str

    def copied_to(self, folder: Path) -> Path:
        """Copies the run for a test that runs it again; returns the run's folder."""
        shutil.copytree(self.folder / "runs", folder / "runs")
        return folder / "runs" / "toy"


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> CompleteRun:
    """A Complete run, made once for all tests that only read it or continue from a copy."""
    folder = tmp_path_factory.mktemp("complete")
    file = write_manifest(folder)
    return CompleteRun(folder, *finish(start_command(folder, "run", str(file), "--output", "json", picture=True)))


def test_a_complete_run_ends_with_its_summary_and_files(complete: CompleteRun) -> None:
    assert complete.code == 0, complete.err
    summary = read_summary(complete.out)
    assert summary["phase"] == "Complete"
    assert summary["samples"] == summary["expected_samples"] == 100_000
    assert (summary["auc"], summary["logloss"], summary["measured_on"]) == (0.78, 0.45, "evaluation")
    assert summary["stages"] == {
        "read": 2.0,
        "plan": 0.0,
        "pull": 0.0,
        "compute": 4.0,
        "push": 0.0,
        "wait_read": 0.0,
        "wait_pull": 0.0,
        "wait": 0.0,
    }
    assert summary["rows"] == {"C1": 10, "C2": 20}
    assert summary["restarts"] == {"master": 0, "ps": 0, "worker": 0}
    assert summary["peak_memory_bytes"]["worker-1"] > 1 << 20
    assert summary["wall_seconds"] > 0
    root = complete.folder / "runs" / "toy"
    assert json.loads((root / "summary.json").read_text()) == summary
    assert json.loads((root / "run.json").read_text())["status"] == "Complete"
    assert (root / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in (root / "logs").iterdir()} >= {"master-0.log", "ps-1.log", "worker-0.log"}
    rows = list(csv.DictReader((root / "metrics.csv").open(newline="")))
    assert rows[-1]["phase"] == "Complete"
    assert float(rows[0]["worker_memory_bytes"]) > 1 << 20


def test_after_a_sigkill_no_process_is_left(training: Any) -> None:
    process, members = training()
    assert len(members) == 7
    process.kill()
    process.communicate()
    assert none_left(members)


def test_ctrl_c_saves_the_state_and_resume_goes_on(training: Any, start: Start, manifest: Path, tmp_path: Path) -> None:
    process, members = training()
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, err
    assert "stopping" in err
    assert none_left(members)
    interrupted = read_summary(out)
    assert interrupted["phase"] == "Suspended"
    assert json.loads((tmp_path / "runs" / "toy" / "run.json").read_text())["status"] == "Suspended"

    refused, _, hint = run_here(manifest)
    assert refused == 2
    assert "--resume" in hint

    target = str(interrupted["samples"] + 50_000)
    code, out, err = finish(
        start(
            "run",
            str(manifest),
            "--resume",
            "-o",
            "json",
            environment={"STAND_IN_SAMPLES": target, "STAND_IN_RESUME": "1"},
        )
    )
    assert code == 0, err
    resumed = read_summary(out)
    assert resumed["samples"] == int(target)
    assert resumed["wall_seconds"] > interrupted["wall_seconds"]
    rows = list(csv.DictReader((tmp_path / "runs" / "toy" / "metrics.csv").open(newline="")))
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    assert int(rows[0]["samples"]) <= interrupted["samples"] < int(rows[-1]["samples"])

    code, out, err = run_here(manifest, "--resume", "-o", "json")
    assert (code, read_summary(out)) == (0, resumed)
    assert "nothing to resume" in err


def test_a_second_ctrl_c_does_not_wait(training: Any) -> None:
    process, members = training(environment={**ENDLESS, "STAND_IN_SUSPEND_SECONDS": "60"})
    process.send_signal(signal.SIGINT)
    stopping = process.stderr.readline()
    while "stopping" not in stopping:
        stopping = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    code, out, _ = finish(process)
    assert code == 130
    assert read_summary(out)["phase"] == "Interrupted"
    assert none_left(members)


def test_a_terminated_run_saves_its_state_too(training: Any) -> None:
    process, members = training()
    process.terminate()
    code, out, _ = finish(process)
    assert code == 128 + signal.SIGTERM
    assert read_summary(out)["phase"] == "Suspended"
    assert none_left(members)


def test_a_killed_worker_is_told_of_and_counted(training: Any, tmp_path: Path) -> None:
    process, members = training(environment={"STAND_IN_SAMPLES": "400000"})
    worker = next(member for member in members if member.environ().get("EMBERSCALE_ROLE") == "worker")
    worker.kill()
    code, out, err = finish(process)
    assert code == 0, err
    assert read_summary(out)["restarts"] == {"master": 0, "ps": 0, "worker": 1}
    assert "was killed by SIGKILL" in err


def test_a_rerun_that_fails_leaves_the_complete_run_before_it(
    complete: CompleteRun, start: Start, manifest: Path, tmp_path: Path
) -> None:
    """A failed run exits with 1 and says why; a Complete one writes its progress to stderr, the rest to stdout."""
    root = complete.copied_to(tmp_path)
    limits = ["--set", "spec.worker.resources.limits.memory=10Mi", "--set", "spec.runPolicy.backoffLimit=0"]
    code, out, err = finish(start("run", str(manifest), *limits))
    assert code == 1
    assert "runs/toy: still holds the previous Complete run; this one is in runs/toy/next" in err
    assert "more than its limit of 10 MiB" in err
    assert "runs/toy/next/summary.json" in out
    failed = json.loads((root / "next" / "summary.json").read_text())
    assert (failed["phase"], failed["reason"]) == ("Failed", "BackoffLimitExceeded")
    assert "out of memory" in failed["message"]
    assert json.loads((root / "summary.json").read_text()) == read_summary(complete.out)
    assert json.loads((root / "run.json").read_text())["status"] == "Complete"

    before = (root / "summary.json").read_text()
    code, out, err = finish(start("run", str(manifest), "--no-picture"))
    assert code == 0, err
    assert "of 100,000 samples" in err
    assert "toy is Complete" in out
    assert "Starting" not in out
    assert (root / "summary.json").read_text() != before
    assert json.loads((root / "summary.json").read_text())["phase"] == "Complete"
    assert not (root / "metrics.png").exists()
    assert not (root / "next").exists()


def test_a_complete_run_is_not_resumed_as_another(complete: CompleteRun, manifest: Path, tmp_path: Path) -> None:
    complete.copied_to(tmp_path)
    code, out, err = run_here(manifest, "--resume", "--set", "spec.training.epochs=3")
    assert (code, out) == (2, "")
    assert "spec.training.epochs is 3 and was 1" in err
    assert len(err.splitlines()) == 1


def test_a_disk_that_takes_no_more_is_told_in_a_line(start: Start, manifest: Path) -> None:
    # a limit on the size of files replaces a full disk; the run's record is the first file to exceed it
    code, out, err = finish(start("run", str(manifest), largest_file=1500))
    assert (code, out) == (1, "")
    told = [line for line in err.splitlines() if line.startswith("error: ")]
    assert told == ["error: runs/toy: cannot be written: File too large; free some space, then start it again"]
    assert "Traceback" not in err
    assert list((manifest.parent / "runs" / "toy").iterdir()) == []


def test_a_port_that_is_taken_is_named(manifest: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, out, err = run_here(manifest, "--master-port", port)
    assert (code, out) == (2, "")
    assert f"--master-port {port}" in err
    assert len(err.splitlines()) == 1
    assert list((tmp_path / "runs" / "toy").iterdir()) == []


def test_a_shared_redis_is_used_if_one_is_named(start: Start, manifest: Path, tmp_path: Path) -> None:
    with FlashServer(tmp_path / "redis") as shared:
        code, out, err = finish(start("run", str(manifest), "--redis", shared.url, "-o", "json"))
        assert code == 0, err
        assert "redis-0" not in read_summary(out)["peak_memory_bytes"]
        assert int(shared.client.get("samples")) == 100_000  # type: ignore[arg-type]  # the client is not asynchronous
        assert os.listdir(tmp_path / "runs" / "toy" / "state") == ["manifest.json"]


def test_a_signal_before_the_job_runs_ends_the_command() -> None:
    with pytest.raises(SystemExit) as ended, Interruption():
        signal.raise_signal(signal.SIGINT)
    assert ended.value.code == 130


def test_a_signal_after_the_job_does_not_keep_its_summary_from_being_written() -> None:
    class Job:
        def suspend(self) -> None:
            pytest.fail("the job is over")

    with Interruption() as interruption:
        with interruption.of(Job()):  # type: ignore[arg-type] # all that is asked of a job here
            pass
        signal.raise_signal(signal.SIGINT)
    assert interruption.signal is None
