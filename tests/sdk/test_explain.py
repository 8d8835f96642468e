"""The explanation of a manifest for people."""

from pathlib import Path

import yaml
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale_api.job import load_manifest, parse_manifest

EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "criteo-dlrm.yaml"


def explain(*options: str) -> str:
    result = CliRunner().invoke(app, ["explain", str(EXAMPLE), *options])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_the_manifest_is_shown_with_every_default() -> None:
    printed = explain()
    document = yaml.safe_load(printed[: printed.index("Embedding tables")])
    assert document["spec"]["sharding"]["maxBatches"] == 64
    assert document["spec"]["scaling"]["profileInterval"] == "15s"
    assert parse_manifest(document) == load_manifest(EXAMPLE)


def test_every_process_is_listed_with_its_resources() -> None:
    printed = explain("--set", "spec.ps.replicas=3")
    rows = {line.split()[1]: line.split() for line in printed.splitlines() if line.startswith("│")}
    assert {"redis-0", "master-0", "ps-0", "ps-1", "ps-2", "worker-0", "worker-1"} <= rows.keys()
    assert rows["ps-2"][3:6] == ["1", "│", "2"]
    assert "1 GiB of flash checkpoints" in " ".join(rows["redis-1"])
    assert "redis-1" not in explain("--set", "spec.checkpoint.flash.mode=Disabled")


def test_how_long_a_server_may_take_to_leave_follows_from_its_memory() -> None:
    printed = explain("--set", "spec.ps.resources={limits: {memory: 3Gi}}")
    (line,) = (line for line in printed.splitlines() if "criteo-dlrm-ps" in line)
    assert "1m30s" in line


def test_where_a_job_starts_and_what_it_trains_then() -> None:
    initial = "spec.checkpoint.initialFrom={uri: s3://january, id: '00000007'}"
    printed = explain("--set", initial, "--set", "spec.data.continuation=Append")
    told = " ".join(printed.partition("starts from")[2].replace("│", " ").split())
    assert told.startswith("checkpoint 00000007 in s3://january, and trains: files that the checkpoint has not trained")


def test_tables_that_differ_are_told_apart() -> None:
    printed = explain("--set", "spec.model.embeddings.tables.C3.optimizer.type=Adam")
    assert "C1 to C2 (2)" in printed
    assert "C4 to C26 (23)" in printed
    assert any("C3" in line and "Adam" in line for line in printed.splitlines())


def test_the_wide_part_has_tables_of_its_own() -> None:
    printed = explain(
        "--set", "spec.model.architecture=WideAndDeep", "--set", "spec.optimizers.wide={type: FTRL, learningRate: 0.1}"
    )
    (line,) = (line for line in printed.splitlines() if "C1.wide" in line)
    assert "C26.wide (26)" in printed
    assert "FTRL 0.1" in line
    assert "Zeros" in line


def test_the_example_says_why_each_field_is_there() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert sum("#" in line for line in lines) > len(lines) / 3


def test_what_is_planned_is_said_with_its_bounds() -> None:
    printed = explain(
        "--set", "spec.worker={minReplicas: 2, maxReplicas: 8}", "--set", "spec.ps={resources: {limits: {cpu: 2}}}"
    )
    rows = {
        cells[1]: cells[2:] for line in printed.splitlines() if len(cells := [c.strip() for c in line.split("│")]) > 3
    }
    assert rows["worker: 2 to 8, planned"][:2] == ["planned", "planned"]
    assert rows["ps: 1 or more, planned"][:2] == ["2", "planned"]
    assert "brain-0" in rows
    assert "worker-0" not in rows


def test_it_is_said_which_ids_have_rows() -> None:
    printed = explain(
        "--set",
        "spec.model.embeddings.admission.minCount=3",
        "--set",
        "spec.model.embeddings.tables.C3={admission: {minCount: 1}, eviction: {maxRows: 5000, ttlBatches: 70}}",
    )
    assert sum("│ 3 " in line and "GiB" not in line for line in printed.splitlines()) == 2
    (line,) = (line for line in printed.splitlines() if "│ C3 " in line)
    assert [cell.strip() for cell in line.split("│")[2:5]] == ["1", "5,000", "70 batches without a push"]
    assert "added at push" not in explain()
