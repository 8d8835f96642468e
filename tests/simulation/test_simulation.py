"""Whole jobs under a seeded clock and network, and rules broken on purpose that the simulation must find."""

from dataclasses import replace

import pytest
from tests.simulation.cluster import simulate
from tests.simulation.mutations import MUTATIONS, broken
from tests.simulation.scenario import Fault, Kind, scenario_of
from tests.simulation.shrink import failure_of, shrunk

SEEDS, CHUNKS = 5000, 40
FOUND_WITHIN = 2000
FOUND_AT = {
    "checkpoints come again": 1686,
    "a barrier over another table is held": 637,
    "tickets are forgotten by worker": 215,
    "an unreachable file is damaged": 273,
    "a switch lets go of its barrier": 187,
    "other histories may push": 105,
    "pulls that nobody knows count": 1075,
    "a successor answers for its predecessor": 337,
    "an edit is waited for while rows are lost": 144,
    "a dead lease may push": 111,
    "holders do not agree on the least": 518,
    "items are applied as they come": 518,
    "rows are sent before others have withdrawn": 155,
}
"""Rules that take many seeds; another seed finds them after a change of the scenarios, in a minute or so."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_job_ends_complete_and_exact(chunk: int) -> None:
    for seed in range(chunk * SEEDS // CHUNKS, (chunk + 1) * SEEDS // CHUNKS):
        problem = failure_of(scenario_of(seed))
        assert not problem, f"python -m tests.simulation --seed {seed} --trace: {problem}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_found(name: str) -> None:
    """Seeds that found it once are tried first."""
    seeds = sorted(range(FOUND_WITHIN), key=lambda seed: seed != FOUND_AT.get(name))
    with broken(name):
        assert any(failure_of(scenario_of(seed)) for seed in seeds)


def test_the_same_seed_is_the_same_run() -> None:
    one, other = (simulate(scenario_of(7), traced=True).world for _ in range(2))
    assert one.lines == other.lines
    assert one.lines


def test_a_failing_scenario_is_made_small() -> None:
    scenario = scenario_of(3)
    kill = Fault(1.0, Kind.KILL, "ps")
    noise = (Fault(0.5, Kind.CUT, "worker"), kill, Fault(2.0, Kind.TEAR), Fault(3.0, Kind.HANG, "worker", 0, 0.3))
    small = shrunk(replace(scenario, faults=noise), lambda one: kill in one.faults)
    assert small.faults == (kill,)
    assert (small.workers, small.servers, small.batches, small.epochs, small.slow) == (1, 1, 1, 1, 0.0)
