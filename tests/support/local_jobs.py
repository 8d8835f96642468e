"""Whole jobs on this machine, started as a person starts them."""

import csv
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale_api.environment import ROLE
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_api.rpc.token import open_channel
from emberscale_operator.local.folder import RunFolder
from eventually import eventually

BATCH = 256
ENDLESS = 10_000
"""Epochs of a job that outlasts its test, which stops it."""
IMPATIENT = {"leaseTimeout": "4s"}
"""The sharding of jobs in which processes hang; others wait longer, since a busy machine delays live processes."""
CLI = str(Path(sys.executable).with_name("emberscale"))


def emberscale(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs the CLI to its end."""
    return subprocess.run([CLI, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def emberscale_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the CLI in this process, which saves two seconds of a core; it must not start processes."""
    done = CliRunner().invoke(app, arguments)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


@dataclass
class Job:
    """One run of `emberscale run` in its own folder."""

    folder: Path
    manifest: dict[str, Any]
    process: subprocess.Popen[str] | None = None
    program: tuple[str, ...] = (CLI,)
    rows_before: int = 0
    """The rows of metrics.csv from before this start."""

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def start(self, *arguments: str) -> None:
        file = self.folder / "job.yaml"
        file.write_text(yaml.safe_dump(self.manifest))
        command = [*self.program, "run", str(file), "--workdir", str(self.run_folder)]
        self.rows_before = len(self._rows()) if "--resume" in arguments else 0
        self.process = subprocess.Popen(
            [*command, "--no-picture", "--output", "json", *arguments],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, timeout: float = 840) -> "Finished":
        assert self.process is not None
        stdout, stderr = self.process.communicate(timeout=timeout)
        return Finished(self.process.returncode, stdout, stderr, self)

    def run(self, *arguments: str) -> "Finished":
        self.start(*arguments)
        return self.finish()

    def members(self, role: str) -> list[psutil.Process]:
        """Returns the job's live processes of a role."""
        return [process for process in self.children() if _is_member(process, role)]

    def children(self) -> list[psutil.Process]:
        """Returns all live processes that the CLI has started."""
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def samples(self) -> int:
        """Returns the committed samples, from the last row of metrics.csv."""
        rows = self._rows()
        return int(rows[-1]["samples"]) if rows else 0

    def _rows(self) -> list[dict[str, str]]:
        metrics = self.run_folder / "metrics.csv"
        return list(csv.DictReader(metrics.read_text().splitlines())) if metrics.exists() else []

    def _trains(self) -> bool:
        rows = self._rows()[self.rows_before :]
        return bool(rows) and rows[-1]["phase"] == "Training"

    def is_over(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def wait_for(self, condition: Callable[[], object], timeout: float = 300) -> bool:
        """Polls until the condition holds; False if the job ended first."""
        found = False

        def look() -> bool:
            nonlocal found
            found = bool(condition())
            return found or self.is_over()

        eventually(look, seconds=timeout, every=0.05)  # many conditions look at all processes, which takes milliseconds
        return found

    def member(self, role: str, index: int) -> psutil.Process:
        """Returns the live process of a member, once there is one."""
        title = f"emberscale-{role} {index}"
        assert self.wait_for(lambda: title in map(_title, self.members(role)))
        return next(one for one in self.members(role) if _title(one) == title)

    def starter(self) -> psutil.Process:
        """Returns the process that starts parameter servers and workers, and waits for their ends."""
        return next(one for one in self.children() if "emberscale_trainer.fork_server" in _title(one))

    def master_addresses(self) -> list[str]:
        """Returns the address of each master so far, oldest first, from their log."""
        log = self.run_folder / "logs" / "master-0.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line)["address"] for line in lines if '"serving"' in line]

    def status(self) -> pb.JobStatus:
        """Asks the master for the job's status."""
        token = RunFolder(self.run_folder).token.read_text()
        with open_channel(self.master_addresses()[-1], token) as channel:
            return MasterStub(channel).GetStatus(pb.GetStatusRequest(), timeout=60, wait_for_ready=True)

    def kill(self, role: str, choice: random.Random) -> bool:
        """Kills one process of a role with SIGKILL, once there is one. False if the job ended first."""
        if not self.wait_for(lambda: self.members(role)):
            return False
        members = self.members(role)
        if members:
            choice.choice(members).send_signal(signal.SIGKILL)
        return bool(members)

    def audit(self) -> dict[str, Any]:
        audited = emberscale_here("audit", str(self.run_folder), "--output", "json")
        assert audited.stdout, audited.stderr
        result: dict[str, Any] = json.loads(audited.stdout)
        return result

    def exact_audit(self) -> dict[str, Any]:
        """Returns the audit after checking that every server has applied each sample exactly once."""
        audit = self.audit()
        assert (audit["missing"], audit["repeated"], audit["contradictions"]) == (0, 0, [])
        return audit

    def interrupt(self) -> None:
        """Interrupts the CLI, as Ctrl-C does."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)

    def trains_on(self, samples: int = 20_000) -> bool:
        """Waits until the job has committed this many more samples. False if it ended first.

        A resumed job counts what it had before until it has restored a checkpoint, so this counts from training on.
        """
        if not self.wait_for(self._trains):
            return False
        before = self.samples()
        return self.wait_for(lambda: self.samples() > before + samples)

    def trains_on_since(self, before: pb.JobStatus, samples: int = 5_000) -> bool:
        """Waits until the master has committed this many more samples than in an earlier status.

        metrics.csv still has the samples from before a roll-back for a second. False if the job ended first.
        """
        return self.wait_for(lambda: self.status().samples > before.samples + samples)

    def stop(self) -> "Finished":
        """Interrupts the job, which then saves; checks that every server has applied each saved sample exactly once."""
        self.interrupt()
        finished = self.finish()
        assert (finished.code, finished.summary["phase"]) == (130, "Suspended"), finished.stderr
        audit = self.audit()
        assert (audit["repeated"], audit["contradictions"]) == (0, [])
        assert audit["once"] == finished.summary["samples"]
        return finished

    def logs(self) -> str:
        return "".join(file.read_text() for file in sorted((self.run_folder / "logs").glob("*.log")))


@dataclass(frozen=True)
class Finished:
    """How a run ended."""

    code: int
    stdout: str
    stderr: str
    job: Job

    @property
    def summary(self) -> dict[str, Any]:
        try:
            result: dict[str, Any] = json.loads(self.stdout[self.stdout.index("{") :])
        except ValueError:
            pytest.fail(f"no summary; stderr: {self.stderr}\n{self.job.logs()[-8000:]}")
        return result


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return ""


def _is_member(process: psutil.Process, role: str) -> bool:
    """Recognises forked members by their titles, and executed ones by their environments."""
    try:
        return " ".join(process.cmdline()).startswith(f"emberscale-{role} ") or process.environ().get(ROLE) == role
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Returns `base` with `changes` merged in, mapping by mapping."""
    merged = dict(base)
    for key, value in changes.items():
        merged[key] = merge(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def manifest_of(name: str, dataset: Path, spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the manifest of a small but complete job over the data set."""
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": merge(
            {
                "data": {
                    "train": [str(dataset / "train-*.tsv")],
                    "evaluation": [str(dataset / "evaluation.tsv")],
                    "shuffling": {"blockRecords": 4096},
                },
                "training": {"batchSize": BATCH},
                "sharding": {"minBatches": 2, "maxBatches": 16, "leaseTimeout": "60s", "heartbeatInterval": "200ms"},
                "ps": {"replicas": 2},
                "worker": {"replicas": 2},
                "checkpoint": {"interval": "3s"},
            },
            spec,
        ),
    }
