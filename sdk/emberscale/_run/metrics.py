"""The metrics of a run over time, as rows of metrics.csv."""

import csv
import math
from collections import Counter
from pathlib import Path
from typing import Self

from emberscale_api.job.running import JobStatus
from emberscale_api.job.status import JobPhase
from emberscale_operator.local.snapshot import RunView

_INTERVAL_SECONDS = 0.5
_MEMORY_ROLES = ("master", "ps", "worker", "redis")
COLUMNS = (
    "seconds",
    "phase",
    "epoch",
    "samples",
    "samples_per_second",
    "loss",
    "auc",
    "rows",
    *(f"{role}_memory_bytes" for role in _MEMORY_ROLES),
)


class MetricsRecorder:
    """Appends a row about twice a second, and one whenever the phase changes.

    A resumed run continues the same file, `offset` seconds later.
    """

    def __init__(self, path: Path, offset: float) -> None:
        self._offset = offset
        self._next = 0.0
        self._phase: JobPhase | None = None
        fresh = not path.exists() or path.stat().st_size == 0
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if fresh:
            self._writer.writerow(COLUMNS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def record(self, snapshot: RunView) -> None:
        """Writes a row, unless nothing is known yet, or the last one is recent and of the same phase."""
        if snapshot.status is None:
            return
        if snapshot.seconds < self._next and snapshot.status.phase is self._phase:
            return
        self._next, self._phase = snapshot.seconds + _INTERVAL_SECONDS, snapshot.status.phase
        self._writer.writerow(row(snapshot, snapshot.status, self._offset))
        self._file.flush()


def row(snapshot: RunView, status: JobStatus, offset: float) -> tuple[object, ...]:
    """The values of COLUMNS; what is not known is empty."""
    memory: Counter[str] = Counter()
    for process in snapshot.processes:
        memory[process.name.rpartition("-")[0]] += process.resident_bytes
    training = status.phase is JobPhase.TRAINING
    return (
        f"{offset + snapshot.seconds:.2f}",
        status.phase or "",
        status.epoch,
        status.samples,
        f"{status.samples_per_second:.1f}" if training else "",
        _number(status.loss) if status.samples else "",
        _number(status.auc) if status.samples else "",
        sum(status.rows.values()),
        *(memory[role] for role in _MEMORY_ROLES),
    )


def _number(value: float) -> str:
    return f"{value:.6f}" if math.isfinite(value) else ""
