"""What can be wrong with data."""

from dataclasses import dataclass


class DataUnavailableError(Exception):
    """Data that cannot be read at all; `reason` is how the job's master names it.

    One malformed record is not this: it is a `BadRecord`, and reading goes on.
    """

    reason = "DataUnavailable"

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that was skipped. `line` counts from 1 within the file."""

    file: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.problem}"
