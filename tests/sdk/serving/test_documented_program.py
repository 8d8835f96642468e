"""The program in docs/serving.md, which reads files of every format as training does."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale_api.dataset import DataFile
from emberscale_api.job import TrainingJob, resolve_model
from emberscale_trainer.data.formats import record_format
from emberscale_trainer.data.records import Columns, empty_columns
from trained_run import KEYS, TrainedRun

DOCUMENT = Path(__file__).parents[3] / "docs" / "serving.md"
WITHOUT_EMBERSCALE = """
import runpy, sys
for package in ("emberscale", "emberscale_api", "emberscale_trainer", "emberscale_operator", "numba"):
    sys.modules[package] = None
runpy.run_path("predict.py", run_name="__main__")
"""
COLUMNS = {
    "label": "y",
    "dense": ["a", "b"],
    "categorical": ["user", "page"],
    "lists": [{"name": "seen", "maxLength": 2}],
    "denseTransforms": {"b": "Log1p"},
}
CSV = f"""y,a,b,user,page,seen
1,0.5,17,{KEYS[0]},/home,1|2|3
0, -2 ,-1,,"a ""quoted"", page",|x||y
1,true,,007,{2**64 - 2},
0,,1e2,{2**64},\u00e9,7|7|7
"""


def write_csv(folder: Path) -> dict[str, Any]:
    (folder / "data.csv").write_text(CSV, encoding="utf-8")
    return {"format": "CSV", "train": ["data.csv"], "columns": COLUMNS}


def write_csv_of_another_kind(folder: Path) -> dict[str, Any]:
    lines = CSV.replace(",", ";").replace("|", "/").splitlines()[1:]
    (folder / "data.csv").write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    numbered = {name: f"column_{number}" for number, name in enumerate(("y", "a", "b", "user", "page", "seen"), 1)}
    columns = {
        "label": numbered["y"],
        "dense": [numbered["a"], numbered["b"]],
        "categorical": [numbered["user"], numbered["page"]],
        "lists": [{"name": numbered["seen"], "maxLength": 1}],
        "denseTransform": "Log1p",
    }
    options = {"delimiter": ";", "header": False, "listSeparator": "/"}
    return {"format": "CSV", "train": ["data.csv"], "columns": columns, "csv": options}


def write_parquet(folder: Path) -> dict[str, Any]:
    table = pa.table(
        {
            "y": pa.array([True, False, True]),
            "a": pa.array([1.5, None, -3.0]),
            "b": pa.array([7, None, -1]),
            "user": pa.array([int(KEYS[0]), 5, None]),
            "page": pa.array(["", None, "7"]).dictionary_encode(),
            "seen": pa.array([["x", None, "y", "z"], None, []]),
            "more": pa.array(["not", "read", "at all"]),
        }
    )
    pq.write_table(table, folder / "data.parquet")
    return {"format": "Parquet", "train": ["data.parquet"], "columns": COLUMNS}


def write_criteo(folder: Path) -> dict[str, Any]:
    integers, ids = ["", "-3", "0", *["12345"] * 10], ["", "0", "ffffffff", *["1A"] * 23]
    (folder / "data.tsv").write_text("\t".join(["1", *integers, *ids]) + "\r\n" + "\t".join(["0"] * 40) + "\n")
    return {"format": "CriteoTSV", "train": ["data.tsv"]}


def read_as_training_does(job: TrainingJob, path: Path) -> Columns:
    reader = record_format(job.spec.data)
    file = DataFile(uri=str(path), bytes=path.stat().st_size)
    (block,) = reader.index_file(file, 0, 1000)
    room = empty_columns(block.records, reader.columns)
    good, bad = reader.read_block(file, block).read(np.arange(block.records), room)
    assert good, bad
    assert bad == []
    return room


def predictions(served: Path, job: TrainingJob, columns: Columns) -> list[float]:
    model = torch.export.load(served / "model.pt2").module()
    resolved = resolve_model(job.spec)
    tables = {table.name: load_file(served / f"table-{table.number}.safetensors") for table in resolved.tables}
    arguments: list[Any] = [torch.from_numpy(columns.dense), torch.from_numpy(columns.ids), tables]
    if columns.lists:
        lists: Mapping[str, Any] = {
            column.name: (torch.from_numpy(room.lists().values), torch.from_numpy(room.lists().offsets))
            for column, room in zip(resolved.columns.lists, columns.lists, strict=True)
        }
        arguments.append(lists)
    probabilities: list[float] = torch.sigmoid(model(*arguments)).tolist()
    return probabilities


@pytest.mark.parametrize("write", [write_csv, write_csv_of_another_kind, write_parquet, write_criteo])
def test_the_documented_program_predicts_from_files_as_training_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write(tmp_path)
    run = TrainedRun(tmp_path / "run", data, architecture="DCNv2")
    run.checkpoint(1)
    exported = CliRunner().invoke(app, ["export", "run", "served"])
    assert exported.exit_code == 0, exported.stderr
    (script,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    Path("predict.py").write_text(script, encoding="utf-8")
    (file,) = data["train"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EMBERSCALE, "served", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "non-contiguous" not in done.stderr
    expected = predictions(Path("served"), run.job, read_as_training_does(run.job, tmp_path / file))
    assert [float(line) for line in done.stdout.split()] == pytest.approx(expected, abs=1e-6)
    assert len({round(one, 6) for one in expected}) == len(expected), "each record has a prediction of its own"
