"""Training from Python: real processes, a real Redis; only the training is simulated."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import emberscale
from emberscale import ManifestError
from emberscale_api.errors import InvalidError
from eventually import eventually

HERE = Path(__file__).parent
PROGRAM = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import emberscale_with_stand_ins
emberscale_with_stand_ins.replace_what_trains()

import emberscale, json
try:
    for named in sys.argv[1:]:
        name, seed = named.split(":")
        training = emberscale.train(
            {{"data": {{"train": ["train.tsv"]}}, "ps": {{"replicas": 1}}, "worker": {{"replicas": 1}},
             "training": {{"seed": int(seed)}}}}, name=name or None
        )
        print(json.dumps(["trained", str(training.folder), training.summary.auc, repr(training)]))
except KeyboardInterrupt as interrupted:
    print(json.dumps(["interrupted", str(interrupted)]))
except emberscale.TrainingFailedError as failed:
    print(json.dumps(["failed", str(failed), failed.training.summary.samples]))
"""


def started(folder: Path, *named: str, **environment: str) -> "subprocess.Popen[str]":
    """Starts a program that trains one job for each `name:seed`; the seed is in the spec."""
    (folder / "train.tsv").write_text("1\n")
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *named],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_few_lines_train_and_give_the_summary_and_without_a_name_another_spec_has_another_folder(
    tmp_path: Path,
) -> None:
    out, err = started(tmp_path, "mine:0", ":0", ":0", ":1").communicate(timeout=600)
    mine, *others = map(json.loads, out.splitlines())
    shown = "<Training mine: Complete, 100,000 samples, AUC 0.7800, in runs/mine>"
    assert mine == ["trained", "runs/mine", 0.78, shown], err
    assert "Complete" in err
    assert (tmp_path / "runs/mine/summary.json").exists()

    assert [one[0] for one in others] == ["trained"] * 3, err
    first, again, another = (one[1] for one in others)
    assert first == again != another
    assert {f"runs/{path.name}" for path in (tmp_path / "runs").iterdir()} == {"runs/mine", first, another}


def test_an_interrupt_saves_the_state_and_is_raised(tmp_path: Path) -> None:
    process = started(tmp_path, "mine:0", STAND_IN_SAMPLES="1000000000")
    metrics = tmp_path / "runs/mine/metrics.csv"
    eventually(lambda: metrics.exists() and ",Training," in metrics.read_text())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert json.loads(out) == ["interrupted", "the run in runs/mine is Suspended: resume=True continues it"], err


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_what_is_wrong_is_raised_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"spec\.trainin: unknown field"):
        emberscale.train({"data": {"train": ["x"]}, "trainin": {}})
    with pytest.raises(ManifestError, match="cannot be read"):
        emberscale.train("nowhere.yaml")
    with pytest.raises(InvalidError, match=r"spec.data.train.0: x: no such file"):
        emberscale.train({"data": {"train": ["x"]}})
    with pytest.raises(ManifestError) as refused:
        emberscale.train("nowhere.yaml")
    assert len(refused.traceback) == 2, "the caller's line, and one of ours"
    with pytest.raises(InvalidError, match="contradict"):
        emberscale.train({"data": {"train": ["x"]}}, resume=True, overwrite=True)
    Path("y.tsv").write_text("\t".join(["0"] * 40) + "\n")
    with pytest.raises(InvalidError, match=r"^resume=True: .* holds no run; start one without resume=True$"):
        emberscale.train({"data": {"train": ["y.tsv"]}}, resume=True)
    with pytest.raises(InvalidError, match=r"^brain 'nobody': expected "):
        emberscale.train({"data": {"train": ["y.tsv"]}}, brain="nobody")
    with pytest.raises(InvalidError, match=r"^resume=True: a--resume/--workdir\.b holds no run"):
        emberscale.train({"data": {"train": ["y.tsv"]}}, workdir="a--resume/--workdir.b", resume=True)
    assert not (tmp_path / "runs").exists()
