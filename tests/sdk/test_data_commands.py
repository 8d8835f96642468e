import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from emberscale.commands.data import data_app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("commands") / "criteo"
    result = run("synth", out, "--rows", 2000, "--seed", 3, "--parts", 2, "--evaluation-fraction", 0.2)
    assert result.exit_code == 0, result.output
    return out


def test_synth_writes_the_rows_asked_for_and_prints_the_teachers_auc(data: Path) -> None:
    lines = {path.name: path.read_bytes().count(b"\n") for path in data.glob("*.tsv")}
    assert lines == {"train-00000.tsv": 800, "train-00001.tsv": 800, "evaluation.tsv": 400}


def test_synth_does_nothing_the_second_time(data: Path) -> None:
    result = run("synth", data, "--rows", 2000, "--seed", 3, "--parts", 2, "--evaluation-fraction", 0.2)
    assert result.exit_code == 0
    assert "is there already" in result.stdout
    metadata = json.loads((data / "metadata.json").read_text())
    assert f"{metadata['splits']['train']['teacher_auc']:.4f}" in result.stdout


def test_synth_prints_one_json_object_on_request(tmp_path: Path) -> None:
    result = run("synth", tmp_path / "out", "--rows", 100, "--output", "json")
    document = json.loads(result.stdout)
    assert document.pop("path") == str(tmp_path / "out")
    assert document.pop("written") is True
    assert document == json.loads((tmp_path / "out/metadata.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{data}", "--rows", 7], "criteo: holds another data set (rows 2000 instead of 7"),
        (["{data}/a/b"], "b: the folder {data}/a does not exist; make it first"),
        (["/proc/out"], "/proc/out: cannot be written"),
        (["{data}/x", "--rows", 0], "rows must be at least 1 (got 0)"),
        (["{data}/x", "--seed", -1], "seed must be at least 0 and below 2**63 (got -1)"),
        (["{data}/x", "--parts", 0], "parts must be from 1"),
        (["{data}/x", "--evaluation-fraction", 1.5], "evaluation fraction must be at least 0 and below 1 (got 1.5)"),
    ],
)
def test_synth_refuses_bad_input_in_one_line(data: Path, arguments: list[object], problem: str) -> None:
    result = run("synth", *(str(argument).format(data=data) for argument in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert problem.format(data=data) in result.stderr
    assert result.stderr.count("\n") == 1


def test_inspect_shows_records_files_and_columns(data: Path) -> None:
    result = run("inspect", f"{data}/*.tsv")
    assert result.exit_code == 0
    assert "Examined all 2,000 records: 0 malformed" in result.stdout
    assert "C26" in result.stdout


def test_inspect_names_malformed_lines(tmp_path: Path) -> None:
    (tmp_path / "day_0.tsv").write_bytes(b"1" + b"\t" * 39 + b"\n" + b"7" + b"\t" * 39 + b"\n")
    result = run("inspect", tmp_path / "day_0.tsv")
    assert result.exit_code == 0
    assert f"{tmp_path}/day_0.tsv:2: the label '7' is neither 0 nor 1" in result.stdout.replace("\n", "")


def test_inspect_prints_one_json_object_on_request(data: Path) -> None:
    document = json.loads(run("inspect", f"{data}/*.tsv", "--max-records", 500, "--output", "json").stdout)
    assert (document["records"], len(document["files"])) == (2000, 3)
    assert 0 < document["examined"] <= 500
    assert [column["name"] for column in document["dense"]] == [f"I{number}" for number in range(1, 14)]
    assert [column["name"] for column in document["categorical"]] == [f"C{number}" for number in range(1, 27)]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{data}/*.csv"], "*.csv: matches no file; {data} holds evaluation.tsv, metadata.json"),
        (["{data}/*.tsv", "--max-records", 0], "--max-records must be at least 1 (got 0)"),
    ],
)
def test_inspect_refuses_bad_input_in_one_line(data: Path, arguments: list[object], problem: str) -> None:
    result = run("inspect", *(str(argument).format(data=data) for argument in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert problem.format(data=data) in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["synth", "inspect"])
def test_help_shows_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"emberscale data {command} " in result.stdout
