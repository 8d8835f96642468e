"""An exported model predicts without Emberscale, as docs/serving.md shows."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from emberscale_api.job.status import EVALUATION_BINS
from emberscale_jobmaster.statistics import auc
from emberscale_trainer.worker.statistics import add_to_histogram
from local_jobs import Finished, emberscale_here

# A whole job with real processes, though shared with other tests; exporting takes torch.export some seconds.
pytestmark = pytest.mark.timeout(1200)

DOCUMENT = Path(__file__).parents[2] / "docs" / "serving.md"
WITHOUT_EMBERSCALE = """
import runpy, sys
for package in ("emberscale", "emberscale_api", "emberscale_trainer", "emberscale_operator", "numba"):
    sys.modules[package] = None
runpy.run_path("predict.py", run_name="__main__")
"""


def test_the_documented_script_predicts_what_the_job_evaluated(
    trained: Finished, dataset: Path, tmp_path: Path
) -> None:
    exported = emberscale_here("export", str(trained.job.run_folder), str(tmp_path / "served"))
    assert exported.returncode == 0, exported.stderr
    (script,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "predict.py").write_text(script)
    served = subprocess.run(
        [sys.executable, "-c", WITHOUT_EMBERSCALE, "served", str(dataset / "evaluation.tsv")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert served.returncode == 0, served.stderr
    probabilities = np.array(served.stdout.split(), dtype=np.float64)
    labels = np.array([float(line[0]) for line in (dataset / "evaluation.tsv").read_text().splitlines()])
    counts = np.zeros((2, EVALUATION_BINS), dtype=np.int64)
    add_to_histogram(probabilities.astype(np.float32), labels.astype(np.float32), counts)
    negatives, positives = counts
    summary = trained.summary
    assert summary["measured_on"] == "evaluation"
    assert auc(positives, negatives) == pytest.approx(summary["auc"], abs=1e-6)
    logloss = -np.log(np.where(labels > 0, probabilities, 1 - probabilities)).mean()
    assert logloss == pytest.approx(summary["logloss"], abs=1e-6)
