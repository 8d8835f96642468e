import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from emberscale._cli import app as emberscale

SMALL = Path(__file__).parents[2] / "deploy/examples/scenarios/small-cluster.yaml"


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    """The example with a hundredth of the work and no history."""
    document: dict[str, Any] = yaml.safe_load(SMALL.read_text())
    document["workload"] |= {"steps": 2000, "historyRounds": 0}
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def test_json_has_the_figures_of_each_scheduler_and_pictures_are_drawn(scenario: Path, tmp_path: Path) -> None:
    arguments = [str(scenario), "--schedulers", "static,well-tuned", "--seeds", "2", "--processes", "1"]
    result = CliRunner().invoke(
        emberscale, ["simulate", *arguments, "--output", "json", "--plot", str(tmp_path / "pictures")]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert list(report["schedulers"]) == ["static", "well-tuned"]
    static = report["schedulers"]["static"]
    assert set(static["jct_seconds"]) == {"mean", "ci95", "p50", "p90"}
    assert static["jct_seconds"]["ci95"][0] <= static["jct_seconds"]["mean"] <= static["jct_seconds"]["ci95"][1]
    assert static["jct_seconds"]["mean"] > report["schedulers"]["well-tuned"]["jct_seconds"]["mean"]
    for key in ("worker_cpu_utilization", "ps_cpu_utilization", "completion_rate"):
        assert 0 < static[key]["mean"] <= 1
    assert static["scalings"]["mean"] == 0
    assert sorted(path.name for path in (tmp_path / "pictures").iterdir()) == [
        "jct.png",
        "throughput.png",
        "utilization.png",
    ]


def test_the_same_seeds_give_the_same_figures_in_one_process_and_in_two(scenario: Path) -> None:
    arguments = [str(scenario), "--schedulers", "static", "--seeds", "2", "--output", "json", "--processes"]
    one, two = (CliRunner().invoke(emberscale, ["simulate", *arguments, processes]) for processes in ("1", "2"))
    assert one.exit_code == two.exit_code == 0
    assert one.stdout == two.stdout


def test_the_table_names_every_scheduler(scenario: Path) -> None:
    result = CliRunner().invoke(
        emberscale, ["simulate", str(scenario), "--schedulers", "static,optimus", "--seeds", "1"]
    )
    assert result.exit_code == 0, result.output
    assert "static" in result.stdout
    assert "optimus" in result.stdout


def test_bad_input_is_named_and_exits_with_2(scenario: Path, tmp_path: Path) -> None:
    unknown = CliRunner().invoke(emberscale, ["simulate", str(scenario), "--schedulers", "fifo"])
    assert unknown.exit_code == 2
    assert "no scheduler 'fifo'; it has emberscale," in unknown.stderr
    absent = CliRunner().invoke(emberscale, ["simulate", str(tmp_path / "absent.yaml")])
    assert absent.exit_code == 2
    assert "absent.yaml: cannot be read" in absent.stderr
    picture = CliRunner().invoke(emberscale, ["simulate", str(scenario), "--plot", str(scenario)])
    assert picture.exit_code == 2
    assert picture.stderr == f"error: --plot: {scenario} cannot be created: File exists\n"


def test_a_bad_row_of_a_trace_is_named_with_file_line_and_column(scenario: Path, tmp_path: Path) -> None:
    document = yaml.safe_load(scenario.read_text())
    document["workload"] = {"kind": "Trace", "path": "trace.csv"}
    scenario.write_text(yaml.safe_dump(document))
    header = "job_id,owner,submitted_seconds,model,total_samples,workers,ps,worker_cpu,ps_cpu,worker_memory_gib"
    (tmp_path / "trace.csv").write_text(f"{header},ps_memory_gib\na,ann,0,dcn,many,4,2,4,4,8,8\n")
    result = CliRunner().invoke(emberscale, ["simulate", str(scenario), "--schedulers", "static"])
    assert result.exit_code == 2
    assert "trace.csv:2: column total_samples: 'many' is not a whole number" in result.stderr


def test_an_installation_without_the_simulator_says_so(scenario: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [folder for folder in sys.path if not (Path(folder) / "emberscale_simulator").exists()]
    monkeypatch.setattr(sys, "path", kept)
    for module in [name for name in sys.modules if name.split(".")[0] == "emberscale_simulator"]:
        monkeypatch.delitem(sys.modules, module)
    result = CliRunner().invoke(emberscale, ["simulate", str(scenario)])
    assert result.exit_code == 2
    assert "install Emberscale from its sources" in result.output
    assert "Traceback" not in result.output
