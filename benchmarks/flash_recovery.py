"""From SIGKILL of a parameter server to training again: flash checkpoints beside persistent ones, in whole runs.

Each run of `emberscale run` has two servers with some 200 MB of rows, and takes checkpoints of one tier every
INTERVAL_SECONDS. Half of that after one is complete, a server is killed. Times are those of the master's log, from the
last event before the server is known to be gone:

* Started: its successor registers. That is the start of a process, which neither tier can save.
* Restored: all servers have loaded the checkpoint, and the job trains again.
* Caught up: the samples that were trained since the checkpoint are trained again.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from reporting import say
from whole_run import RunningJob, manifest, synthesise

INTERVAL_SECONDS = 15.0
ROWS, DIMENSION = 100_000, 128
FLASH, PERSISTENT = "flash", "persistent"
CHECKPOINTS: Mapping[str, dict[str, Any]] = {
    FLASH: {"interval": "1h", "flash": {"interval": f"{INTERVAL_SECONDS:g}s", "maxBytes": "4Gi"}},
    PERSISTENT: {"interval": f"{INTERVAL_SECONDS:g}s", "flash": {"mode": "Disabled"}},
}


@dataclass(frozen=True)
class Recovery:
    """Seconds after SIGKILL of a server, and the bytes of the checkpoint that the job went back to."""

    started: float
    restored: float
    caught_up: float
    bytes: int

    @property
    def beyond_start(self) -> float:
        """Seconds to training again, without the start of the process."""
        return self.restored - self.started


class LosingJob(RunningJob):
    """A job that loses a server."""

    def __init__(self, folder: Path, data: Path, tier: str) -> None:
        spec = {
            "data": {"train": [str(data / "train-*.tsv")]},
            "model": {"embeddings": {"dimension": DIMENSION}},
            "training": {"batchSize": 1024, "epochs": 10_000},
            "ps": {"replicas": 2},
            "worker": {"replicas": 2},
            "checkpoint": CHECKPOINTS[tier],
        }
        super().__init__(folder, manifest(f"loses-{tier}", spec))

    def logged(self, event: str, since: float = 0.0) -> list[dict[str, Any]]:
        """What the master has logged of an event after a time, in seconds since 1970; `at` is when."""
        lines = self.master_log() if (self.root / "logs" / "master-0.log").exists() else []
        entries = [json.loads(line) for line in lines if f'"event": "{event}"' in line]
        found = [{**entry, "at": datetime.fromisoformat(entry["timestamp"]).timestamp()} for entry in entries]
        return [entry for entry in found if entry["at"] > since]

    def kill_server(self) -> float:
        """SIGKILLs a server; returns when, in seconds since 1970."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        [pid] = [child.pid for child in children if " ".join(child.cmdline()).strip() == "emberscale-ps 1"]
        now = time.time()
        os.kill(pid, signal.SIGKILL)
        return now

    def lose_server(self) -> Recovery:
        """Kills a server half an interval after the third checkpoint: by then each row has been trained."""
        self.expect(lambda: len(self.logged("checkpoint_complete")) >= 3)
        time.sleep(INTERVAL_SECONDS / 2)
        whole = max(
            entry["bytes"] for entry in self.logged("checkpoint_complete")
        )  # of increments, it is what they add
        samples = self.latest()[1]
        killed = self.kill_server()

        def trains() -> list[dict[str, Any]]:
            return [entry for entry in self.logged("phase", killed) if entry["phase"] == "Training"]

        self.expect(lambda: bool(trains()))
        seen = self.latest()[0] + 1.0  # the row of the metrics may be older
        self.expect(lambda: self.latest()[0] > seen and self.latest()[1] >= samples)
        caught_up = time.time()
        [registered, *_] = [entry for entry in self.logged("registered", killed) if entry["member"] == "ps-1"]
        return Recovery(registered["at"] - killed, trains()[0]["at"] - killed, caught_up - killed, whole)


def measure_recovery(rounds: int) -> dict[str, list[Recovery]]:
    """What each tier takes, in turns."""
    found: dict[str, list[Recovery]] = {FLASH: [], PERSISTENT: []}
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        synthesise(data, ROWS)
        for _ in range(rounds):
            for tier, seen in found.items():
                with tempfile.TemporaryDirectory(dir=place) as folder:
                    job = LosingJob(Path(folder), data, tier)
                    try:
                        seen.append(job.lose_server())
                    finally:
                        job.end()
                last = seen[-1]
                say(
                    f"{tier}: process started after {last.started:.2f} s, training after {last.restored:.2f} s, caught "
                    f"up after {last.caught_up:.2f} s; the checkpoint has {last.bytes / 1e6:,.0f} MB"
                )
    return found
