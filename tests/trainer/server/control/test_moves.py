"""The master's calls that make a parameter server part of a move."""

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.server.control.conftest import CONTEXT, SECONDS, RefusedError, Server, barrier, ranges

from emberscale_api.routing import BUCKETS
from emberscale_api.rpc import master_pb2
from emberscale_api.wire import Status
from emberscale_trainer.server import sending
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.transport import listen
from moves import Gate
from waiting import Freed, noted_call


def test_a_switch_adopts_the_next_version(server: Server) -> None:
    server.assign()
    server.hold()
    server.settle()
    server.control.Prepare(
        master_pb2.PrepareRequest(move=1, since=1, routing=server.routing(1, 2), incarnation="i"), CONTEXT
    )
    request = master_pb2.SwitchRequest(barrier=barrier(1), move=1)
    for _ in range(2):
        server.control.Switch(request, CONTEXT)
        assert server.state.core.known == (1, 2)
    assert server.push(0) is Status.MOVED


def test_a_server_with_rows_of_a_bucket_that_returns_is_asked_again(server: Server) -> None:
    server.assign()
    for batch in range(20):
        server.push(batch)
    away, gate = server.routing(1, 2), Gate()
    away.servers.append(master_pb2.PsEndpoint(index=1, incarnation="i1"))
    away.bucket_owners[:] = [1] * BUCKETS
    with server.state.lock:
        server.state.protect_by(gate)
    server.control.Prepare(master_pb2.PrepareRequest(move=1, since=1, routing=away, incarnation="i"), CONTEXT)
    server.hold()
    server.settle()
    server.control.Switch(master_pb2.SwitchRequest(barrier=barrier(1), move=1), CONTEXT)
    assert gate.stopped.wait(SECONDS)
    back = master_pb2.PrepareRequest(move=2, since=2, routing=server.routing(1, 3), incarnation="i")
    assert not server.control.Prepare(back, CONTEXT).done
    gate.open.set()
    back.wait_seconds = SECONDS
    assert server.control.Prepare(back, CONTEXT).done
    assert not sum(server.state.figures().rows.values())


def test_a_server_without_rows_joins_by_a_move_and_knows_what_is_applied(server: Server) -> None:
    prepare = master_pb2.PrepareRequest(
        move=1,
        routing=server.routing(2, 2),
        manifest_json=server.job.to_json(),
        wait_seconds=SECONDS,
        incarnation="i",
    )
    assert server.control.Prepare(prepare, CONTEXT).done
    assert server.state.core.known == (0, 0), "nothing is adopted before the switch"
    assert server.control.Copy(master_pb2.CopyRequest(move=1, incarnation="i"), CONTEXT).ready
    applied = [master_pb2.AppliedBatches(epoch=0, ranges=[0, 3])]
    pulls = [master_pb2.OutstandingPull(session=0, epoch=0, batch=batch, batches=1) for batch in (3, 2)]
    switch = master_pb2.SwitchRequest(barrier=barrier(1, generation=2), move=1, applied=applied, pulls=pulls)
    for _ in range(2):
        assert ranges(server.control.Switch(switch, CONTEXT)) == [[0, 3]]
    assert server.state.core.known == (2, 2)
    assert server.push(3, generation=2) is Status.OK
    assert server.push(2, generation=2) is Status.REPEATED
    assert server.push(4, generation=2) is Status.REFRESH, "its pull was not handed over"


def test_a_server_that_joins_by_a_later_move_orders_though_the_call_of_the_one_before_is_late(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(move: int) -> None:
        request = master_pb2.PrepareRequest(
            move=move,
            routing=server.routing(2, 1 + move),
            manifest_json=server.job.to_json(),
            wait_seconds=SECONDS,
            incarnation="i",
        )
        with suppress(RefusedError):  # a later move ends an earlier one
            server.control.Prepare(request, CONTEXT)

    later, prepared = threading.Thread(target=prepare, args=(2,)), server.state.prepare

    def held_up(move: int, *arguments: Any, **options: Any) -> Transfer:
        transfer = prepared(move, *arguments, **options)
        if move == 1:
            later.start()
            later.join(0.5)  # it gets as far as it can
        return transfer

    monkeypatch.setattr(server.state, "prepare", held_up)
    prepare(1)
    later.join(SECONDS)
    server.control.Switch(master_pb2.SwitchRequest(barrier=barrier(1, generation=2), move=2), CONTEXT)
    assert server.state.core.known == (2, 3)
    assert server.state.core.orders


def test_rows_of_before_are_not_kept_by_a_move_whose_receiver_hangs(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job rolls back once the receiver is lost, and the server needs the memory for the rows that it loads."""
    monkeypatch.setattr(sending, "STALLED_SECONDS", 1e6)
    server.assign()
    server.push(1)
    rows = Freed(segment for table in server.state.tables.slots for segment in table.segments)
    flushes = noted_call(monkeypatch, sending.RowSending, "_flush")
    hanging, address = listen(f"unix://{tmp_path}/hanging.sock")
    with hanging:
        routing = server.routing(1, 2)
        routing.servers.append(master_pb2.PsEndpoint(index=1, incarnation="i1", data_address=address))
        routing.bucket_owners[0] = routing.piece_owners[5] = 1
        server.control.Prepare(master_pb2.PrepareRequest(move=1, since=1, routing=routing, incarnation="i"), CONTEXT)
        assert not server.mover.copy(1, 0).ready
        assert flushes.wait(SECONDS)
        server.assign(generation=2)
        assert rows.wait()


def test_an_abandoned_move_is_not_switched(server: Server) -> None:
    server.assign()
    prepare = master_pb2.PrepareRequest(move=1, since=1, routing=server.routing(1, 2), incarnation="i")
    server.control.Prepare(prepare, CONTEXT)
    server.control.Abandon(master_pb2.AbandonRequest(move=1, incarnation="i"), CONTEXT)
    server.hold()
    server.settle()
    calls: list[tuple[Any, Any]] = [
        (server.control.Prepare, prepare),
        (server.control.Copy, master_pb2.CopyRequest(move=1, incarnation="i")),
        (server.control.HandOver, master_pb2.HandOverRequest(barrier=barrier(1), move=1)),
        (server.control.Switch, master_pb2.SwitchRequest(barrier=barrier(1), move=1)),
    ]
    for call, request in calls:
        with pytest.raises(RefusedError, match="FAILED_PRECONDITION"):
            call(request, CONTEXT)
    server.control.Resume(master_pb2.ResumeRequest(barrier=barrier(1)), CONTEXT)
    assert server.push(0) is Status.OK
