"""`emberscale compare`, on folders of runs."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale._reports.comparison import differing_fields
from emberscale._run.folder import open_run
from emberscale._run.metrics import COLUMNS
from emberscale_api.job import load_manifest

EVALUATION = {"epoch": 0, "samples": 10, "auc": 0.7, "logloss": 0.5, "normalized_entropy": 0.9, "calibration": 1.0}
MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(manifest: Path, tmp_path: Path) -> MakeRun:
    """Makes the folder of a run that is Complete."""

    def make(name: str, overrides: tuple[str, ...] = (), ended: bool = True, **summary: Any) -> Path:
        root = tmp_path / name
        with open_run(root, load_manifest(manifest, overrides), resume=False, overwrite=False) as held:
            held.save()
        with (root / "metrics.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            for second in range(20):
                writer.writerow(
                    {"seconds": second, "phase": "Training", "samples": second * 1000, "loss": 0.5}.get(column, 1)
                    for column in COLUMNS
                )
        document = {
            "phase": "Complete",
            "samples": 20_000,
            "expected_samples": 20_000,
            "samples_per_second": 1000.0,
            "restarts": {"ps": 0, "worker": 1},
            "peak_memory_bytes": {"ps-0": 2**20, "worker-0": 2**20},
            "evaluations": [EVALUATION],
        }
        if ended:
            (root / "summary.json").write_text(json.dumps({**document, **summary}))
        return root

    return make


def compare(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "160"})
    return result.exit_code, result.stdout, result.stderr


def test_what_was_asked_and_what_came_out_is_told_where_it_differs(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("small"), make_run("fast", ("spec.worker.replicas=4",), samples_per_second=1500.0)]
    code, printed, errors = compare(*runs, "--plot", tmp_path / "both.png")
    assert code == 0, errors
    lines = printed.splitlines()
    (replicas,) = [line for line in lines if "spec." in line]
    assert replicas.replace("│", " ").split() == ["spec.worker.replicas", "2", "4"]
    (speed,) = [line for line in lines if "samples/s" in line]
    assert speed.replace("│", " ").split() == ["samples/s", "1,000", "1,500", "(+50.0%)"]
    height, width, _ = matplotlib.image.imread(tmp_path / "both.png").shape
    assert width > height > 500


def test_durations_are_told_as_manifests_have_them_and_to_programs_in_seconds(
    make_run: MakeRun, tmp_path: Path
) -> None:
    runs = [make_run("often", ("spec.checkpoint.interval=10s",)), make_run("seldom", ("spec.checkpoint.interval=60",))]
    arguments = [*runs, "--plot", tmp_path / "both.png"]
    (interval,) = [line for line in compare(*arguments)[1].splitlines() if "spec." in line]
    assert interval.replace("│", " ").split() == ["spec.checkpoint.interval", "10s", "60s"]
    document = json.loads(compare(*arguments, "--output", "json")[1])
    assert document["manifest"] == {"spec.checkpoint.interval": [10.0, 60.0]}


def test_a_run_of_another_version_can_be_compared(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("ours"), make_run("theirs")]
    record = json.loads((runs[1] / "run.json").read_text())
    record["manifest"]["spec"]["novelty"] = 7
    (runs[1] / "run.json").write_text(json.dumps(record))
    code, printed, errors = compare(*runs, "--plot", tmp_path / "both.png")
    assert code == 0, errors
    assert any(line.replace("│", " ").split() == ["spec.novelty", "-", "7"] for line in printed.splitlines())


def test_programs_get_the_same_as_one_object(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(f"run-{number}", auc=(7 + number) / 10) for number in range(3)]
    code, printed, errors = compare(*runs, "--plot", tmp_path / "all.png", "--output", "json")
    assert code == 0, errors
    document = json.loads(printed)
    assert [run["path"] for run in document["runs"]] == [str(run) for run in runs]
    assert document["manifest"] == {}
    assert document["figures"]["auc"] == [0.7, 0.8, 0.9]
    assert document["figures"]["restarts"] == [1, 1, 1]
    assert document["figures"]["peak_memory_bytes"] == [2**21] * 3


def test_a_run_without_training_rows_can_be_compared(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run("whole"), make_run("failed-early", evaluations=[], auc=None)]
    (runs[1] / "metrics.csv").unlink()
    code, _, errors = compare(*runs, "--plot", tmp_path / "both.png")
    assert code == 0, errors


def test_what_cannot_be_compared_is_said_in_one_line(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("run")
    for others, complaint in (
        ((), "at least two runs"),
        ((run,), "named twice"),
        ((make_run("running", ended=False),), "running: has no summary.json: the run has not ended"),
        ((tmp_path / "nowhere",), "nowhere: holds no run"),
    ):
        code, _, errors = compare(run, *others)
        assert code == 2
        assert complaint in errors
        assert len(errors.splitlines()) == 1


DOCUMENTS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | st.integers(0, 2), max_size=3),
)


@given(st.lists(DOCUMENTS, min_size=2, max_size=4))
def test_only_fields_that_differ_are_told(documents: list[dict[str, Any]]) -> None:
    def at(document: Any, path: str) -> Any:
        for key in path.split("."):
            document = document.get(key) if isinstance(document, dict) else None
        return None if isinstance(document, dict) else document

    for path, values in differing_fields(documents).items():
        assert values == [at(document, path) for document in documents]
        assert len(set(values)) > 1
    assert differing_fields([documents[0]] * 3) == {}


@pytest.mark.parametrize(
    ("picture", "told"), [("both.txt", "must end with .png, .svg or .pdf"), ("a.png", "is a folder")]
)
def test_a_picture_that_cannot_be_drawn_is_refused(make_run: MakeRun, tmp_path: Path, picture: str, told: str) -> None:
    (tmp_path / "a.png").mkdir()
    code, printed, errors = compare(make_run("a"), make_run("b"), "--plot", tmp_path / picture)
    assert (code, printed) == (2, "")
    assert errors.startswith(f"error: --plot {tmp_path / picture}: {told}")


@pytest.mark.parametrize("ending", ["svg", "pdf", "PNG"])
def test_the_ending_of_the_picture_chooses_its_format(make_run: MakeRun, tmp_path: Path, ending: str) -> None:
    picture = tmp_path / f"both.{ending}"
    code, _, errors = compare(make_run("a"), make_run("b"), "--plot", picture)
    assert code == 0, errors
    assert picture.read_bytes()[:5] == {"svg": b"<?xml", "pdf": b"%PDF-", "PNG": b"\x89PNG\r"}[ending]
