from pathlib import Path

import pytest

from emberscale_api.errors import InvalidError
from emberscale_brain.__main__ import main
from emberscale_brain.service.settings import load_settings


def test_everything_has_a_default() -> None:
    settings = load_settings(None)
    assert settings.planner.rho == 2.5
    assert settings.cluster.capacity().largest_node_cpu == float("inf")


def test_a_file_and_overrides_on_top(tmp_path: Path) -> None:
    path = tmp_path / "brain.yaml"
    path.write_text(
        "planner: {rho: 1.5, cpuCoreHour: 0.1}\nquotas: {ads: {cpu: 12}}\nplanning: {interval: 3m}\n"
        "cluster: {cpu: 640, memory: 3Ti, largestNodeCpu: 32}\n"
    )
    settings = load_settings(path, ["planner.rho=3", "bounds.maxWorkers=8"])
    assert (settings.planner.rho, settings.planner.prices().cpu_core_hour) == (3, 0.1)
    assert settings.quotas["ads"].quota().cpu == 12
    assert settings.planning.interval == 180
    assert settings.bounds.bounds().workers == (1, 8)
    assert settings.cluster.capacity().cpu == 640


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("planer: {rho: 1}", "planer: unknown setting"),
        ("planner: {smoothing: 2}", "planner.smoothing: Input should be less than or equal to 1"),
        ("planner: {timeValuePerHour: .nan}", "planner.timeValuePerHour: Input should be a finite number"),
        ("listen: here", "listen: String should match pattern"),
        ("listen: 127.0.0.1:99999", "listen: Value error, the port must be 0 to 65535"),
        ("metrics: 127.0.0.1:99999", "metrics: Value error, the port must be 0 to 65535"),
        ("planner: {name: nope}", "planner.name: there is no planner 'nope'; installed are default"),
        ("database: mysql://x", "database: Value error, 'mysql://x': the database must be SQLite or PostgreSQL"),
        ("bounds: {maxPsCpu: 0.5}", "bounds: Value error, maxWorkerCpu and maxPsCpu must not be below cpuStep"),
        ("- a list", "expected a mapping of settings"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_bad_setting_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "brain.yaml"
    path.write_text(text)
    with pytest.raises(InvalidError) as raised:
        load_settings(path)
    assert problem in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_bad_start_exits_with_2_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMBERSCALE_TOKEN_FILE", raising=False)
    assert main(["--config", str(tmp_path / "absent.yaml")]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    assert main([]) == 2
    assert "tokenFile: is not set" in capsys.readouterr().err
    (tmp_path / "token").write_text("x")
    assert main(["--set", f"tokenFile={tmp_path / 'token'}", "--set", "database=mysql://x"]) == 2
    assert "must be SQLite or PostgreSQL" in capsys.readouterr().err
    (tmp_path / "token").write_text("ä")
    assert main(["--set", f"tokenFile={tmp_path / 'token'}"]) == 2
    assert "has non-ASCII characters" in capsys.readouterr().err


def test_check_prints_what_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--set", "planner.rho=7"]) == 0
    assert '"rho": 7.0' in capsys.readouterr().out
