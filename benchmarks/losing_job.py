"""A job under way that loses a parameter server, and the reports of its master and its metrics."""

import csv
import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import psutil

from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_api.rpc.token import open_channel
from emberscale_operator.local.folder import RunFolder
from whole_run import RunningJob, processes_of


class LosingJob(RunningJob):
    """A job that loses a server."""

    def logged(self, event: str, since: float = 0.0) -> list[dict[str, Any]]:
        """Returns the master's log entries of an event after `since`, in seconds since 1970; `at` is their time."""
        lines = self.master_log() if (self.root / "logs" / "master-0.log").exists() else []
        entries = [json.loads(line) for line in lines if f'"event": "{event}"' in line]
        found = [{**entry, "at": datetime.fromisoformat(entry["timestamp"]).timestamp()} for entry in entries]
        return [entry for entry in found if entry["at"] > since]

    def trains_since(self, moment: float) -> float | None:
        """Returns when the job began to train after `moment`, both in seconds since 1970; None if it has not yet."""
        begun = [entry["at"] for entry in self.logged("phase", moment) if entry["phase"] == "Training"]
        return begun[0] if begun else None

    def status(self) -> pb.JobStatus:
        """Asks the master for the job's status."""
        token, address = RunFolder(self.root).token.read_text(), self.logged("serving")[-1]["address"]
        with open_channel(address, token) as channel:
            return MasterStub(channel).GetStatus(pb.GetStatusRequest(), timeout=60, wait_for_ready=True)

    def stop_starting(self) -> None:
        """Suspends the process that starts parameter servers and workers, and that notices their ends."""
        self._child(lambda title: "emberscale_trainer.fork_server" in title).suspend()

    def kill_server(self, index: int) -> float:
        """Kills a server by SIGKILL; returns the time in seconds since 1970."""
        server = self._child(lambda title: title == f"emberscale-ps {index}")
        now = time.time()
        server.kill()
        return now

    def _child(self, is_meant: Callable[[str], bool]) -> psutil.Process:
        """Returns the one process of the run whose title is meant."""
        [child] = [process for process, title in processes_of(self._process.pid) if is_meant(title)]
        return child

    def timeline(self) -> list[tuple[float, int]]:
        """Returns, of each row of the metrics, the seconds and the samples trained by then."""
        with (self.root / "metrics.csv").open() as file:
            return [(float(row["seconds"]), int(row["samples"])) for row in csv.DictReader(file)]
