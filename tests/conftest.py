"""Settings for all tests."""

import asyncio
import inspect
import os

import pytest
from hypothesis import HealthCheck, settings

from emberscale_api.start import share_kernels

# OpenMP's threads spin while they wait for each other, which takes most of the time if tests share cores.
# The processes of jobs set their own number of threads.
os.environ["OMP_NUM_THREADS"] = "1"

share_kernels(os.environ)  # those that `make install` has compiled

# A slow example only shows that the machine is busy, or that it is the first to run, and so to compile, a kernel.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Runs of the same tree try the same examples, so that a run fails only because of a change in the tree.
# `make explore` tries others.
settings.register_profile("repeatable", PATIENT, derandomize=True)
settings.register_profile("explore", PATIENT, print_blob=True)
settings.load_profile("repeatable")

SECONDS = 120.0
"""The time limit of a test that is a coroutine."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine in its own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), SECONDS))
    return True
