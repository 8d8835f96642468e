"""The tables of phases: the machine keeps to them, and the documentation shows them."""

import importlib.util
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from tests.jobmaster import driven_master
from tests.jobmaster.driven import Driven
from tests.jobmaster.driven_master import Fault
from tests.jobmaster.scenario import Scenario

from emberscale_api.job import TrainingJobSpec
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_jobmaster import transitions
from emberscale_jobmaster.effects import Effect
from emberscale_jobmaster.events import Event
from emberscale_jobmaster.figures import phase_of
from emberscale_jobmaster.machine import MasterState, step
from emberscale_jobmaster.operations import CheckpointPhase, MovePhase, ReloadPhase, RestorePhase
from emberscale_jobmaster.transitions import CHECKPOINTING, JOB, MOVE, RELOAD, RESTORE, Transition, TransitionError

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((ROOT / "tests" / "jobmaster" / "scenarios").glob("*.txt"))


def test_the_diagrams_are_those_of_the_tables() -> None:
    spec = importlib.util.spec_from_file_location("state_diagrams", ROOT / "deploy" / "site" / "state_diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text()
    assert page.count("stateDiagram-v2") == 6
    assert page == module.drawn(page), "run .venv/bin/python deploy/site/state_diagrams.py"


@pytest.mark.parametrize(
    ("table", "phases"),
    [(RESTORE, RestorePhase), (RELOAD, ReloadPhase), (CHECKPOINTING, CheckpointPhase), (MOVE, MovePhase)],
)
def test_every_phase_of_an_operation_can_be_entered_and_left(
    table: tuple[Transition, ...], phases: type[RestorePhase | ReloadPhase | CheckpointPhase | MovePhase]
) -> None:
    assert {one.after for one in table} == {*phases, ""}
    assert {one.before for one in table} == {*phases, ""}


def test_a_step_that_is_not_in_the_table_is_a_defect() -> None:
    job = Driven(servers=2, sizes_open=True)
    job.start()
    job.plan(3)
    job.faults["Copy", 1] = Fault(hangs=True)
    job.join(Role.PS, 2)
    move = job.job.move
    assert move is not None
    transitions.check([move], [move])
    transitions.check([move], [])
    with pytest.raises(TransitionError, match=f"Move {move.id}: Switch does not follow Copy"):
        transitions.check([move], [replace(move, phase=MovePhase.SWITCH)])
    with pytest.raises(TransitionError, match=f"Move {move.id}: Copy does not follow its beginning"):
        transitions.check([], [move])


def test_the_phases_of_a_job_follow_each_other_as_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, str]] = set()

    def noted(state: MasterState, event: Event, spec: TrainingJobSpec) -> tuple[MasterState, tuple[Effect, ...]]:
        after, effects = step(state, event, spec)
        phases = (phase_of(state.job, spec), phase_of(after.job, spec))
        seen.update(pair for pair in pairwise(phases) if pair[0] is not pair[1])
        return after, effects

    monkeypatch.setattr(driven_master, "step", noted)
    for file in SCENARIOS:
        scenario = Scenario()
        for block in file.read_text().split("\n\n"):
            for command in block.split("\n----")[0].splitlines():
                if command and not command.startswith("#"):
                    scenario.run(command)
    table = {(one.before, one.after) for one in JOB}
    through = {(before, after) for before, middle in table for other, after in table if middle == other != ""}
    anywhere = (JobPhase.FAILED, JobPhase.SUSPENDED)
    surprising = {
        pair for pair in seen - table - through if pair[1] not in anywhere and pair[0] is not JobPhase.SUSPENDED
    }
    assert len(seen) > 8
    assert not surprising
