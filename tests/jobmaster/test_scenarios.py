"""Replays the scenarios: commands, and after `----` the state of the job.

To rewrite the expected states: `EMBERSCALE_REWRITE=1 pytest tests/jobmaster/test_scenarios.py`, and read the diff.
"""

import os
from pathlib import Path

import pytest
from tests.jobmaster.scenario import Scenario, describe

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_a_scenario_goes_as_it_is_written(file: Path) -> None:
    scenario = Scenario()
    replayed = []
    for block in file.read_text().rstrip("\n").split("\n\n"):
        commands = block.split("\n----")[0].splitlines()
        for command in commands:
            if command and not command.startswith("#"):
                scenario.run(command)
        says = any(not command.startswith("#") for command in commands)
        replayed.append("\n".join(commands) + (f"\n----\n{describe(scenario.driven)}" if says else ""))
    text = "\n\n".join(replayed) + "\n"
    if os.environ.get("EMBERSCALE_REWRITE"):
        file.write_text(text)
    assert text == file.read_text()
