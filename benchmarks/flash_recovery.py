"""From SIGKILL of a parameter server to training again: flash against persistent checkpoints, in whole runs.

Each run of `emberscale run` has two servers with about 200 MB of rows, and takes checkpoints of one tier every
INTERVAL_SECONDS. Half of that after a checkpoint is complete, a server is killed. Times count from the kill:

* Started: its successor registers. That is the start of a process, which neither tier can avoid.
* Restored: all servers have loaded the checkpoint, and the job trains again.
* Caught up: the samples that were trained since the checkpoint are trained again.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberscale_api.readable import bytes_text, duration_text
from losing_job import LosingJob
from reporting import say
from whole_run import manifest, synthesise

INTERVAL_SECONDS = 15.0
ROWS, DIMENSION = 100_000, 128
FLASH, PERSISTENT = "flash", "persistent"
CHECKPOINTS: Mapping[str, dict[str, Any]] = {
    FLASH: {"interval": "1h", "flash": {"interval": INTERVAL_SECONDS, "maxBytes": "4Gi"}},
    PERSISTENT: {"interval": INTERVAL_SECONDS, "flash": {"mode": "Disabled"}},
}


@dataclass(frozen=True)
class Recovery:
    """Seconds after SIGKILL of a server, and the bytes of the largest checkpoint before it."""

    started: float
    restored: float
    caught_up: float
    bytes: int

    @property
    def beyond_start(self) -> float:
        """Seconds to training again, without the start of the process."""
        return self.restored - self.started


def job(data: Path, tier: str) -> dict[str, Any]:
    """Returns a job with checkpoints of one tier."""
    spec = {
        "data": {"train": [str(data / "train-*.tsv")]},
        "model": {"embeddings": {"dimension": DIMENSION}},
        "training": {"batchSize": 1024, "epochs": 10_000},
        "ps": {"replicas": 2},
        "worker": {"replicas": 2},
        "checkpoint": CHECKPOINTS[tier],
    }
    return manifest(f"loses-{tier}", spec)


def lose_server(job: LosingJob) -> Recovery:
    """Kills a server half an interval after the third checkpoint, when every row has been trained."""
    job.expect(lambda: len(job.logged("checkpoint_complete")) >= 3)
    time.sleep(INTERVAL_SECONDS / 2)
    whole = max(entry["bytes"] for entry in job.logged("checkpoint_complete"))  # of an increment: only what it adds
    samples = job.latest()[1]
    killed = job.kill_server(1)
    job.expect(lambda: job.trains_since(killed) is not None)
    seen = job.latest()[0] + 1.0  # the newest row of the metrics may be older
    job.expect(lambda: job.latest()[0] > seen and job.latest()[1] >= samples)
    caught_up = time.time()
    [registered, *_] = [entry for entry in job.logged("registered", killed) if entry["member"] == "ps-1"]
    trains = job.trains_since(killed) or caught_up
    return Recovery(registered["at"] - killed, trains - killed, caught_up - killed, whole)


def measure_recovery(rounds: int) -> dict[str, list[Recovery]]:
    """Measures the recovery from each tier, in turns."""
    found: dict[str, list[Recovery]] = {FLASH: [], PERSISTENT: []}
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "data"
        synthesise(data, ROWS)
        for _ in range(rounds):
            for tier, seen in found.items():
                with tempfile.TemporaryDirectory(dir=place) as folder:
                    losing = LosingJob(Path(folder), job(data, tier))
                    try:
                        seen.append(lose_server(losing))
                    finally:
                        losing.end()
                last = seen[-1]
                say(
                    f"{tier}: process started after {duration_text(last.started)}, "
                    f"training after {duration_text(last.restored)}, "
                    f"caught up after {duration_text(last.caught_up)}; the checkpoint has {bytes_text(last.bytes)}"
                )
    return found
