"""A tethered process never outlives its parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from emberscale_operator.local import starters
from emberscale_operator.local.process import Launch, TetheredProcess
from eventually import eventually

TETHER = Path(starters.__file__).with_name("tether.py")
SLEEP = "import threading; threading.Event().wait()"

PARENT = """
import sys, threading
from pathlib import Path
from emberscale_operator.local.process import Launch, TetheredProcess

command = (sys.executable, "-S", "-c", "import threading; threading.Event().wait()")
started = TetheredProcess(Launch(command, {}, "1"), "worker-0", Path(sys.argv[1]), None)
print(started.pid, flush=True)
if sys.argv[2] == "wait":
    threading.Event().wait()
"""


def tethered(command: Sequence[str], log: Path, cores: Sequence[int] | None = None) -> TetheredProcess:
    return TetheredProcess(Launch(command, {}, "1"), "worker-0", log, cores)


def pid_of(started: TetheredProcess) -> int:
    assert started.pid is not None
    return started.pid


def start_parent(log: Path, then: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log), then], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def test_it_dies_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent, child = start_parent(tmp_path / "log", "wait")
    eventually(lambda: SLEEP in " ".join(child.cmdline()))
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def test_it_dies_when_its_parent_ends_by_itself(tmp_path: Path) -> None:
    parent, child = start_parent(tmp_path / "log", "end")
    parent.wait()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def test_it_does_not_start_for_a_parent_that_is_gone(tmp_path: Path) -> None:
    witness = tmp_path / "started"
    command = [sys.executable, "-c", f"open({str(witness)!r}, 'w')"]
    # a process that has exited and been waited for is nobody's parent
    gone = subprocess.Popen(["true"])
    gone.wait()
    ended = subprocess.run(
        [sys.executable, "-I", "-S", str(TETHER), str(gone.pid), "-", *command], capture_output=True, text=True
    )
    assert ended.returncode == 127
    assert "has ended" in ended.stderr
    assert not witness.exists()


def test_a_ctrl_c_in_the_terminal_does_not_reach_it(tmp_path: Path) -> None:
    started = tethered((sys.executable, "-S", "-c", SLEEP), tmp_path / "log")
    try:
        assert os.getsid(pid_of(started)) == started.pid
        assert os.getpgid(pid_of(started)) != os.getpgid(0)
    finally:
        started.kill()
        started.wait(60)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="takes two cores to tell")
def test_it_runs_on_the_cores_it_is_given(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    command = (sys.executable, "-S", "-c", SLEEP)
    started = tethered(command, tmp_path / "log", [core])
    try:
        eventually(lambda: os.sched_getaffinity(pid_of(started)) == {core})
    finally:
        started.kill()
        started.wait(60)


def test_a_command_that_does_not_exist_says_so_in_the_log(tmp_path: Path) -> None:
    started = tethered(("/nowhere/at-all",), tmp_path / "log")
    assert started.wait(60) == 127
    assert "/nowhere/at-all: No such file" in (tmp_path / "log").read_text()


def test_signals_other_than_kills_are_errors(tmp_path: Path) -> None:
    started = tethered(("/bin/true",), tmp_path / "log")
    started.wait(60)
    reasons = {code: str(started.exit_reason(code)) for code in (0, 1, -signal.SIGKILL, -signal.SIGSEGV)}
    assert reasons == {0: "Completed", 1: "Error", -9: "Killed", -11: "Error"}
