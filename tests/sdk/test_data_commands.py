import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from emberscale._commands.data import data_app
from emberscale_api.job import DataSpec
from emberscale_trainer.data.files import expand
from emberscale_trainer.data.formats import record_format


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
    assert "already exists" in result.stdout
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


def test_inspect_of_files_without_a_good_record_fails(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").touch()
    result = run("inspect", tmp_path / "empty.tsv")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {tmp_path}/empty.tsv: no records\n"
    (tmp_path / "day_0.tsv").write_text("x\t" * 39 + "x\n")
    result = run("inspect", tmp_path / "day_0.tsv", "--from", "criteo")
    assert result.exit_code == 2
    assert "1 malformed" in result.stdout
    assert "0.0%" not in result.stdout
    assert "all examined records are malformed" in result.stderr
    document = json.loads(run("inspect", tmp_path / "day_0.tsv", "--from", "criteo", "--output", "json").stdout)
    assert (document["bad_records"], document["dense"], document["categorical"]) == (1, [], [])


def test_convert_writes_what_the_manifest_snippet_says(data: Path, tmp_path: Path) -> None:
    result = run("convert", data / "evaluation.tsv", tmp_path / "out.parquet", "--output", "json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [file["records"] for file in document["files"]] == [400]
    snippet = DataSpec.model_validate(document["data"])
    (file,) = expand(snippet.train)
    (block,) = record_format(snippet).index_file(file, 0, 1000)
    assert block.records == 400


def test_convert_of_several_files_fills_a_folder(data: Path, tmp_path: Path) -> None:
    result = run("convert", f"{data}/train-*.tsv", tmp_path / "csv", "--format", "csv", "--compression", "zstd")
    assert result.exit_code == 0, result.stderr
    names = ["train-00000.csv.zst", "train-00001.csv.zst"]
    assert sorted(path.name for path in (tmp_path / "csv").iterdir()) == names
    assert "denseTransform: Log1p" in result.stdout
    again = run("convert", f"{data}/train-*.tsv", tmp_path / "csv", "--format", "csv", "--compression", "zstd")
    assert (again.exit_code, "already exists; --overwrite replaces it" in again.stderr) == (2, True)
    over = ["--format", "csv", "--compression", "zstd", "--overwrite"]
    assert run("convert", f"{data}/train-*.tsv", tmp_path / "csv", *over).exit_code == 0
    inspected = run("inspect", f"{tmp_path}/csv/*.csv.zst", "--output", "json")
    assert json.loads(inspected.stdout)["records"] == 1600


def test_columns_are_named_where_nothing_says_what_they_mean(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("clicked,price,item\n1,0.5,x\n")
    result = run("inspect", tmp_path / "a.csv")
    assert result.exit_code == 2
    assert "a.csv: describe its columns" in result.stderr
    assert "it has clicked, price, item" in result.stderr
    result = run("inspect", tmp_path / "a.csv", "--label", "clicked", "--dense", "price", "--list", "item:5")
    assert result.exit_code == 0
    assert "Examined all 1 records: 0 malformed, 100.00% positive" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{data}/evaluation.tsv"], "give at least two paths"),
        (["{data}/evaluation.tsv", "{tmp}/out"], "out: choose the format with --format: criteo, parquet, csv"),
        (["{data}/evaluation.tsv", "{data}/evaluation.tsv"], "is one of the files to read"),
        (["{data}/no.tsv", "{tmp}/a.csv"], "no.tsv: is no file"),
        (
            ["{data}/evaluation.tsv", "{tmp}/a.csv", "--compression", "snappy"],
            "snappy: CSV can have none",
        ),
        (["{data}/evaluation.tsv", "{tmp}/a.csv", "--label", "y"], "are for Parquet and CSV"),
        (["{data}/evaluation.tsv", "{tmp}/a.csv", "--from", "csv", "--label", "y", "--list", "h:x"], "--list h:x"),
        (["{data}/evaluation.tsv", "{tmp}/a.csv", "--from", "csv", "--delimiter", "ab"], "--delimiter"),
        (["{data}/evaluation.tsv", "{tmp}/a.csv", "--from", "csv", "--label", "y"], "name at least one column"),
        (
            ["{data}/evaluation.tsv", "{tmp}/a.tsv", "--from", "csv", "--label", "y", "--categorical", "u"],
            "CriteoTSV has",
        ),
        (["{data}/evaluation.tsv", "nosuch://b/a.csv"], "nosuch://b/a.csv: no file system for it"),
        (["{data}/evaluation.tsv", "{tmp}/a.csv", "--manifest", "{tmp}/no.yaml"], "no.yaml: cannot be read"),
    ],
)
def test_convert_refuses_bad_input_in_one_line(data: Path, tmp_path: Path, arguments: list[str], problem: str) -> None:
    result = run("convert", *(argument.format(data=data, tmp=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert problem in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_convert_writes_to_any_file_system_and_replaces_nothing_unasked(data: Path) -> None:
    out = f"memory://{data.parent.name}/criteo/"
    first = run("convert", f"{data}/evaluation.tsv", out, "--format", "parquet", "--output", "json")
    assert first.exit_code == 0, first.stderr
    (written,) = json.loads(first.stdout)["files"]
    assert written["path"] == f"{out}evaluation.parquet"
    inspected = json.loads(run("inspect", written["path"], "--output", "json").stdout)
    assert inspected["records"] == written["records"] > 0
    assert inspected["files"][0]["bytes"] == written["bytes"]
    assert "already exists" in run("convert", f"{data}/evaluation.tsv", out, "--format", "parquet").stderr
    again = run("convert", f"{data}/evaluation.tsv", out, "--format", "parquet", "--overwrite")
    assert again.exit_code == 0


@pytest.mark.parametrize("command", ["synth", "inspect", "convert"])
def test_help_shows_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"emberscale data {command} " in result.stdout


def test_inspect_shows_texts_and_not_their_hashes(tmp_path: Path) -> None:
    rows = [("Anna", "red|blue"), ("Anna", "red"), ("7", "12"), ("[bold]", "")] * 3
    (tmp_path / "a.csv").write_text("y,who,tags\n" + "".join(f"1,{who},{tags}\n" for who, tags in rows))
    table = {
        "y": [1] * len(rows),
        "who": [who for who, _ in rows],
        "tags": [tags.split("|") if tags else None for _, tags in rows],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    for name in ("a.csv", "a.parquet"):
        options = [str(tmp_path / name), "--label", "y", "--categorical", "who", "--list", "tags"]
        printed = CliRunner().invoke(data_app, ["inspect", *options], env={"COLUMNS": "200"}).stdout
        assert "'Anna' 50.0%" in printed
        assert "'red' 50.0%" in printed
        assert "'[bold]' 25.0%" in printed
        told = json.loads(CliRunner().invoke(data_app, ["inspect", *options, "--output", "json"]).stdout)
        frequent = {one["text"]: one["share"] for one in told["categorical"][0]["top"]}
        assert frequent["Anna"] == 0.5
        assert ("7" in frequent) == (name == "a.parquet"), "in CSV an integer is its own id"


def test_inspect_hints_at_whole_numbers_that_are_written_as_decimals(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y,u,v\n" + "1,12.0,3.5\n0,13.0,7\n" * 3)
    options = [str(tmp_path / "a.csv"), "--label", "y", "--categorical", "u", "--categorical", "v"]
    printed = CliRunner().invoke(data_app, ["inspect", *options]).stdout
    assert "u: '12.0' is not the id '12'" in printed
    assert "v: " not in printed
