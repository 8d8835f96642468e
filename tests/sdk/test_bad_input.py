"""Bad input gives a line that names the field, and exit code 2; nothing is started."""

import errno
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import structlog
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale_operator.local.folder import try_lock


def invoke(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.stdout == "" or result.exit_code == 0
    return result.exit_code, result.stderr.splitlines()


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", ["run", "validate", "explain"])
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("spec.trainin.epochs=1", ["spec.trainin", "unknown field", "allowed here", "training"]),
        ("spec.training.batchSize=many", ["spec.training.batchSize", "whole number"]),
        ("spec.worker={minReplicas: 4, maxReplicas: 2}", ["spec.worker", "minReplicas", "maxReplicas"]),
        ("spec.ps.replicas=0", ["spec.ps.replicas", "greater than or equal to 1"]),
        ("spec.training.epochs", ["--set", "dotted.path=value"]),
        ("spec.training.epochs={", ["--set", "not valid YAML"]),
    ],
)
def test_a_wrong_field_is_one_line_that_names_it(
    manifest: Path, tmp_path: Path, command: str, override: str, expected: list[str]
) -> None:
    code, lines = invoke(command, str(manifest), "--set", override)
    assert code == 2
    assert len(lines) == 1
    for part in expected:
        assert part in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("explain-plan", "x", "--output", "xml"), "'--output' / '-o': 'xml' is not one of 'text', 'json'."),
        (
            ("checkpoints", "restore", "x", "job.yaml", "--continuation", "Rest"),
            "'--continuation': 'Rest' is not one of 'Fresh', 'Append', 'Resume'.",
        ),
    ],
)
def test_a_wrong_choice_is_told_with_the_right_ones(arguments: tuple[str, ...], told: str) -> None:
    code, lines = invoke(*arguments)
    assert code == 2
    assert f"Invalid value for {told}" in " ".join(" ".join(lines).replace("│", " ").split())


def test_a_manifest_that_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    code, lines = invoke("validate", "nowhere.yaml")
    assert (code, lines) == (2, ["error: nowhere.yaml: cannot be read: No such file or directory"])
    (tmp_path / "broken.yaml").write_text("spec: [\n")
    code, lines = invoke("run", "broken.yaml")
    assert code == 2
    assert "broken.yaml:2: is not valid YAML" in lines[0]


@pytest.mark.parametrize("field", ["train", "evaluation"])
def test_a_data_file_that_is_missing_is_named_by_its_field(manifest: Path, tmp_path: Path, field: str) -> None:
    code, lines = invoke("run", str(manifest), "--set", f"spec.data.{field}=[train.tsv, 'gone-*.tsv']")
    assert code == 2
    assert len(lines) == 1
    assert f"spec.data.{field}.1: gone-*.tsv: no such file" in lines[0]
    assert not (tmp_path / "runs").exists()


def test_a_folder_is_no_data_file(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    code, lines = invoke("run", str(manifest), "--set", "spec.data.train=[parts]")
    assert code == 2
    assert "spec.data.train.0: parts: is a folder" in lines[0]


@pytest.mark.parametrize(
    ("option", "named"),
    [("--workdir {}", "the folder of the run"), ("--set spec.checkpoint.uri={}", "spec.checkpoint.uri")],
)
def test_an_output_that_cannot_be_written_is_named(manifest: Path, tmp_path: Path, option: str, named: str) -> None:
    target = str(tmp_path / "train.tsv" / "below")
    code, lines = invoke("run", str(manifest), *option.format(target).split())
    assert code == 2
    assert len(lines) == 1
    assert named in lines[0]
    assert target in lines[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    code, lines = invoke("run", str(manifest), "--workdir", "locked")
    assert code == 2
    assert "the folder of the run: locked cannot be written to" in lines[0]


def test_a_redis_that_cannot_be_had_is_named(manifest: Path, tmp_path: Path) -> None:
    code, lines = invoke("run", str(manifest), "--redis", "redis://:secret@127.0.0.1:1/0")
    assert code == 2
    assert len(lines) == 1
    assert "--redis redis://127.0.0.1:1/0" in lines[0]
    assert not (tmp_path / "runs" / "toy" / "run.json").exists()


def test_options_that_contradict_each_other_are_refused(manifest: Path) -> None:
    code, lines = invoke("run", str(manifest), "--resume", "--overwrite")
    assert code == 2
    assert "--resume and --overwrite" in lines[0]


def test_data_that_is_elsewhere_does_not_make_a_manifest_invalid(manifest: Path) -> None:
    result = CliRunner().invoke(app, ["validate", str(manifest), "--set", "spec.data.train=[gone.tsv]"])
    assert result.exit_code == 0
    assert "note: spec.data.train.0: gone.tsv: no such file" in result.stderr
    remote = CliRunner().invoke(app, ["validate", str(manifest), "--set", "spec.data.train=['memory://bucket/x.tsv']"])
    assert (remote.exit_code, remote.stderr) == (0, "")
    stores = ("spec.checkpoint.uri=xyz://a", "spec.checkpoint.initialFrom.uri=zyx://b")
    result = CliRunner().invoke(app, ["validate", str(manifest), *(f"--set={store}" for store in stores)])
    assert result.exit_code == 0
    assert "note: spec.checkpoint.uri: xyz://a: no file system for it" in result.stderr
    assert "note: spec.checkpoint.initialFrom.uri: zyx://b: no file system for it" in result.stderr


def test_a_new_run_does_not_go_on_from_checkpoints_that_it_finds(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "used" / "00000003").mkdir(parents=True)
    (tmp_path / "used" / "00000003" / "manifest.json").touch()
    code, lines = invoke("run", str(manifest), "--set", "spec.checkpoint.uri=used")
    assert code == 2
    assert len(lines) == 1
    assert "spec.checkpoint.uri: used already holds checkpoints" in lines[0]


@pytest.mark.parametrize("name", ["shared", "shared/", "./shared/../shared", "link", "file://{}/link/"])
def test_two_runs_never_share_a_folder_of_checkpoints(manifest: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "link").symlink_to("shared")
    descriptor = os.open(tmp_path / "shared", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert try_lock(descriptor)  # as a run that has no checkpoint yet
        uri = name.format(tmp_path)
        for option in ("--output=text", "--resume"):
            code, lines = invoke("run", str(manifest), "--set", f"spec.checkpoint.uri={uri}", option)
            assert (code, len(lines)) == (2, 1)
            assert f"spec.checkpoint.uri: {uri} is in use by another `emberscale run`" in lines[0]
        assert not (tmp_path / "runs").exists()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("uri", ["nosuchprotocol://bucket/x", "gs://bucket/x"])
def test_a_checkpoint_uri_that_nothing_here_understands_is_named(manifest: Path, uri: str) -> None:
    code, lines = invoke("run", str(manifest), "--set", f"spec.checkpoint.uri={uri}")
    assert code == 2
    assert f"spec.checkpoint.uri: {uri}" in lines[0]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (
            "{label: clicked, dense: [user], categorical: [shop]}",
            "has no column 'shop', which spec.data",
        ),
        (
            "{label: clicked, dense: [item], categorical: [user]}",
            "column 'item', which spec.data.columns.dense names, is",
        ),
    ],
)
def test_columns_that_a_file_does_not_have_are_refused_before_anything_starts(
    manifest: Path, tmp_path: Path, columns: str, problem: str
) -> None:
    pq.write_table(pa.table({"clicked": [1], "item": ["x"], "user": [7]}), tmp_path / "clicks.parquet")
    data = f"spec.data={{format: Parquet, train: [clicks.parquet], columns: {columns}}}"
    code, lines = invoke("run", str(manifest), "--set", data)
    assert code == 2
    assert len(lines) == 1
    assert f"clicks.parquet: {problem}" in lines[0]
    assert not (tmp_path / "runs").exists()


def test_a_file_of_another_format_is_refused_before_anything_starts(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "clicks.tsv").write_text("clicked,item\n" * 20)
    code, lines = invoke("run", str(manifest), "--set", "spec.data.train=[clicks.tsv]")
    assert code == 2
    assert "clicks.tsv: none of its first 20 records can be read" in lines[0]


def test_what_a_command_logs_stays_out_of_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CliRunner().invoke(app, ["run", str(tmp_path / "nowhere.yaml"), "--output", "json"])
    structlog.get_logger().warning("master_exceeds_bounds")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "master_exceeds_bounds" in printed.err


@pytest.mark.parametrize("command", ["audit toy", "export toy out", "compare toy toy2", "checkpoints list toy"])
def test_the_name_of_a_run_gets_a_hint_at_its_folder(command: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "toy").mkdir(parents=True)
    (tmp_path / "runs" / "toy" / "run.json").touch()
    code, (line,) = invoke(*command.split())
    assert code == 2
    assert line.endswith("; did you mean runs/toy?")


def test_a_folder_of_somebody_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def refuse(path: Path, **how: bool) -> os.stat_result:
        if path.parent.name == "theirs":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **how)

    Path("theirs").mkdir()
    monkeypatch.setattr(Path, "stat", refuse)
    code, lines = invoke("checkpoints", "list", "theirs")
    assert code == 2
    assert lines == ["error: theirs/run.json: Permission denied"]
