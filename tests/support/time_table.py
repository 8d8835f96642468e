"""Shows where the time of test runs goes, from the reports that pytest writes with --junitxml.

.venv/bin/python tests/support/time_table.py [--slowest N] REPORT...

Prints two tables in Markdown: the seconds of each run, with those of the tests in each folder, and the slowest tests,
with all cases of a test in one line. Several processes run tests, so the seconds of tests add up to more than the run.
"""

import argparse
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One test case of a report."""

    report: str
    file: str
    test: str
    seconds: float

    @property
    def folder(self) -> str:
        return self.file.rpartition("/")[0]


def cases_of(report: Path) -> Iterator[Case]:
    """Yields the test cases of a report; their times include fixtures."""
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/")
        yield Case(report.stem, file, case.attrib["name"].partition("[")[0], float(case.attrib["time"]))


def whole_run(report: Path) -> float:
    """Returns the seconds of a whole run."""
    return sum(float(suite.attrib["time"]) for suite in ElementTree.parse(report).iter("testsuite"))


def rows(cases: Iterable[Case], key: str) -> dict[tuple[str, str], tuple[int, float]]:
    """Returns numbers of cases and their seconds, by report and an attribute of a case."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for case in cases:
        place = (case.report, getattr(case, key) if key == "folder" else f"{case.file}.py::{case.test}")
        number, seconds = found.get(place, (0, 0.0))
        found[place] = number + 1, seconds + case.seconds
    return dict(sorted(found.items(), key=lambda row: -row[1][1]))


def table(heads: str, found: Mapping[tuple[str, str], tuple[int, float]], runs: Mapping[str, float]) -> str:
    """Returns a table in Markdown, with the whole runs first."""
    whole = {(name, "all"): (sum(row[0] for at, row in found.items() if at[0] == name), runs[name]) for name in runs}
    lines = [f"| {heads} | cases | seconds |", "|---|---|---:|---:|"]
    lines += [f"| {name} | {place} | {number} | {seconds:.0f} |" for (name, place), (number, seconds) in whole.items()]
    lines += [f"| {name} | {place} | {number} | {seconds:.0f} |" for (name, place), (number, seconds) in found.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT")
    parser.add_argument("--slowest", type=int, default=20, help="how many tests are listed")
    given = parser.parse_args()
    cases = [case for report in given.reports for case in cases_of(report)]
    runs = {report.stem: whole_run(report) for report in given.reports}
    tests = list(rows(cases, "test").items())
    print(table("run | folder", rows(cases, "folder"), runs))  # noqa: T201
    print()  # noqa: T201
    print(table("run | test", dict(tests[: given.slowest]), {}))  # noqa: T201


if __name__ == "__main__":
    main()
