"""`emberscale data skew`, as a user calls it."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from emberscale._commands.data import data_app

PNG = b"\x89PNG"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("skew") / "criteo"
    result = run("synth", out, "--rows", 8000, "--seed", 3, "--parts", 2, "--evaluation-fraction", 0)
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture
def job(data: Path, tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    document = {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "toy"},
        "spec": {
            "data": {"train": [f"{data}/train-*.tsv"]},
            "model": {"architecture": "WideAndDeep", "embeddings": {"dimension": 8}},
            "training": {"batchSize": 128},
            "ps": {"replicas": 2},
            "worker": {"replicas": 3, "resources": {"limits": {"cpu": 1, "memory": "1Gi"}}},
        },
    }
    file.write_text(yaml.safe_dump(document))
    return file


def test_files_are_shown_in_tables_with_what_each_budget_is_good_for(data: Path) -> None:
    result = run("skew", f"{data}/*.tsv", "--budget", "64Ki,1Mi", "--budget", "1Gi", "--sample", 0.2)
    assert result.exit_code == 0, result.stderr
    assert "of 8,000 records (20.0%)" in result.stdout
    assert "C26" in result.stdout
    for quantity in ("65536", "1Mi", "1024Mi"):
        assert quantity in result.stdout
    assert "all rows that the sample saw are hot" in result.stdout
    assert "emberscale profile" in result.stdout  # no times without a measurement, only a hint how to get them


def test_a_manifest_says_files_tables_batches_and_workers(job: Path) -> None:
    document = json.loads(run("skew", job, "--budget", "1Mi", "-o", "json").stdout)
    assert (document["records"], document["batch_size"], document["workers"]) == (8000, 128, 3)
    # key, 8 weights, accumulator and counter; and the same with one weight for the wide part
    assert {table["row_bytes"] for table in document["tables"]} == {48 + 24}
    wider = json.loads(
        run("skew", job, "--budget", "1Mi", "--set", "spec.model.embeddings.dimension=32", "-o", "json").stdout
    )
    assert {table["row_bytes"] for table in wider["tables"]} == {144 + 24}


def test_the_same_seed_finds_the_same(data: Path) -> None:
    def shares(seed: int) -> list[float]:
        document = json.loads(run("skew", f"{data}/*.tsv", "--seed", seed, "-o", "json").stdout)
        return [point["hot_share"] for point in document["budgets"]]

    assert shares(1) == shares(1) != shares(2)


def test_exact_compares_and_the_picture_is_drawn(data: Path, tmp_path: Path) -> None:
    picture = tmp_path / "skew.png"
    result = run("skew", f"{data}/*.tsv", "--exact", "--budget", "256Ki,64Mi", "--plot", picture)
    assert result.exit_code == 0, result.stderr
    assert "full pass" in result.stdout
    assert "100.00%" in result.stdout  # all rows of all records fit into 64Mi
    assert picture.read_bytes().startswith(PNG)


def test_a_profile_bounds_the_gain(data: Path, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"samples_per_second": 100.0, "roof": {"samples_per_second": 400.0}}))
    arguments = ("skew", f"{data}/*.tsv", "--budget", "1Mi", "--profile", profile)
    (point,) = json.loads(run(*arguments, "-o", "json").stdout)["budgets"]
    assert point["largest_speedup"] == pytest.approx(1 / (1 - 0.75 * point["hot_share"]))
    assert "at most" in run(*arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{data}/*.csv"], "*.csv: matches no file"),
        (["{data}/*.tsv", "--budget", "1 GB"], "--budget: '1 GB' is not a Kubernetes quantity"),
        (["{data}/*.tsv", "--budget", "0"], "--budget 0: must be above 0"),
        (["{data}/*.tsv", "--budget", ","], "--budget: name at least one"),
        (["{data}/*.tsv", "--sample", "0.7"], "--sample must be above 0 and at most 0.5 (got 0.7)"),
        (["{data}/*.tsv", "--set", "spec.training.batchSize=1"], "--set changes a manifest: name one"),
        (["{job}", "--dimension", "8"], "--dimension and --optimizer are for data files without a manifest"),
        (["{job}", "--from", "csv"], "the manifest describes the files"),
        (["{job}", "--manifest", "{job}"], "is a manifest: omit --manifest"),
        (["{job}", "--set", "spec.data.train=[nowhere.tsv]"], "spec.data.train.0: nowhere.tsv: no such file"),
        (["{job}", "--set", "spec.data.format=Parquet"], "spec.data: columns is required"),
        (["{data}/*.tsv", "--profile", "{job}"], "is not what `emberscale profile JOB --output json` prints"),
        (["{data}/*.tsv", "--profile", "none.json"], "--profile none.json: cannot be read"),
        (["{data}/*.tsv", "--plot", "/proc/x.png"], "--plot /proc/x.png: cannot be written"),
        (["{data}/*.json"], "metadata.json"),
    ],
)
def test_bad_input_is_refused_with_what_is_wrong(data: Path, job: Path, arguments: list[str], problem: str) -> None:
    result = run("skew", *(argument.format(data=data, job=job) for argument in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert problem in result.stderr


def test_one_record_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y,a\n1,2\n")
    result = run("skew", tmp_path / "a.csv", "--label", "y", "--categorical", "a", "--exact")
    assert result.exit_code == 0, result.stderr
    assert "Counted 1 of 1 records" in result.stdout
    assert "too few to hold some back" in result.stdout.replace("\n", " ")


def test_lists_that_are_always_empty_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y,a,h\n" + "1,2,\n0,3,\n" * 500)
    columns = ("--label", "y", "--categorical", "a", "--list", "h")
    result = run("skew", tmp_path / "a.csv", *columns, "--exact", "--plot", tmp_path / "a.png", "-o", "json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert [table["rows"] for table in document["tables"]] == [2, 0]
    assert all(point["hot_share"] == 1.0 for point in document["budgets"])


def test_a_budget_without_room_for_a_row_makes_nothing_hot(data: Path) -> None:
    (point,) = json.loads(run("skew", f"{data}/*.tsv", "--budget", "1", "-o", "json").stdout)["budgets"]
    assert (point["rows"], point["bytes"], point["access_share"], point["hot_share"]) == (0, 0, 0.0, 0.0)
    assert "none is" in run("skew", f"{data}/*.tsv", "--budget", "1").stdout


def test_malformed_records_are_named_by_their_line(tmp_path: Path) -> None:
    lines = ["1,2"] * 5 + ["x,2"]
    (tmp_path / "a.csv").write_text("y,a\n" + "\n".join(lines * 100) + "\n")
    result = run("skew", tmp_path / "a.csv", "--label", "y", "--categorical", "a")
    assert result.exit_code == 0, result.stderr
    assert "malformed records were left out; the first:" in result.stdout
    assert "a.csv:" in result.stdout.replace("\n", "")


def test_remote_files_are_sampled(data: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/skew/train-00000.tsv", (data / "train-00000.tsv").read_bytes())
    result = run("skew", "memory://skew/train-*.tsv", "--budget", "1Mi")
    assert result.exit_code == 0, result.stderr
    assert "of 4,000 records" in result.stdout
