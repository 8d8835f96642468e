"""A run's metrics over time, as rows of metrics.csv."""

import csv
import math
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

from emberscale._run.summary import phase_name
from emberscale_api.rpc import master_pb2 as pb
from emberscale_operator.local import RunView

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
    """Appends a row about twice a second; a resumed run goes on in the same file, `offset` seconds later."""

    def __init__(self, path: Path, offset: float) -> None:
        self._offset = offset
        self._next = 0.0
        fresh = not path.exists() or path.stat().st_size == 0
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if fresh:
            self._writer.writerow(COLUMNS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def record(self, snapshot: RunView) -> None:
        """Writes a row, unless the last one is too recent or nothing is known yet."""
        if snapshot.status is None or snapshot.seconds < self._next:
            return
        self._next = snapshot.seconds + _INTERVAL_SECONDS
        self._writer.writerow(row(snapshot, snapshot.status, self._offset))
        self._file.flush()


def row(snapshot: RunView, status: pb.JobStatus, offset: float) -> tuple[object, ...]:
    """The values of COLUMNS; what is not known is empty."""
    memory: Counter[str] = Counter()
    for process in snapshot.processes:
        memory[process.name.rpartition("-")[0]] += process.resident_bytes
    training = status.phase == pb.TRAINING
    return (
        f"{offset + snapshot.seconds:.2f}",
        phase_name(status.phase),
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
