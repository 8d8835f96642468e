"""A defect in any thread of a master ends the process, so that its job does not stall silently."""

import subprocess
import sys

import pytest
from tests.jobmaster.conftest import Cluster

from emberscale_jobmaster.__main__ import EXIT_DEFECT

BROKEN = """
import emberscale_jobmaster.runtime as runtime
from emberscale_jobmaster.__main__ import main

real = runtime.step

def step(state, event, spec):
    if type(event).__name__ == "{event}":
        raise AssertionError("a batch is in two places")
    return real(state, event, spec)

runtime.step = step
main()
"""


@pytest.mark.parametrize("event", ["TimePassed", "ServerAnswered"])
def test_a_defect_in_any_thread_ends_the_master(cluster: Cluster, event: str) -> None:
    """The defect strikes the watch of deadlines, or the thread in which gRPC delivers an answer."""
    process = subprocess.Popen([sys.executable, "-c", BROKEN.format(event=event)], env=cluster.environment())
    try:
        if event != "TimePassed":
            cluster.until(lambda _: True, "the master to answer")
            cluster.start_servers()
            cluster.start_worker(0, records=50)
        assert process.wait(timeout=60) == EXIT_DEFECT
    finally:
        process.kill()
