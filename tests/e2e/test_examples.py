"""The examples do what they say."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from local_jobs import emberscale, emberscale_here

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"

# Whole jobs with real processes.
pytestmark = pytest.mark.timeout(1200)


def test_a_model_of_ones_own_trains_and_a_broken_one_does_not_start(tmp_path: Path) -> None:
    folder = tmp_path / "own-model"
    shutil.copytree(EXAMPLES / "own-model", folder)
    made = emberscale_here("data", "synth", str(folder / "data"), "--rows", "40000", "--seed", "3")
    assert made.returncode == 0, made.stderr
    smaller = ("--set", "spec.training.batchSize=256", "--set", "spec.worker.replicas=1")
    finished = emberscale("run", "job.yaml", "--output", "json", *smaller, cwd=folder)
    assert finished.returncode == 0, finished.stderr
    summary = json.loads(finished.stdout)
    assert summary["samples"] == 36_000
    assert summary["auc"] > 0.65

    module = folder / "model.py"
    module.write_text(module.read_text().replace(".squeeze(1)", ""))
    refused = emberscale("run", "job.yaml", "--workdir", "broken", cwd=folder)
    assert refused.returncode == 2
    assert "tensor of shape [4, 4]" in refused.stderr
    assert not (folder / "broken").exists()


def test_the_notebook_trains_on_lists_and_tables_that_differ(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "train.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in notebook["cells"] if cell["cell_type"] == "code")
    ending = """
import json
print(json.dumps(training.summary.as_document()))
"""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*cells, ending])], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["phase"] == "Complete"
    assert summary["samples"] == 2 * 27_000
    assert summary["auc"] > 0.65
    assert [evaluation["epoch"] for evaluation in summary["evaluations"]] == [1, 2]
    assert re.findall(r"^epoch (\d+): held-out AUC", done.stdout, re.MULTILINE) == ["1", "2"]
    assert set(summary["rows"]) == {"user", "item", "history", "user.wide", "item.wide", "history.wide"}
    assert summary["rows"]["history"] == summary["rows"]["history.wide"] > 100
    assert summary["truncated_records"] > 2_000
    assert 0 < summary["normalized_entropy"] < 1
    assert summary["calibration"] == pytest.approx(1, abs=0.3)
    assert (tmp_path / "runs/from-python/metrics.png").exists()
