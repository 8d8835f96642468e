"""The master's calls that a parameter server refuses, with which status, and the one that it never refuses."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.trainer.server.control.conftest import CONTEXT, SECONDS, RefusedError, Server, barrier

from emberscale_api.rpc import master_pb2
from emberscale_api.wire import Status
from emberscale_trainer.checkpoint import work


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda server: server.settle(2), grpc.StatusCode.FAILED_PRECONDITION),
        (lambda server: server.snapshot("x"), grpc.StatusCode.FAILED_PRECONDITION),
        (lambda server: server.settle(1, (7,)), grpc.StatusCode.DEADLINE_EXCEEDED),
        (lambda server: server.hold(2, generation=1), grpc.StatusCode.ABORTED),
        (lambda server: server.hold(2, generation=3), grpc.StatusCode.FAILED_PRECONDITION),
        (lambda server: server.saved(1, generation=2), grpc.StatusCode.FAILED_PRECONDITION),
        (lambda server: server.assign(1), grpc.StatusCode.ABORTED),
        (lambda server: server.assign(3, "/nowhere/at/all"), grpc.StatusCode.DATA_LOSS),
    ],
)
def test_what_cannot_be_done_has_a_status_of_its_own(
    server: Server, monkeypatch: pytest.MonkeyPatch, call: Any, code: grpc.StatusCode
) -> None:
    monkeypatch.setattr(work, "MISSING_SECONDS", 0.0)
    server.assign(2)
    server.control.Hold(master_pb2.HoldRequest(barrier=barrier(1, 2), version=2), CONTEXT)
    settle = server.settle
    server.settle = lambda *arguments: settle(*arguments, generation=2)  # type: ignore[method-assign, misc]  # a default
    snapshot = server.snapshot
    server.snapshot = lambda uri: snapshot(uri, generation=2)  # type: ignore[method-assign, assignment, misc]  # same
    with pytest.raises(RefusedError) as refused:
        call(server)
    assert refused.value.code is code


def test_what_is_meant_for_the_process_before_is_refused_and_changes_nothing(server: Server, tmp_path: Path) -> None:
    """A successor may take over the address while a call is on its way."""
    control, before = server.control, barrier(1, meant="before")
    routing = server.routing(1, 1)
    routing.servers[0].incarnation = "before"
    assign = master_pb2.AssignRequest(routing=routing, manifest_json=server.job.to_json(), wait_seconds=SECONDS)
    with pytest.raises(RefusedError, match="'before' is meant, and this is 'i'"):
        control.Assign(assign, CONTEXT)
    assert server.state.core.known == (0, 0)
    server.assign()
    with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
        control.Hold(master_pb2.HoldRequest(barrier=before), CONTEXT)
    assert server.push(0) is Status.OK, "nothing is held"
    server.hold()
    with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
        control.Settle(master_pb2.SettleRequest(barrier=before), CONTEXT)
    server.settle()
    calls: list[tuple[Any, Any]] = [
        (control.Snapshot, master_pb2.SnapshotRequest(barrier=before, uri=str(tmp_path))),
        (control.Switch, master_pb2.SwitchRequest(barrier=before, move=1)),
        (control.Resume, master_pb2.ResumeRequest(barrier=before)),
    ]
    for call, request in calls:
        with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
            call(request, CONTEXT)
    server.snapshot(tmp_path)
    with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
        control.GetSaved(master_pb2.GetSavedRequest(generation=1, barrier=1, incarnation="before"), CONTEXT)
    assert server.saved().done


def test_a_resume_never_fails(server: Server) -> None:
    for generation in (1, 2):
        server.control.Resume(master_pb2.ResumeRequest(barrier=barrier(5, generation)), CONTEXT)
    server.assign()
    server.control.Resume(master_pb2.ResumeRequest(barrier=barrier(5)), CONTEXT)
    assert server.push(0) is Status.OK
