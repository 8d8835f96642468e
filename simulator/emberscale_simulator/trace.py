"""Jobs from a CSV trace.

A header row, then one row per job, in any order of columns:

    job_id             unique name of the job
    owner              who submitted it
    submitted_seconds  seconds from the start of the simulation, at least 0
    model              one of the scenario's `models`
    total_samples      samples to train, over all epochs, at least 1
    workers, ps        the owner's request: processes, 1 to 100,000
    worker_cpu, ps_cpu             cores of one process, above 0
    worker_memory_gib, ps_memory_gib   memory of one process in GiB, above 0
"""

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from emberscale_api.errors import InvalidError
from emberscale_api.shape import GIB, JobShape

COLUMNS = (
    "job_id",
    "owner",
    "submitted_seconds",
    "model",
    "total_samples",
    "workers",
    "ps",
    "worker_cpu",
    "ps_cpu",
    "worker_memory_gib",
    "ps_memory_gib",
)


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One job of a trace."""

    job_id: str
    owner: str
    submitted_seconds: float
    model: str
    total_samples: int
    request: JobShape


def read_trace(path: Path, models: frozenset[str]) -> list[TraceRow]:
    """Reads the jobs of a trace, by time of submission.

    Raises InvalidError, which names file, line and column of up to twenty bad rows.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets put a mark before the first column
            reader = csv.reader(file)
            header = next(reader, None)
            if header is None:
                raise InvalidError(f"{path}:1: is empty; expected a header row with {', '.join(COLUMNS)}")
            missing = [column for column in COLUMNS if column not in header]
            unknown = [column for column in header if column not in COLUMNS]
            if missing or unknown:
                raise InvalidError(
                    f"{path}:1: "
                    + "; ".join(
                        f"{what} column {', '.join(columns)}"
                        for what, columns in (("missing", missing), ("unknown", unknown))
                        if columns
                    )
                    + f"; the columns are {', '.join(COLUMNS)}"
                )
            rows: list[TraceRow] = []
            problems: list[str] = []
            seen: dict[str, int] = {}
            for values in reader:
                if not values:
                    continue
                line = reader.line_num
                if len(values) != len(header):
                    problems.append(f"{path}:{line}: has {len(values)} columns, the header has {len(header)}")
                    continue
                parser = _Row(path, line, dict(zip(header, values, strict=True)))
                row = parser.parse(models)
                problems.extend(parser.problems)
                if row is not None:
                    if row.job_id in seen:
                        problems.append(
                            f"{path}:{line}: column job_id: {row.job_id!r} is on line {seen[row.job_id]} already"
                        )
                    seen.setdefault(row.job_id, line)
                    rows.append(row)
    except OSError as error:
        raise InvalidError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidError(f"{path}: is not UTF-8 text") from error
    except csv.Error as error:
        raise InvalidError(f"{path}:{reader.line_num}: is not valid CSV: {error}") from error
    if problems:
        more = [f"{path}: and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise InvalidError("\n".join(problems[:20] + more))
    if not rows:
        raise InvalidError(f"{path}: holds no job below its header row")
    return sorted(rows, key=lambda row: (row.submitted_seconds, row.job_id))


class _Row:
    """Reads one row; collects a problem for each bad cell."""

    def __init__(self, path: Path, line: int, cells: Mapping[str, str]) -> None:
        self.problems: list[str] = []
        self._where = f"{path}:{line}"
        self._cells = cells

    def parse(self, models: frozenset[str]) -> TraceRow | None:
        """Returns the row, or None if a cell is bad."""
        job_id = self._text("job_id")
        owner = self._text("owner")
        submitted = self._number("submitted_seconds", float, 0, 1e12)
        model = self._text("model")
        if model and model not in models:
            self._problem("model", f"{model!r} is not one of the scenario's models: {', '.join(sorted(models))}")
        samples = self._number("total_samples", int, 1, 1e18)
        workers = self._number("workers", int, 1, 100_000)
        ps = self._number("ps", int, 1, 100_000)
        worker_cpu = self._number("worker_cpu", float, 1e-3, 1e5)
        ps_cpu = self._number("ps_cpu", float, 1e-3, 1e5)
        worker_memory = self._number("worker_memory_gib", float, 1e-3, 1e6)
        ps_memory = self._number("ps_memory_gib", float, 1e-3, 1e6)
        if self.problems:
            return None
        return TraceRow(
            job_id=job_id,
            owner=owner,
            submitted_seconds=submitted,
            model=model,
            total_samples=int(samples),
            request=JobShape(int(workers), int(ps), worker_cpu, ps_cpu, int(worker_memory * GIB), int(ps_memory * GIB)),
        )

    def _problem(self, column: str, problem: str) -> None:
        self.problems.append(f"{self._where}: column {column}: {problem}")

    def _text(self, column: str) -> str:
        value = self._cells[column].strip()
        if not value:
            self._problem(column, "is empty")
        return value

    def _number(self, column: str, kind: Callable[[str], float], low: float, high: float) -> float:
        text = self._cells[column].strip()
        try:
            value = kind(text)
        except ValueError:
            self._problem(column, f"{text!r} is not {'a whole number' if kind is int else 'a number'}")
            return low
        if not low <= value <= high:
            self._problem(column, f"{text} is not between {low:g} and {high:g}")
        return value
