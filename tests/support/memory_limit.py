"""Makes the system refuse memory to a test, as to a process at its limit."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def refused_beyond(spare_bytes: int) -> Iterator[None]:
    """While the body runs, the process can get `spare_bytes` more address space and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
