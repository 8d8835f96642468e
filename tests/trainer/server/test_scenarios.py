"""Replays the scenarios of one parameter server: a command on each line, and after `->` what the server answers.

To rewrite the answers: `EMBERSCALE_REWRITE=1 pytest tests/trainer/server/test_scenarios.py`, and read the diff.

* `serve`: loads rows, of `generation` and `version` 1 if nothing else is said, as in all commands.
* `at 5`: the time, in seconds.
* `push 3`: a push of batch 3; `came` says when it arrived, if that was earlier.
* `hold 1 for 10`, `settle 1 with 0-1 for 10`, `settled 1`, `snapshot 1`, `switch 1 to 2`, `resume 1`: the calls of
  barrier 1. Batches are `first-last`. `prepare 2` begins the move to version 2, whose number that is, too.
"""

import os
from pathlib import Path

import pytest
from tests.trainer.server.cores import assign, header

from emberscale_api.wire import Status
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.barrier import NotHeldError, Outcome
from emberscale_trainer.server.core import Decision, LaterError, ServerCore, Wait
from moves import table_of

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


class Scenario:
    """One server, and the time."""

    def __init__(self) -> None:
        self.core = ServerCore()
        self.now = 0.0

    def answer(self, command: str) -> str:
        """Carries out a command; returns the server's answer, empty for none."""
        try:
            return self._carry_out(command.split())
        except LaterError as error:
            return f"comes too late: {error}"
        except NotHeldError as error:
            return f"is not held: {error}"

    def _carry_out(self, words: list[str]) -> str:
        """Options follow the command and its number, each with its value."""
        command, *rest = words
        number = int(rest.pop(0)) if len(rest) % 2 else 0
        options = dict(zip(rest[::2], rest[1::2], strict=True))
        generation, version = (int(options.pop(name, 1)) for name in ("generation", "version"))
        seconds = float(options.pop("for", 0))
        match command:
            case "serve":
                assign(self.core, generation, version)
            case "at":
                self.now = float(number)
            case "push":
                request = header(number, generation=generation, version=version)
                decision = self.core.push(0, request, float(options.pop("came", self.now)), self.now)
                if decision is Status.OK:
                    self.core.record(0, request, self.now)
                return decided(decision)
            case "hold":
                return batches(self.core.hold(generation, version, number, seconds, self.now))
            case "settle":
                given = [tuple(map(int, one.split("-"))) for one in options.pop("with", "").split(",") if one]
                ranges = [(0, first, last + 1) for first, last in given]
                self.core.settle(generation, number, ranges, seconds, self.now)
            case "settled":
                settled = self.core.settled(generation, number, self.now)
                return batches(settled) if settled is not None else "not yet"
            case "snapshot":
                return ended(self.core.snapshot(generation, number, self.now))
            case "switch":
                to = int(options.pop("to"))
                return ended(self.core.switch(generation, number, to, AppliedBatches(), None, self.now)[0])
            case "prepare":
                self.core.prepare(number, self.core.known[1], table_of(number, generation=generation), 0, self.now)
            case "resume":
                self.core.resume(generation, number)
            case _:
                raise ValueError(f"no such command: {command}")
        assert not options, f"{command} has no options {', '.join(options)}"
        return ""


def decided(decision: Decision) -> str:
    return f"waits until {decision.until:g}" if isinstance(decision, Wait) else decision.name


def batches(applied: AppliedBatches) -> str:
    return "applied " + (", ".join(f"{first}-{stop - 1}" for first, stop in applied.ranges(0)) or "nothing")


def ended(outcome: Outcome) -> str:
    times = f"held {outcome.held_seconds:g} s, of which settled {outcome.settled_seconds:g} s"
    return f"{batches(outcome.applied)}, " + ("as said before" if outcome.repeated else times)


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_a_scenario_goes_as_it_is_written(file: Path) -> None:
    replayed = []
    for block in file.read_text().rstrip("\n").split("\n\n"):
        scenario, lines = Scenario(), []
        for line in block.splitlines():
            command = line.partition(" ->")[0].rstrip()
            answer = "" if line.startswith("#") else scenario.answer(command)
            lines.append(f"{command:<29} -> {answer}" if answer else command)
        replayed.append("\n".join(lines))
    text = "\n\n".join(replayed) + "\n"
    if os.environ.get("EMBERSCALE_REWRITE"):
        file.write_text(text)
    assert text == file.read_text()
