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
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from emberscale_api.errors import InvalidError, read_text
from emberscale_api.shape import GIB, JobShape

_CELLS: Mapping[str, tuple[Callable[[str], float], float, float] | None] = {
    "job_id": None,
    "owner": None,
    "submitted_seconds": (float, 0, 1e12),
    "model": None,
    "total_samples": (int, 1, 1e18),
    "workers": (int, 1, 100_000),
    "ps": (int, 1, 100_000),
    "worker_cpu": (float, 1e-3, 1e5),
    "ps_cpu": (float, 1e-3, 1e5),
    "worker_memory_gib": (float, 1e-3, 1e6),
    "ps_memory_gib": (float, 1e-3, 1e6),
}
"""How the numbers of a column are read, and the least and the greatest that are allowed; None: it holds text."""

COLUMNS = tuple(_CELLS)


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
    reader = csv.reader(io.StringIO(read_text(path, "utf-8-sig")))  # spreadsheets put a mark before the first column
    try:
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
            cells = {column: value.strip() for column, value in zip(header, values, strict=True)}
            wrong = [f"{path}:{line}: column {column}: {what}" for column, what in _problems(cells, models)]
            if not wrong:
                row = _row(cells)
                if row.job_id in seen:
                    wrong = [f"{path}:{line}: column job_id: {row.job_id!r} is on line {seen[row.job_id]} already"]
                seen.setdefault(row.job_id, line)
                rows.append(row)
            problems.extend(wrong)
    except csv.Error as error:
        raise InvalidError(f"{path}:{reader.line_num}: is not valid CSV: {error}") from error
    if problems:
        more = [f"{path}: and {len(problems) - 20} more"] if len(problems) > 20 else []
        raise InvalidError("\n".join(problems[:20] + more))
    if not rows:
        raise InvalidError(f"{path}: holds no job below its header row")
    return sorted(rows, key=lambda row: (row.submitted_seconds, row.job_id))


def _problems(cells: Mapping[str, str], models: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The columns whose cells are bad, and why."""
    for column, number in _CELLS.items():
        text = cells[column]
        if number is not None:
            read, low, high = number
            try:
                if not low <= read(text) <= high:
                    yield column, f"{text} is not between {low:g} and {high:g}"
            except ValueError:
                yield column, f"{text!r} is not {'a whole number' if read is int else 'a number'}"
        elif not text:
            yield column, "is empty"
        elif column == "model" and text not in models:
            yield column, f"{text!r} is not one of the scenario's models: {', '.join(sorted(models))}"


def _row(cells: Mapping[str, str]) -> TraceRow:
    return TraceRow(
        job_id=cells["job_id"],
        owner=cells["owner"],
        submitted_seconds=float(cells["submitted_seconds"]),
        model=cells["model"],
        total_samples=int(cells["total_samples"]),
        request=JobShape(
            int(cells["workers"]),
            int(cells["ps"]),
            float(cells["worker_cpu"]),
            float(cells["ps_cpu"]),
            int(float(cells["worker_memory_gib"]) * GIB),
            int(float(cells["ps_memory_gib"]) * GIB),
        ),
    )
