"""Fractions of cores: what is written for the kernel, and that the kernel enforces it where quotas can be set."""

import subprocess
import sys
from pathlib import Path

import pytest

from emberscale_operator.local.cpu import CpuQuotas, find_cpu_quotas

CPU_SECONDS, CORES = 0.4, 0.2
BUSY = f"""
import sys, time
sys.stdin.readline()
began = time.monotonic()
until = time.process_time() + {CPU_SECONDS}
while time.process_time() < until:
    pass
print(time.monotonic() - began)
"""


@pytest.fixture
def groups(tmp_path: Path) -> CpuQuotas:
    return CpuQuotas(tmp_path, unified=True)


def test_a_fraction_is_a_quota_and_whole_cores_are_none(groups: CpuQuotas) -> None:
    groups.limit(1, "worker-0", 0.3)
    (group,) = groups.parent.iterdir()
    assert (group / "cpu.max").read_text() == "15000 50000"
    assert (group / "cgroup.procs").read_text() == "1"
    groups.limit(1, "worker-1", 2.0)
    assert len(list(groups.parent.iterdir())) == 1
    groups.limit(1, "worker-0", 2.0)
    assert (group / "cpu.max").read_text() == "max 50000"


def test_a_process_gets_no_more_than_the_fraction_that_it_was_given() -> None:
    """Other load only adds to the seconds that a process takes for its work."""
    quotas = find_cpu_quotas()
    if quotas is None:
        pytest.skip("NOT RUN: no quotas of CPU can be set here")
    command = [sys.executable, "-S", "-c", BUSY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            quotas.limit(process.pid, "busy", CORES)
            took, _ = process.communicate("begin\n")
        finally:
            process.kill()
            process.wait()
            quotas.forget("busy")
    assert float(took) > 0.9 * CPU_SECONDS / CORES
