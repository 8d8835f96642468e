"""Makes a failing scenario as small as possible."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.cluster import simulate
from tests.simulation.scenario import Scenario
from tests.simulation.world import SimulationError


def failure_of(scenario: Scenario) -> str:
    """Returns what goes wrong; empty if nothing does.

    Garbage collection is off meanwhile: a run makes little garbage before its end, and all of it is young then. A first
    collection only closes the coroutines that still wait, and takes what they hold for alive; a second one frees it.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _outcome(scenario)
    finally:
        gc.collect(0)
        gc.collect(1)
        if collecting:
            gc.enable()


def _outcome(scenario: Scenario) -> str:
    try:
        simulate(scenario)
    except SimulationError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a core that raises is a failure like any other
        return f"{type(error).__name__}: {error}"
    return ""


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool] = lambda one: bool(failure_of(one))) -> Scenario:
    """Returns a minimal failing scenario: first with fewer faults, then with a calmer network or a smaller job."""
    while (smaller := next((one for one in _smaller(scenario) if fails(one)), None)) is not None:
        scenario = smaller
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    half = len(faults) // 2
    if half > 1:
        yield replace(scenario, faults=faults[:half])
        yield replace(scenario, faults=faults[half:])
    for place in range(len(faults)):
        yield replace(scenario, faults=(*faults[:place], *faults[place + 1 :]))
    for place in range(len(scenario.rescales)):
        yield replace(scenario, rescales=(*scenario.rescales[:place], *scenario.rescales[place + 1 :]))
    for place in range(len(scenario.edits)):
        yield replace(scenario, edits=(*scenario.edits[:place], *scenario.edits[place + 1 :]))
    for place in range(len(scenario.drains)):
        yield replace(scenario, drains=(*scenario.drains[:place], *scenario.drains[place + 1 :]))
    if scenario.lossy:
        yield replace(scenario, lossy=0.0)
    if scenario.dawdling:
        yield replace(scenario, dawdling=0.0)
    if scenario.slow:
        yield replace(scenario, slow=0.0)
    if scenario.outdated:
        yield replace(scenario, outdated=0.0)
    if scenario.placing_seconds:
        yield replace(scenario, placing_seconds=0.0)
    for field, least in (
        ("evaluation_batches", 0),
        ("epochs", 1),
        ("servers", 1),
        ("workers", 1),
        ("pull_ahead", 0),
        ("rounds", 0),
        ("batches", 1),
    ):
        value = getattr(scenario, field)
        for smaller in dict.fromkeys((least, (value + least) // 2, value - 1)):
            if least <= smaller < value:
                yield Scenario(**{**vars(scenario), field: smaller})
