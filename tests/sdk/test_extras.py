"""Each extra of the package installs enough for its purpose."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
_IMPORTED_AS = {
    "grpcio": "grpc",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "pyyaml": "yaml",
}
_BROUGHT_ALONG = {"numba": {"llvmlite"}}
_WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""


def modules_of(extra: str | None) -> set[str]:
    """Returns the top-level modules of the packages that an extra names, including those of nested extras."""
    found = set()
    for requirement in PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]:
        name, inner = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()  # type: ignore[union-attr]
        if name == "emberscale":
            found |= set().union(*(modules_of(each) for each in inner.split(",")))
        else:
            found |= {_IMPORTED_AS.get(name, name)} | _BROUGHT_ALONG.get(name, set())
    return found


def absent_with(*extras: str) -> set[str]:
    """Returns the modules that an installation with only these extras lacks, compared with a full one."""
    there = modules_of(None).union(*(modules_of(extra) for extra in extras))
    return modules_of("local") - there


def run_without(absent: set[str], program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _WITHOUT.format(absent=absent) + program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize(
    ("extras", "modules"),
    [
        ((), "emberscale_api.job"),
        (("client",), "emberscale._client"),
        (("operator",), "emberscale_operator.__main__"),
        (("jobmaster",), "emberscale_jobmaster.__main__"),
        (("brain",), "emberscale_brain.__main__"),
        (("trainer",), "emberscale_trainer.server.__main__, emberscale_trainer.worker.__main__"),
        (("local",), "emberscale._training"),
    ],
)
def test_a_component_needs_no_more_than_its_extra(extras: tuple[str, ...], modules: str) -> None:
    done = run_without(absent_with(*extras), f"import {modules}")
    assert done.returncode == 0, done.stderr


def test_a_client_gets_neither_torch_nor_what_the_operator_needs() -> None:
    assert {"torch", "numba", "kopf", "pymoo", "redis"} <= absent_with("client")
    assert "torch" in absent_with("operator", "brain")


def test_everything_public_can_be_imported_and_nothing_else_is_offered() -> None:
    done = run_without(set(), "import emberscale; [getattr(emberscale, name) for name in emberscale.__all__]")
    assert done.returncode == 0, done.stderr
    folder = Path(__file__).parents[2] / "sdk" / "emberscale"
    public = [path.name for path in folder.iterdir() if not path.name.startswith(("_", "py.typed"))]
    assert public == []


def test_a_client_follows_jobs_from_the_command_line_and_hears_what_training_needs() -> None:
    program = "from emberscale._cli import main; main()"
    absent = absent_with("client")
    assert "submit" in run_without(absent, program, "--help").stdout
    refused = run_without(absent, program, "run", "job.yaml", "--overwrite")
    assert refused.returncode == 2
    assert re.fullmatch(r"error: `emberscale run` needs \w+: pip install 'emberscale\[local\]'\n", refused.stderr)


@pytest.mark.parametrize(
    ("command", "extra"), [("run", "local"), ("simulate", "local"), ("data", "local"), ("status", "client")]
)
def test_a_command_that_lacks_a_package_names_the_extra_that_has_it(command: str, extra: str) -> None:
    """Whether the command needs the package as it is imported or later."""
    refused = run_without(absent_with(), "from emberscale._cli import main; main()", command, "name")
    needs = rf"error: `emberscale {command}` needs \w+: pip install 'emberscale\[{extra}\]'\n"
    assert (refused.returncode, bool(re.fullmatch(needs, refused.stderr))) == (2, True), refused.stderr


def test_a_command_imports_what_it_needs_and_not_what_others_need() -> None:
    program = "import sys; from emberscale._cli import import_command; import_command(['scale', 'job', 'worker=2'])"
    done = run_without(set(), f"{program}; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert "emberscale._commands.scale" in imported
    assert imported & absent_with() == set()
