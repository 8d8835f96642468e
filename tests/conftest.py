"""What holds for every test."""

import asyncio
import inspect
import os

import pytest
from hypothesis import HealthCheck, settings

from emberscale_api.environment import share_kernels

# Threads of OpenMP wait for each other in loops: where they share cores with other tests, that takes most of the time.
# The processes of jobs set their own number.
os.environ["OMP_NUM_THREADS"] = "1"

share_kernels(os.environ)  # with `make install`, which has compiled them

# Whether an example is slow says how busy the machine is, and kernels are compiled by the first that runs them.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Two runs over one tree try the same examples, so that a run fails only on what its tree has changed. `make explore`
# tries others.
settings.register_profile("repeatable", PATIENT, derandomize=True)
settings.register_profile("explore", PATIENT, print_blob=True)
settings.load_profile("repeatable")

SECONDS = 120.0
"""In which a test that is a coroutine must end."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), SECONDS))
    return True
