"""The manifests and commands in the documentation are accepted, and its programs run."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.core import TyperGroup
from typer.main import get_command

from documented_code import PAGES, ROOT, Block, blocks
from emberscale._cli import app
from emberscale_api.job import TrainingJob, parse_manifest
from emberscale_api.job.training_job import TrainingJobSpec
from emberscale_trainer.models.rehearsal import rehearse

SECTIONS = {field.alias for field in TrainingJobSpec.model_fields.values()}
DATA = {
    "format": "Parquet",
    "train": ["clicks.parquet"],
    "columns": {
        "label": "clicked",
        "dense": ["price", "age"],
        "categorical": ["user", "item", "country"],
        "lists": [{"name": "history", "maxLength": 50}],
    },
}
TRAINED_BY_STAND_INS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import emberscale_with_stand_ins
emberscale_with_stand_ins.replace_what_trains()
"""


def job_with(spec: dict[str, Any]) -> TrainingJob:
    document = {"apiVersion": "emberscale.io/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "documented"}}
    return parse_manifest({**document, "spec": {"data": DATA, "ps": {"replicas": 3}, **spec}}, source="documented")


@pytest.mark.parametrize("block", list(blocks("yaml")), ids=str)
def test_a_manifest_is_valid(block: Block) -> None:
    document = yaml.safe_load(block.text)
    if document.get("kind") == "TrainingJob":
        parse_manifest(document, source=str(block))
    elif document.keys() <= {"spec"}:
        job_with(document["spec"])
    elif document.keys() <= SECTIONS:
        job_with(document)
    else:
        chart = yaml.safe_load((ROOT / "charts" / "emberscale" / "values.yaml").read_text())
        assert unknown(document, chart) == []


def unknown(values: dict[str, Any], chart: dict[str, Any]) -> list[str]:
    """The values that a chart does not have."""
    found = [key for key in values if key not in chart]
    below = [key for key, value in values.items() if isinstance(value, dict) and key in chart]
    return found + [f"{key}.{name}" for key in below for name in unknown(values[key], chart[key])]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yields each command `emberscale` in the shell blocks, with its arguments."""
    for block in blocks("sh"):
        for number, line in enumerate(block.text.replace("\\\n", "").splitlines(), block.line):
            words = shlex.split(line, comments=True)
            if words[:1] == ["emberscale"]:
                yield f"{block.page.relative_to(ROOT)}:{number}", words[1:]


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the words name, and the words after its name. Raises KeyError where there is none."""
    command: Any = get_command(app)
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize(("place", "words"), [pytest.param(*one, id=one[0]) for one in commands()])
def test_a_command_is_accepted(place: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, arguments = command_of(words)
    command.make_context(place, arguments)


def mentions() -> Iterator[tuple[str, list[str]]]:
    """Yields each command `emberscale` in the text of a page."""
    for page in PAGES:
        text = re.sub("^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for found in re.findall(r"`emberscale\s([^`|]+)[^`]*`", text):
            yield f"{page.relative_to(ROOT)}: {found}", found.split()


@pytest.mark.parametrize(("place", "words"), [pytest.param(*one, id=one[0]) for one in mentions()])
def test_a_command_in_the_text_exists(place: str, words: list[str]) -> None:
    command, arguments = command_of(words)
    options = {option for parameter in command.params for option in parameter.opts}
    named = {word.partition("=")[0] for word in arguments if word.startswith("-")}
    assert named - options - {"--help"} == set()


def test_the_program_that_trains_runs(manifest: Path) -> None:
    (program,) = {block.text for block in blocks("python") if "emberscale.train(" in block.text}
    done = subprocess.run(
        [sys.executable, "-c", TRAINED_BY_STAND_INS + program],
        cwd=manifest.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0.78 runs/toy\n"


def test_a_model_of_ones_own_is_accepted_without_remarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (one for one in blocks("python") if "nn.Module" in one.text)
    (tmp_path / "documented_model.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    assert rehearse(job_with({"model": {"entrypoint": "documented_model:factory"}})) == []
