"""Fractions of cores: what is written for the kernel, and that the kernel enforces it where quotas can be set."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from emberscale_operator.local.cpu import CpuQuotas, find_cpu_quotas

BUSY = "import time\nbegan = time.monotonic()\nwhile time.monotonic() - began < 2: pass"


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


def test_a_process_gets_the_fraction_that_it_was_given() -> None:
    quotas = find_cpu_quotas()
    if quotas is None:
        pytest.skip("NOT RUN: no quotas of CPU can be set here")
    process = subprocess.Popen([sys.executable, "-S", "-c", BUSY])
    try:
        quotas.limit(process.pid, "busy", 0.2)
        used = 0.0
        while process.poll() is None:
            times = psutil.Process(process.pid).cpu_times()
            used = max(used, times.user + times.system)
    except psutil.NoSuchProcess:
        pass
    finally:
        process.kill()
        process.wait()
        quotas.forget("busy")
    assert 0 < used < 1.0
