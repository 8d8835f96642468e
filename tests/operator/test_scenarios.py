"""Stories of a job, one file each in `scenarios/`, which must have the same course on every backend.

A file begins with its topic and, if some backends cannot tell the story, the names of those that can. Commands follow,
each with its consequences below a line of dashes. `EMBERSCALE_REWRITE=1` rewrites the consequences.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from scenario_worlds import stage

FOLDER = Path(__file__).with_name("scenarios")
BACKENDS = ("fake", "kubernetes", "local")


@dataclass(frozen=True)
class Scenario:
    """The commands of a file, each with what it expects to follow."""

    path: Path
    head: str
    backends: Sequence[str]
    steps: Sequence[tuple[str, str]]


def read(path: Path) -> Scenario:
    head, *blocks = path.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    named = [line.partition(": ")[2].split() for line in head.splitlines() if line.startswith("# backends: ")]
    steps = [(block.split("\n----")[0], block.partition("\n----")[2].strip("\n")) for block in blocks]
    return Scenario(path, head, named[0] if named else BACKENDS, steps)


def scenarios() -> Iterator[tuple[Scenario, str]]:
    for path in sorted(FOLDER.glob("*.txt")):
        scenario = read(path)
        for backend in scenario.backends:
            yield scenario, backend


async def play(scenario: Scenario, backend: str, logs: Path) -> list[tuple[str, str]]:
    (first, _), *_ = scenario.steps
    options = {name: int(number) for name, number in (word.split("=") for word in first.split()[1:])}
    told = stage(backend, options, logs)
    played = []
    for command, _ in scenario.steps:
        word, *arguments = command.split()
        played.append((command, "\n".join(await told.do(word, arguments))))
    return played


@pytest.mark.parametrize(
    ("scenario", "backend"), [pytest.param(*told, id=f"{told[0].path.stem}-{told[1]}") for told in scenarios()]
)
def test_a_scenario_goes_as_it_is_written(scenario: Scenario, backend: str, tmp_path: Path) -> None:
    played = asyncio.run(play(scenario, backend, tmp_path))
    if os.environ.get("EMBERSCALE_REWRITE") and backend == scenario.backends[0]:
        blocks = [f"{command}\n----\n{follows}".rstrip("\n") for command, follows in played]
        scenario.path.write_text("\n\n".join([scenario.head, *blocks]) + "\n", encoding="utf-8")
        return
    assert played == list(scenario.steps)
