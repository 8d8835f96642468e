"""Ctrl-C before the command has begun, and what processes import before they begin."""

import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from emberscale_api.start import without_collection

_ON_USE = {"alembic", "kubernetes", "matplotlib", "pandas", "pyarrow", "pymoo", "sqlalchemy", "torch._dynamo"}
_KERNELS = {"numba", "scipy", "torch"}
_ON_CALL = {"asyncio", "grpc", "numpy", "psutil", "rich", "ssl", "structlog", "yaml"}
_COMMAND = "from emberscale._start import main as command; sys.argv = {arguments!r}"
_INTERRUPTED_AT = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from emberscale._start import main
sys.argv = ["emberscale", "run", "job.yaml"]
main()
"""


@pytest.mark.parametrize("module", ["emberscale._cli", "emberscale_api.job", "emberscale._commands.run"])
def test_ctrl_c_during_the_imports_ends_with_one_line(module: str) -> None:
    command = [sys.executable, "-c", _INTERRUPTED_AT.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=600)
    assert (done.returncode, done.stderr) == (130, "interrupted: nothing was started\n")


def test_the_package_alone_imports_next_to_nothing() -> None:
    """The command cannot handle signals until this import is done."""
    code = "import sys; import emberscale; print(*sorted({'pydantic', 'numpy', 'typer', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "\n"


@pytest.mark.parametrize(
    ("begin", "absent"),
    [
        (_COMMAND.format(arguments=["emberscale", "--help"]), _ON_USE | _KERNELS | {"emberscale_brain"}),
        (_COMMAND.format(arguments=["emberscale", "run", "job.yaml"]), _ON_USE | _KERNELS | {"emberscale_brain"}),
        (_COMMAND.format(arguments=["emberscale", "scale", "runs/ctr", "ps=3"]), _ON_USE | _KERNELS | _ON_CALL),
        ("from emberscale_jobmaster.__main__ import main as command", _ON_USE | _KERNELS),
        ("from emberscale_trainer.fork_server import main as command", _ON_USE),
    ],
    ids=["help", "run", "scale", "master", "fork server"],
)
def test_a_process_imports_what_is_slow_only_when_it_is_used(begin: str, absent: set[str], tmp_path: Path) -> None:
    """Each command ends early: it finds no manifest, no run, no environment of a job, or no request for a fork."""
    program = f"""
import atexit, sys
{begin}
atexit.register(lambda: print("imported", *sorted({absent!r} & set(sys.modules))))
command()
"""
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            stdin=theirs.fileno(),
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.stdout.splitlines()[-1] == "imported", done.stderr


def test_commands_without_a_log_import_nothing_that_logs() -> None:
    """Their standard output would get the log, as they do not configure it."""
    code = "import sys; import emberscale._client, emberscale._commands.cluster; print('structlog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "False\n"


def test_imports_are_not_collected_and_other_garbage_is() -> None:
    frozen = gc.get_freeze_count()
    try:
        with without_collection():
            collected = gc.isenabled()
        assert not collected
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_garbage_is_collected_after_an_import_that_failed() -> None:
    try:
        with pytest.raises(ImportError), without_collection():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("start", ["serve_rows", "work"])
def test_a_process_of_a_pod_says_what_its_environment_lacks(start: str) -> None:
    command = [sys.executable, "-c", f"from emberscale_trainer.start import {start}; {start}()"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("EMBERSCALE_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=outside, timeout=600)
    assert (done.returncode, "EMBERSCALE_" in done.stderr) == (2, True), done.stderr
