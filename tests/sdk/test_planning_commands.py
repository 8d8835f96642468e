"""The parts of the planning commands that need no brain."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from certificates import certificate_folder
from emberscale._cli import app
from emberscale._commands import explain_plan
from emberscale._run.brain_choice import choose_brain
from emberscale._run.folder import open_run
from emberscale._run.hot import hot_of_run
from emberscale_api.environment import TLS_FOLDER
from emberscale_api.errors import InvalidError
from emberscale_api.job import TrainingJob
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_operator.local.brain import BrainAddress, EmbeddedBrain, default_database
from training_jobs import training_job


def test_a_job_without_numbers_gets_a_brain_of_its_own() -> None:
    assert isinstance(choose_brain(training_job(), "auto", (), None), EmbeddedBrain)
    assert isinstance(choose_brain(training_job(ps={"replicas": 1}), "auto", (), None), EmbeddedBrain)


@pytest.mark.parametrize(
    "sized",
    [
        training_job(ps={"replicas": 1}, worker={"replicas": 2}),
        training_job(scaling={"mode": "Manual"}),
    ],
)
def test_a_job_with_numbers_or_manual_scaling_gets_none(sized: TrainingJob) -> None:
    assert choose_brain(sized, "auto", (), None) is None


def test_off_is_nobody_and_an_address_is_the_brain_there(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    assert choose_brain(training_job(), "off", (), None) is None
    assert choose_brain(training_job(), "brain:50061", (), token) == BrainAddress("brain:50061", "secret")


def test_a_brain_elsewhere_is_verified_by_the_authority_that_is_given_or_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    given, folder = (certificate_folder(tmp_path / name) / "ca.crt" for name in ("given", "mounted"))
    monkeypatch.setenv(TLS_FOLDER, str(folder.parent))
    for file, authority in ((given, given), (None, folder)):
        expected = BrainAddress("brain:50061", "secret", authority.read_bytes())
        assert choose_brain(training_job(), "brain:50061", (), token, file) == expected
    for wrong, said in ((token, "contains no PEM certificate"), (tmp_path / "nowhere", "cannot be read: No such file")):
        with pytest.raises(InvalidError, match=f"^--brain-ca-file {wrong}: {said}"):
            choose_brain(training_job(), "brain:50061", (), token, wrong)


@pytest.mark.parametrize(
    ("choice", "settings", "said"),
    [
        ("elsewhere", (), "expected auto, off or HOST:PORT"),
        ("brain:50061", (), "--brain-token-file: is required, as EMBERSCALE_TOKEN_FILE is not set"),
        ("off", ("planner.rho=2",), "--brain-set: needs the brain beside the job: use --brain auto"),
        ("auto", ("planner.roh=2",), "planner.roh: unknown setting"),
        ("auto", ("cluster.cpu=-1",), "cluster.cpu"),
    ],
)
def test_what_is_wrong_with_a_choice_is_said_by_name(
    choice: str, settings: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMBERSCALE_TOKEN_FILE", raising=False)
    with pytest.raises(InvalidError, match=said.replace(".", r"\.")):
        choose_brain(training_job(), choice, settings, None)


def test_a_run_that_is_not_there_has_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["explain-plan", "nothing"])
    assert result.exit_code == 2
    assert "nothing: neither it nor runs/nothing is the folder of a run" in result.output


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (training_job(), "a run with --brain off has none: run it without that option"),
        (
            training_job(ps={"replicas": 1}, worker={"replicas": 2}),
            "its manifest gives spec.ps.replicas and spec.worker.replicas: leave one out",
        ),
        (training_job(scaling={"mode": "Manual"}), "spec.scaling.mode is Manual: set it to Auto"),
    ],
)
def test_a_run_without_a_plan_says_where_it_would_be_and_what_to_do(
    job: TrainingJob, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with open_run(tmp_path / "run", job, resume=False, overwrite=False) as run:
        run.save()
    database = default_database(os.environ)

    def told() -> str:
        result = CliRunner().invoke(app, ["explain-plan", str(tmp_path / "run")])
        assert result.exit_code == 2
        return result.output

    without = told()
    assert f"has no plan: {database} does not exist" in without
    database.parent.mkdir(parents=True)
    database.touch()
    of_others = told()
    assert f"has no plan in {database}" in of_others
    for output in (without, of_others):
        assert reason in output
        assert f"emberscale explain-plan {run.record.uid} --brain HOST:PORT --brain-token-file FILE" in output


def test_a_plan_from_before_the_first_measurement_has_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_plan, "_remembered", lambda _: pb.PlanExplanation(plan=pb.BrainPlan(version=1)))
    job = training_job(scaling={"profileInterval": "25s"})
    with open_run(tmp_path / "run", job, resume=False, overwrite=False) as run:
        run.save()
    command, picture = ["explain-plan", str(tmp_path / "run")], tmp_path / "plan.png"
    assert CliRunner().invoke(app, command).exit_code == 0
    result = CliRunner().invoke(app, [*command, "--plot", str(picture)])
    assert (result.exit_code, picture.exists()) == (2, False)
    assert "try again once the job has trained for 25s (spec.scaling.profileInterval)" in result.output


def test_a_run_that_has_ended_tells_of_rounds_from_its_summary(tmp_path: Path) -> None:
    assert hot_of_run(tmp_path) == {}
    told = {"decision": "off: no lease has been trained yet to estimate from"}
    (tmp_path / "summary.json").write_text(json.dumps({"hot_embeddings": told}))
    assert hot_of_run(tmp_path) == told
    for damaged in ("", "[]", json.dumps({"hot_embeddings": "off"})):
        (tmp_path / "summary.json").write_text(damaged)
        assert hot_of_run(tmp_path) == {}
