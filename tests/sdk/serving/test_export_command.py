"""`emberscale export`, on folders that a job left."""

import json
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

from emberscale._cli import app
from emberscale._serving.export import export_checkpoint
from emberscale_api.errors import InvalidError
from trained_run import KEYS, TrainedRun

UNTRACEABLE = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense, embeddings):
        total = sum(vectors.sum(dim=1) for vectors in embeddings.values())
        return total + self.bias if total.sum() > 0 else self.bias - total

def factory(features):
    return Model()
"""


@pytest.fixture
def trained(tmp_path: Path) -> TrainedRun:
    return TrainedRun(tmp_path / "run")


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Result]:
    def invoke(run: object, *options: str) -> Result:
        return CliRunner().invoke(app, ["export", str(run), str(tmp_path / "out"), *options])

    return invoke


Export = Callable[..., Result]


def test_rows_of_all_servers_are_there_in_the_order_of_their_keys(
    trained: TrainedRun, export: Export, tmp_path: Path
) -> None:
    trained.checkpoint(1)
    result = export(trained.root, "--output", "json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["rows"] == len(KEYS)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert [(table["name"], table["rows"]) for table in about["tables"]] == [("user", len(KEYS)), ("item/id", 0)]
    table = load_file(tmp_path / "out" / about["tables"][0]["file"])
    assert np.array_equal(table["keys"], np.sort(KEYS))
    assert table["weights"].shape == (len(KEYS), 4)
    assert (tmp_path / "out" / "model.pt2").exists()
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert len(modes) == 1, "whoever may read one file may read all"


def test_the_model_is_traced_once_all_rows_are_read(trained: TrainedRun, tmp_path: Path) -> None:
    told: list[str] = []
    export_checkpoint(str(trained.checkpoint(1)), tmp_path / "out", lambda size: told.append("bytes"), told.append)
    assert [step for step, _ in groupby(told)] == ["bytes", "tracing the model"]


def test_a_program_may_name_folders_by_text_and_loses_no_files_of_others(trained: TrainedRun, tmp_path: Path) -> None:
    checkpoint, out = trained.checkpoint(1), tmp_path / "out"
    assert export_checkpoint(Path(checkpoint), str(out)) == export_checkpoint(str(checkpoint), out)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InvalidError, match="holds files that are no exported model"):
        export_checkpoint(str(checkpoint), tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_taken(
    trained: TrainedRun, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[object] = []

    def refused(model: object, resolved: object) -> None:
        traces.append(model)
        raise ValueError("not in this test")

    monkeypatch.setattr("emberscale._serving.export.exported_program", refused)
    trained.checkpoint(1)
    rows = trained.checkpoint(2) / "ps-1" / "table-0-0.rows"
    rows.write_bytes(rows.read_bytes()[:-1] + b"?")
    result = export(trained.root, "--output", "json")
    assert json.loads(result.stdout)["checkpoint"] == "00000001"
    assert "ps-1/table-0-0.rows was altered" in result.stderr
    assert len(traces) == 1, "a damaged checkpoint is not worth the time"


def test_the_model_folder_does_when_the_checkpoints_are_gone(trained: TrainedRun, export: Export) -> None:
    trained.checkpoint(3).rename(trained.root / "model")
    assert json.loads(export(trained.root, "--output", "json").stdout)["checkpoint"] == "00000003"


def test_the_place_of_checkpoints_can_be_named_instead_of_a_run(trained: TrainedRun, export: Export) -> None:
    trained.checkpoint(1)
    checkpoints = shutil.move(trained.root / "checkpoints", trained.root.with_name("bucket"))
    result = export(f"file://{checkpoints}", "--output", "json")
    assert json.loads(result.stdout)["checkpoint"] == "00000001", result.stderr


def test_one_checkpoint_can_be_named_and_no_other_is_taken_instead(trained: TrainedRun, export: Export) -> None:
    first = trained.checkpoint(1)
    trained.checkpoint(2)
    result = export(first, "--output", "json")
    assert json.loads(result.stdout)["checkpoint"] == "00000001", result.stderr
    (first / "ps-1" / "table-0-0.rows").unlink()
    for place, told in ((first, "table-0-0.rows: is missing"), (first.with_name("00000007"), "is no checkpoint")):
        result = export(place, "--overwrite")
        assert (result.exit_code, result.stdout) == (2, "")
        assert told in result.stderr


def test_an_earlier_export_is_replaced_only_if_asked(trained: TrainedRun, export: Export) -> None:
    for cut, options, code in ((1, (), 0), (2, (), 2), (2, ("--overwrite",), 0)):
        trained.checkpoint(cut)
        result = export(trained.root, *options)
        assert result.exit_code == code, result.stderr
        assert ("--overwrite" in result.stderr) == (code == 2)


def test_a_model_that_branches_on_values_is_exported_without_a_program(
    tmp_path: Path, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "branching.py").write_text(UNTRACEABLE)
    run = TrainedRun(tmp_path / "run", entrypoint="branching:factory")
    run.checkpoint(1)
    result = export(run.root)
    assert result.exit_code == 0
    assert "torch.export cannot trace the model" in result.stderr
    assert not (tmp_path / "out" / "model.pt2").exists()
    assert load_file(tmp_path / "out" / "dense.safetensors").keys() == {"bias"}


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda run, out: None, "no complete checkpoint"),
        (lambda run, out: shutil.rmtree(run), "neither the folder of a run nor one of checkpoints"),
        (lambda run, out: out.write_text(""), "is not a folder"),
        (lambda run, out: (out.mkdir(), (out / "thesis.tex").touch()), "holds files that are no exported model"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    trained: TrainedRun, export: Export, tmp_path: Path, make: Callable[[Path, Path], None], complaint: str
) -> None:
    make(trained.root, tmp_path / "out")
    result = export(trained.root)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert len(result.stderr.splitlines()) == 1
