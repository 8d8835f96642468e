"""Runs the simulation: many seeds at once, or one seed with its trace.

python -m tests.simulation --seeds 100000 --jobs 4
python -m tests.simulation --seed 4711 --trace
python -m tests.simulation --shrink 4711
"""

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from multiprocessing import Pool

from tests.simulation.cluster import Cluster, simulate
from tests.simulation.mutations import MUTATIONS, broken
from tests.simulation.random_scenario import scenario_of
from tests.simulation.scenario import Scenario
from tests.simulation.shrink import failure_of, shrunk

_CHUNK = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, 1 if a seed fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulates whole jobs.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="how many at the same time")
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="print what happens, with --seed or --shrink")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="make the scenario of a failing seed small")
    parser.add_argument("--break", dest="broken", choices=sorted(MUTATIONS), help="break a rule of the cores")
    asked = parser.parse_args(arguments)
    with broken(asked.broken) if asked.broken else nullcontext():
        if asked.shrink is not None:
            return _one(shrunk(scenario_of(asked.shrink)), trace=True)
        if asked.seed is not None:
            return _one(scenario_of(asked.seed), asked.trace)
        return _many(range(asked.first, asked.first + asked.seeds), asked.jobs)


def _one(scenario: Scenario, trace: bool) -> int:
    _print(_described(scenario))
    try:
        cluster, problem = simulate(scenario, traced=trace), ""
    except Exception as error:  # noqa: BLE001 - a core that raises is a failure like any other
        cluster, problem = error.__dict__["cluster"], f"{type(error).__name__}: {error}"
    if isinstance(cluster, Cluster):
        for line in cluster.world.lines:
            _print(line)
        _print(f"{cluster.world.steps} events in {cluster.world.now:.1f} s of simulated time")
    _print(f"FAILED: {problem}" if problem else "holds")
    return 1 if problem else 0


def _many(seeds: range, jobs: int) -> int:
    began, failures, done = time.monotonic(), 0, 0
    with Pool(jobs) as pool:
        for seed, problem in pool.imap_unordered(_outcome, seeds, chunksize=_CHUNK):
            done += 1
            if problem:
                failures += 1
                _print(f"seed {seed}: {problem}")
            if done % 1000 == 0:
                _print(f"{done} seeds, {failures} failures, {time.monotonic() - began:.0f} s")
    seconds = time.monotonic() - began
    _print(
        f"{len(seeds)} seeds, {failures} failures, {seconds:.0f} s, {1000 * seconds * jobs / len(seeds):.1f} ms each"
    )
    return 1 if failures else 0


def _outcome(seed: int) -> tuple[int, str]:
    return seed, failure_of(scenario_of(seed))


def _described(scenario: Scenario) -> str:
    plain = {name: value for name, value in vars(scenario).items() if name != "faults"}
    lines = [", ".join(f"{name} {value}" for name, value in plain.items())]
    return "\n".join([*lines, *(f"  {fault}" for fault in scenario.faults)])


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
