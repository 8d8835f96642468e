"""`emberscale drill`: what it concludes from a job's status, what it refuses and kills; tests/e2e runs it for real."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.sdk.test_scale import held
from typer.testing import CliRunner

from emberscale import _drill
from emberscale._cli import app
from emberscale._commands.drill import rehearse
from emberscale._drill import Look
from emberscale._run.drilling import DrilledRun
from emberscale_api.errors import InvalidError, UnavailableError
from emberscale_api.job.roles import Role
from emberscale_api.job.status import (
    Condition,
    ConditionType,
    JobPhase,
    MemberStatus,
    Progress,
    Rebuilds,
    TrainingJobStatus,
)
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterServicer, add_MasterServicer_to_server
from emberscale_operator.local.folder import RunFolder
from emberscale_operator.local.requests import KillRequest
from emberscale_operator.machine import Instance, InstanceId, InstanceState, Resources

__all__ = ["held"]

AT = datetime(2026, 11, 23, tzinfo=UTC)
TRAINING, RESTORING = JobPhase.TRAINING, JobPhase.RESTORING
SERVERS = {0: "1", 1: "1", 2: "1"}


def look(at: float, samples: int, phase: JobPhase = TRAINING, **told: Any) -> Look:
    given: dict[str, Any] = {"servers": SERVERS, "protected": True} | told
    return Look(at, phase, samples, **given)


BEFORE = [look(-2, 1000), look(-1.5, 2000), look(-1, 3000), look(0, 5000)]
REBUILT: dict[str, Any] = {"rebuilds": 1, "rebuild_seconds": 1.75, "rebuild_bytes": 3 << 20}


def test_a_rebuilt_server_costs_the_time_without_service() -> None:
    after = [
        look(0.5, 5200, protected=False),  # pushes from before the kill
        look(2, 5200, protected=False, **REBUILT),
        look(2.5, 5600, protected=False, **REBUILT),
        look(4, 8000, **REBUILT),
    ]
    assert [_drill.is_over(1, BEFORE, after[:count]) for count in range(5)] == [False] * 4 + [True]
    result = _drill.report(1, BEFORE, 0.0, after)
    assert (result.without_service_seconds, result.regained_seconds, result.unprotected_seconds) == (2.5, 2.5, 4.0)
    assert (result.before, result.meanwhile) == (2000, 750)
    assert (result.precision_seconds, result.repeated_samples, result.rolled_back) == (1.0, 0, False)
    assert result.passed
    assert dict(_drill.lines(result)) == {
        "without service": "2.5s from the kill to the first samples after it",
        "fully protected again": "4s after the kill",
        "speed": "2,000 samples/s before, 750 new samples/s meanwhile, 38% of before",
        "rebuilt from parity": "3 MiB of rows, served 1.75s after the master noticed the loss",
        "rolled back": "nothing",
        "precision": "reports of samples came up to 1s apart",
    }


def test_a_roll_back_costs_the_samples_that_are_trained_again() -> None:
    before = [look(-1, 4000, protected=None), look(0, 5000, protected=None)]
    restored: dict[str, Any] = {"protected": None, "recoveries": 1}
    after = [
        look(1, 5100, protected=None),
        look(2, 5100, RESTORING, **restored),
        look(3, 3000, **restored),
        look(4, 3500, **restored),
        look(6, 5100, **restored),
    ]
    assert [_drill.is_over(1, before, after[:count]) for count in range(6)] == [False] * 5 + [True]
    result = _drill.report(1, before, 0.0, after)
    assert (result.without_service_seconds, result.regained_seconds, result.unprotected_seconds) == (4.0, 6.0, None)
    assert (result.rolled_back, result.repeated_samples) == (True, 2100)
    assert result.passed, "nobody promised more"
    said = dict(_drill.lines(result))
    assert said["fully protected again"] == "never: the job was not protected"
    assert said["rolled back"] == "2,100 samples trained again; regained 6s after the kill"


def test_a_roll_back_of_a_protected_job_is_a_failure() -> None:
    after = [look(1, 3000, recoveries=1), look(2, 3500, recoveries=1), look(3, 5500, recoveries=1)]
    result = _drill.report(1, BEFORE, 0.0, after)
    assert _drill.is_over(1, BEFORE, after)
    assert (result.repeated_samples, result.passed) == (2000, False)


def test_a_partial_recovery_costs_what_the_rows_forget() -> None:
    before = [look(0, 5000, protected=None)]
    after = [look(1, 5000, RESTORING, protected=None), look(2, 5000, protected=None, pls=0.25)]
    after.append(look(3, 6000, protected=None, pls=0.25))
    result = _drill.report(1, before, 0.0, after)
    assert (result.forgotten, result.rolled_back, result.without_service_seconds) == (0.25, False, 3.0)
    assert (
        dict(_drill.lines(result))["rolled back"] == "the rows of ps-1 alone; the portion of lost samples grew by 0.25"
    )


def test_a_rebuild_from_parity_that_lags_costs_what_the_rows_forget() -> None:
    after = [look(1, 5000, pls=0.01, **REBUILT), look(2, 6000, pls=0.01, **REBUILT)]
    result = _drill.report(1, BEFORE, 0.0, after)
    assert (result.rebuilt, result.rolled_back, result.passed) == (True, False, True)
    said = dict(_drill.lines(result))["rolled back"]
    assert said == "nothing; parity lagged, and the portion of lost samples grew by 0.01"


def test_a_job_that_does_not_recover_is_told_as_it_stands() -> None:
    after = [look(1, 5000, protected=False), look(2, 5000, JobPhase.FAILED, protected=False)]
    result = _drill.report(1, BEFORE, 0.0, after)
    assert _drill.is_over(1, BEFORE, after)
    assert (result.ended, result.passed) == ("Failed", False)
    said = dict(_drill.lines(result))
    assert said["without service"] == said["fully protected again"] == "not before the drill ended"
    assert said["ended early"] == "the job was Failed before the drill was over"


def test_a_job_that_goes_on_to_evaluate_has_service() -> None:
    after = [look(1, 5000, **REBUILT), look(2, 6000, JobPhase.EVALUATING, **REBUILT)]
    assert _drill.report(1, BEFORE, 0.0, after).without_service_seconds == 2.0


def test_a_job_that_trains_its_last_samples_meanwhile_has_service() -> None:
    """The status of a TrainingJob may show the rebuild and the end of the job at once."""
    saving = look(2, 6000, JobPhase.SAVING, **REBUILT)
    result = _drill.report(1, BEFORE, 0.0, [look(1, 5000, **REBUILT), saving])
    assert (result.without_service_seconds, result.regained_seconds, result.passed) == (2.0, 2.0, True)
    complete = look(3, 6000, JobPhase.COMPLETE, protected=False, **REBUILT)
    result = _drill.report(1, BEFORE, 0.0, [look(1, 5000, protected=False), complete])
    assert (result.without_service_seconds, result.unprotected_seconds, result.rolled_back) == (3.0, None, False)
    assert not result.passed, "it was not protected again"


def test_a_second_loss_does_not_keep_the_drill_from_its_end() -> None:
    back: dict[str, Any] = REBUILT | {"recoveries": 1}
    after = [
        look(1, 5000, **REBUILT),
        look(2, 5000, RESTORING, protected=False, **back),
        look(3, 4000, **back),
        look(4, 4500, **back),
        look(5, 5500, **back),
    ]
    assert [_drill.is_over(1, BEFORE, after[:count]) for count in range(6)] == [False] * 5 + [True]
    result = _drill.report(1, BEFORE, 0.0, after)
    assert (result.without_service_seconds, result.regained_seconds, result.repeated_samples) == (4.0, 5.0, 1000)


def test_a_server_that_gives_its_rows_away_before_it_ends_is_no_loss() -> None:
    """Kubernetes leaves a pod that is deleted without a grace period two seconds."""
    anew: dict[str, Any] = {"servers": SERVERS | {1: "2"}}
    after = [
        look(2, 6000),
        look(4, 7000, protected=False, **anew),
        *(look(5 + seconds, 7000 + 500 * seconds, **anew) for seconds in range(21)),
    ]
    assert [_drill.is_over(1, BEFORE, after[:count]) for count in range(24)] == [False] * 23 + [True]
    result = _drill.report(1, BEFORE, 0.0, after)
    assert (result.moved_away, result.passed) == (True, False)
    assert dict(_drill.lines(result)) == {
        "not rehearsed": "ps-1 gave its rows away before it ended, so none were lost: try again"
    }


@pytest.mark.parametrize(
    "after",
    [
        [look(5 + seconds, 7000, servers=SERVERS | {1: "2"}) for seconds in range(60)],
        [look(5 + seconds, 7000 + seconds, servers=SERVERS | {1: "2"}, protected=False) for seconds in range(60)],
        [look(5 + seconds, 7000 + seconds) for seconds in range(60)],
    ],
    ids=["no samples", "unprotected", "no successor"],
)
def test_a_loss_that_is_not_noticed_or_not_mended_yet_is_waited_for(after: list[Look]) -> None:
    assert not _drill.is_over(1, BEFORE, after)
    assert not _drill.report(1, BEFORE, 0.0, after).moved_away


@pytest.mark.parametrize(
    ("result", "index", "said"),
    [
        ({"phase": JobPhase.SAVING}, 1, "ctr: the job is Saving; a drill needs one that is Training"),
        (
            {"phase": JobPhase.RESTORING},
            1,
            "ctr: the job is Restoring; a drill needs one that is Training; try again once it trains",
        ),
        ({}, 7, "ps-7: no such parameter server runs; running are ps-0, ps-1, ps-2"),
        (
            {"protected": False, "problem": "rows of ps-2 are still sent to their parity servers"},
            1,
            "ps-1: the job is unprotected now: rows of ps-2 are still sent to their parity servers; try again once it "
            "is protected, or with --force",
        ),
        (
            {"protected": None, "checkpoint": "00000004"},
            1,
            "ps-1: the job keeps no parity, and its loss rolls the job back to checkpoint 00000004 or a newer flash "
            "checkpoint; training repeats what came after (with PartialRecovery, only the rows of that server roll "
            "back); train with spec.faultTolerance.strategy: ErasureCoding to have parity, or --force kills it "
            "anyway",
        ),
    ],
)
def test_a_loss_that_costs_more_than_time_is_refused(result: dict[str, Any], index: int, said: str) -> None:
    with pytest.raises(InvalidError) as caught:
        _drill.check("ctr", look(0, 1000, **result), index, force=False)
    assert str(caught.value) == said


def test_force_allows_what_costs_samples_and_nothing_else() -> None:
    _drill.check("ctr", look(0, 1000, protected=None), 1, force=True)
    _drill.check("ctr", look(0, 1000, protected=False), 1, force=True)
    with pytest.raises(InvalidError, match="no such parameter server"):
        _drill.check("ctr", look(0, 1000), 3, force=True)


def test_a_training_job_is_looked_at_through_its_status() -> None:
    condition = Condition(
        type=ConditionType.PROTECTED,
        status="False",
        reason="Rebuilding",
        message="ps-1 is lost",
        last_transition_time=AT,
    )
    status = TrainingJobStatus(
        phase=TRAINING,
        conditions=(condition,),
        progress=Progress(samples=7, recoveries=2, rebuilds=Rebuilds(count=1, server="ps-1", seconds=1.5, bytes=9)),
        members=(
            MemberStatus(role="ps", index=1, incarnation=4, pod="ctr-ps-1-4"),
            MemberStatus(role="worker", index=0, pod="w"),
        ),
    )
    result = _drill.look_at_job(status, 3.0)
    expected = Look(3.0, TRAINING, 7, servers={1: "4"}, protected=False, problem="ps-1 is lost", recoveries=2)
    assert result == replace(expected, rebuilds=1, rebuild_seconds=1.5, rebuild_bytes=9)
    assert _drill.look_at_job(TrainingJobStatus(), 3.0) == Look(3.0, JobPhase.PENDING)


class Played:
    """A job whose looks are scripted."""

    def __init__(self, looks: Sequence[Look | Exception]) -> None:
        self.looks = iter(looks)
        self.killed: list[int] = []

    def look(self) -> Look:
        result = next(self.looks)
        if isinstance(result, Exception):
            raise result
        return result

    def kill(self, index: int) -> float:
        self.killed.append(index)
        return 0.0


def test_a_job_that_becomes_unprotected_meanwhile_loses_nobody() -> None:
    played = Played([look(-2, 1000), look(-1, 2000), look(0, 3000, protected=False)])
    with pytest.raises(InvalidError, match="ps-1: the job is unprotected now"):
        rehearse(played, "ctr", 1, False, watched=2, timeout=60, poll=0)
    assert not played.killed


def test_force_says_what_is_lost_also_where_parity_is_lost_meanwhile(capsys: pytest.CaptureFixture[str]) -> None:
    back: dict[str, Any] = {"recoveries": 1, "protected": False}
    unprotected = look(0, 3000, protected=False, checkpoint="00000004")
    played = Played([look(-2, 1000), unprotected, look(1, 2000, **back), look(2, 4000, recoveries=1)])
    rehearse(played, "ctr", 1, True, watched=2, timeout=1e12, poll=0)
    assert played.killed == [1]
    assert (
        "although the job is unprotected: its loss rolls the job back to checkpoint 00000004" in capsys.readouterr().err
    )


def test_an_evaluation_is_waited_for() -> None:
    evaluating = [look(at, 3000, JobPhase.EVALUATING) for at in (0, 1, 2)]
    played = Played([look(-2, 1000), *evaluating, look(3, 4000), look(4, 5000, **REBUILT), look(5, 6000, **REBUILT)])
    assert rehearse(played, "ctr", 1, False, watched=2, timeout=1e12, poll=0).passed
    played = Played([look(-2, 1000), *evaluating])
    with pytest.raises(InvalidError, match="ctr: the job is Evaluating; a drill needs one that is Training"):
        rehearse(played, "ctr", 1, False, watched=2, timeout=4, poll=0)
    assert not played.killed


def test_a_drill_that_begins_in_an_evaluation_watches_once_the_job_trains(capsys: pytest.CaptureFixture[str]) -> None:
    evaluating = [look(at, 500, JobPhase.EVALUATING) for at in (-30, -20, -10)]
    played = Played([*evaluating, *BEFORE, look(2, 5200, **REBUILT), look(3, 6000, **REBUILT)])
    result = rehearse(played, "ctr", 1, False, watched=2, timeout=1e12, poll=0)
    assert (played.killed, result.before) == ([1], 2000)
    assert "ctr: waiting until the job trains; it is Evaluating" in capsys.readouterr().err
    for protected, index in (None, 1), (True, 7):
        played = Played([look(0, 500, JobPhase.EVALUATING, protected=protected)])
        with pytest.raises(InvalidError, match=f"ps-{index}: "):
            rehearse(played, "ctr", index, False, watched=2, timeout=1e12, poll=0)


def test_a_master_that_is_away_for_a_moment_is_asked_again() -> None:
    away = UnavailableError("the master of the run does not answer")
    played = Played([*BEFORE, away, look(2, 5200, **REBUILT), look(3, 6000, **REBUILT)])
    assert rehearse(played, "ctr", 1, False, watched=2, timeout=1e12, poll=0).without_service_seconds == 3.0
    assert played.killed == [1]


def test_a_run_that_is_over_ends_the_drill() -> None:
    played = Played([*BEFORE, InvalidError("the run is not running: it is complete")])
    result = rehearse(played, "ctr", 1, False, watched=2, timeout=60, poll=0)
    assert (result.without_service_seconds, result.passed) == (None, False)


class Master(MasterServicer):
    """A master that reports a rebuild for each request to kill that the run has taken."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.samples = 0
        self.taken: list[KillRequest] = []
        self.instances = [
            Instance(InstanceId(Role.PS, index, 1), InstanceState.RUNNING, Resources(), 0.0, name=f"{index}-abc")
            for index in range(2)
        ]

    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.JobStatus:
        self.samples += 100
        rebuilt = len(self.taken)
        return pb.JobStatus(
            phase=pb.TRAINING,
            samples=self.samples,
            members=[
                pb.MemberStatus(member=pb.Member(role=pb.PS, index=index, incarnation=f"{index}-abc"), alive=True)
                for index in range(2)
            ],
            protection=pb.ProtectionStatus(protected=True, rebuilds=rebuilt, bytes=7 * rebuilt),
        )


@pytest.fixture
def master(held: Path) -> Iterator[Master]:
    folder = RunFolder(held)
    master = Master(folder)  # type: ignore[abstract]  # nobody makes the other calls
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_MasterServicer_to_server(master, server)
    folder.master_address.write_text(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    yield master
    server.stop(None).wait(60)


def drill(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["drill", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture
def taking(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the request to kill, in the place of the run, as soon as it is there."""
    ask: Callable[..., None] = KillRequest.ask

    def asked(request: KillRequest, folder: RunFolder) -> None:
        ask(request, folder)
        if KillRequest.take(folder, master.instances) is not None:
            master.taken.append(request)

    monkeypatch.setattr(KillRequest, "ask", asked)


@pytest.mark.usefixtures("taking")
def test_the_run_is_asked_to_kill_that_process(held: Path, master: Master) -> None:
    code, output = drill(held, "--kill", "ps-1", "--before", 0)
    assert code == 0, output
    assert master.taken == [KillRequest("ps-1", "1-abc")]
    assert "rolled back nothing" in output
    code, output = drill(held, "--kill", "ps-0", "--before", 0, "--output", "json")
    result = json.loads(output[output.index("{") :])
    assert (code, result["server"], result["rebuild_bytes"], result["passed"]) == (0, "ps-0", 14, True)


@pytest.mark.usefixtures("master")
def test_other_names_are_refused(held: Path) -> None:
    assert drill(held, "--kill", "worker-0")[0] == 2
    code, output = drill(held, "--kill", "ps-4")
    assert (code, "ps-4: no such parameter server runs; running are ps-0, ps-1" in output) == (2, True)


def test_a_wrong_name_without_a_cluster_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    code, output = drill("typo", "--kill", "ps-1")
    where = "runs/typo holds no run (one elsewhere is named by its folder), and no cluster: "
    assert (code, output.startswith(f"error: typo: {where}")) == (2, True), output


@pytest.mark.usefixtures("master")
def test_a_run_that_does_not_answer_kills_nobody(held: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberscale._run.drilling._TAKEN_SECONDS", 0.0)
    code, output = drill(held, "--kill", "ps-1", "--before", 0)
    assert (code, "its `emberscale run` does not answer, or ps-1 ended by itself; nothing was" in output) == (2, True)
    assert not RunFolder(held).kill_request.exists()


@pytest.mark.usefixtures("taking")
def test_a_server_that_was_replaced_meanwhile_is_not_told_of_as_killed(
    held: Path, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberscale._run.drilling._TAKEN_SECONDS", 0.0)
    master.instances[1] = replace(master.instances[1], name="1-def")
    code, output = drill(held, "--kill", "ps-1", "--before", 0)
    assert (code, "nothing was killed" in output, master.taken) == (2, True, [])


@pytest.mark.usefixtures("master")
def test_two_drills_do_not_kill_two_servers(held: Path) -> None:
    with DrilledRun(held):
        code, output = drill(held, "--kill", "ps-1", "--before", 0)
    assert (code, "another drill is under way; try again once it is over" in output) == (2, True)
