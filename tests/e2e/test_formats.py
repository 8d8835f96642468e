"""A whole job over files of another format than CriteoTSV."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from emberscale._commands.data import data_app
from local_jobs import Job

# A whole job with real processes: each starts torch half a dozen times.
pytestmark = pytest.mark.timeout(1200)


def test_a_job_reads_compressed_files_forwards_and_every_record_once(
    make_job: Callable[..., Job], dataset: Path, tmp_path: Path
) -> None:
    snippets = {}
    for split, source in (("train", "train-00000.tsv"), ("evaluation", "evaluation.tsv")):
        target = tmp_path / f"{split}.csv.gz"
        converted = CliRunner().invoke(data_app, ["convert", str(dataset / source), str(target)])
        assert converted.exit_code == 0, converted.output
        snippets[split] = yaml.safe_load(converted.stdout.split("In the manifest:")[1])["data"]
    finished = make_job({"data": {**snippets["train"], "evaluation": snippets["evaluation"]["train"]}}).run()
    assert finished.summary["phase"] == "Complete", finished.stderr
    assert finished.summary["auc"] > 0.6
    audit = finished.job.audit()
    assert (audit["missing"], audit["repeated"], audit["contradictions"]) == (0, 0, [])
