"""Ctrl-C before the command has begun."""

import os
import subprocess
import sys

import pytest

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
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ, timeout=120)
    assert (done.returncode, done.stderr) == (130, "interrupted: nothing was started\n")


def test_the_package_alone_imports_next_to_nothing() -> None:
    """What it imports comes before the command can listen to signals."""
    code = "import sys; import emberscale; print(*sorted({'pydantic', 'numpy', 'typer', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "\n"
