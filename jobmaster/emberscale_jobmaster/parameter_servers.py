"""Asynchronous calls to parameter servers: each reports its answer when it arrives."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import grpc

from emberscale_api.checkpoint import CheckpointFile, is_flash, number_of
from emberscale_api.routing import PsAddress
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.token import open_channel
from emberscale_jobmaster import messages
from emberscale_jobmaster.effects import (
    AbandonCall,
    AssignCall,
    CallServer,
    CopyCall,
    HandOverCall,
    HoldCall,
    PrepareCall,
    ResumeCall,
    SavedCall,
    SettleCall,
    SnapshotCall,
    SwitchCall,
)
from emberscale_jobmaster.events import (
    AppliedReport,
    Event,
    Loaded,
    Prepared,
    Saved,
    ServerAnswer,
    ServerAnswered,
    ServerFailed,
)
from emberscale_jobmaster.operations import CopyReport, HandedPull


class ServerChannels:
    """Channels to the parameter servers of a job, one an address, kept open.

    `manifest` is the job's, as JSON; `uri_of` says where a checkpoint of an id is. `tell` is called with the answer to
    each call, from any thread.
    """

    def __init__(
        self,
        token: str,
        authority: bytes | None,
        manifest: str,
        uri_of: Callable[[str], str],
        tell: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        self._token = token
        self._authority = authority
        self._manifest = manifest
        self._uri_of = uri_of
        self._tell = tell
        self._now = now
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}

    def start(self, call: CallServer) -> None:
        """Begins a call."""
        method, request, read = self._translated(call)
        future = method.future(request, timeout=call.seconds)
        # Even where nobody waits for the answer: gRPC cancels a call that nothing refers to.
        future.add_done_callback(lambda done: self._answered(call, done, read))

    def forget(self, keep: Sequence[PsAddress]) -> None:
        """Closes the channels to all but these servers."""
        addresses = {server.control for server in keep}
        with self._lock:
            left = [self._channels.pop(address) for address in self._channels.keys() - addresses]
        for channel in left:
            channel.close()

    def _answered(self, call: CallServer, done: "grpc.Future[Any]", read: Callable[[Any], ServerAnswer]) -> None:
        try:
            self._tell(self._event(call, done, read))
        except Exception as error:  # noqa: BLE001  # gRPC would drop it, and the caller would wait forever
            found = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(found))

    def _event(self, call: CallServer, done: "grpc.Future[Any]", read: Callable[[Any], ServerAnswer]) -> Event:
        where = {"operation": call.operation, "serial": call.serial, "server": call.server.index}
        try:
            answer = read(done.result())
        except grpc.RpcError as error:
            return ServerFailed(now=self._now(), code=error.code().name, problem=error.details() or "", **where)
        except grpc.FutureCancelledError:
            return ServerFailed(now=self._now(), code="CANCELLED", problem="the call was abandoned", **where)
        except ValueError as error:
            return ServerFailed(now=self._now(), code="INTERNAL", problem=str(error), **where)
        return ServerAnswered(now=self._now(), answer=answer, **where)

    def _translated(self, call: CallServer) -> tuple[Any, Any, Callable[[Any], ServerAnswer]]:
        stub = self._stub(call.server)
        match call.request:
            case AssignCall(table=table, checkpoint=checkpoint, wait_seconds=seconds, anew=anew):
                assign = pb.AssignRequest(
                    routing=messages.wire_routing(table, ready=False),
                    manifest_json=self._manifest,
                    checkpoint_uri=self._uri_of(checkpoint) if checkpoint else "",
                    wait_seconds=seconds,
                    anew=anew,
                )
                return stub.Assign, assign, _loaded
            case HoldCall(generation=generation, version=version, barrier=number, hold_seconds=seconds) as hold:
                barrier = _barrier(call.server, generation, number, seconds)
                taken = number_of(hold.checkpoint) if hold.checkpoint else 0
                return stub.Hold, pb.HoldRequest(barrier=barrier, version=version, checkpoint=taken), _said
            case SettleCall(generation=generation, barrier=number, hold_seconds=seconds) as call_to_settle:
                settle = pb.SettleRequest(
                    barrier=_barrier(call.server, generation, number, seconds),
                    settle=messages.wire_applied(call_to_settle.settle),
                    wait_seconds=call_to_settle.wait_seconds,
                )
                return stub.Settle, settle, _said
            case (
                SnapshotCall(generation=generation, barrier=number, hold_seconds=seconds, checkpoint=checkpoint) as take
            ):
                uri = checkpoint if is_flash(checkpoint) else f"{self._uri_of(checkpoint)}/"
                barrier = _barrier(call.server, generation, number, seconds)
                snapshot = pb.SnapshotRequest(
                    barrier=barrier,
                    uri=uri,
                    flash_bytes=take.flash_bytes,
                    weight_bits=take.weight_bits,
                    tracked=take.tracked,
                    since=take.since,
                )
                return stub.Snapshot, snapshot, _snapshot_said
            case ResumeCall(generation=generation, barrier=number):
                return stub.Resume, pb.ResumeRequest(barrier=_barrier(call.server, generation, number, 0.0)), _nothing
            case SavedCall(generation=generation, barrier=number, wait_seconds=seconds):
                saved = pb.GetSavedRequest(
                    generation=generation,
                    barrier=number,
                    wait_seconds=seconds,
                    incarnation=call.server.incarnation,
                )
                return stub.GetSaved, saved, _saved
            case PrepareCall(move=move, since=since, table=table, wait_seconds=seconds) as prepared:
                prepare = pb.PrepareRequest(
                    move=move,
                    since=since,
                    routing=messages.wire_routing(table, ready=False),
                    manifest_json=self._manifest,
                    wait_seconds=seconds,
                    incarnation=call.server.incarnation,
                    checkpoint_uri=self._uri_of(prepared.checkpoint) if prepared.checkpoint else "",
                    lost=prepared.lost,
                    priority_uris=[self._uri_of(save) for save in prepared.priority],
                )
                return stub.Prepare, prepare, _prepared
            case CopyCall(move=move, wait_seconds=seconds, spare_seconds=spare):
                copy = pb.CopyRequest(
                    move=move, wait_seconds=seconds, incarnation=call.server.incarnation, spare_seconds=spare
                )
                return stub.Copy, copy, _copied
            case HandOverCall(generation=generation, barrier=number, hold_seconds=seconds, move=move) as last:
                barrier = _barrier(call.server, generation, number, seconds)
                hand_over = pb.HandOverRequest(barrier=barrier, move=move, wait_seconds=last.wait_seconds)
                return stub.HandOver, hand_over, _handed_over
            case SwitchCall(generation=generation, barrier=number, move=move, applied=applied, pulls=handed):
                barrier = _barrier(call.server, generation, number, 0.0)
                pulls = [pb.OutstandingPull(**asdict(pull)) for pull in handed]
                switch = pb.SwitchRequest(
                    barrier=barrier, move=move, applied=messages.wire_applied(applied), pulls=pulls
                )
                return stub.Switch, switch, _said
            case AbandonCall(move=move):
                return stub.Abandon, pb.AbandonRequest(move=move, incarnation=call.server.incarnation), _nothing

    def _stub(self, server: PsAddress) -> rpc.ParameterServerStub:
        with self._lock:
            channel = self._channels.get(server.control)
            if channel is None:
                channel = open_channel(server.control, self._token, self._authority)
                self._channels[server.control] = channel
        return rpc.ParameterServerStub(channel)


def _barrier(server: PsAddress, generation: int, number: int, hold_seconds: float) -> pb.Barrier:
    return pb.Barrier(generation=generation, number=number, hold_seconds=hold_seconds, incarnation=server.incarnation)


def _loaded(reply: pb.AssignReply) -> Loaded:
    return Loaded(reply.done, reply.loaded_bytes, reply.problem, messages.applied(reply.applied))


def _prepared(reply: pb.PrepareReply) -> Prepared:
    return Prepared(reply.done, reply.loaded_bytes, reply.problem)


def _copied(reply: pb.CopyReply) -> CopyReport:
    rebuilt = {rows.server: messages.applied(rows.applied) for rows in reply.rebuilt}
    return CopyReport(reply.ready, reply.copied_bytes, reply.rounds, reply.changed_rows, rebuilt)


def _said(reply: pb.HoldReply | pb.SettleReply | pb.SwitchReply) -> AppliedReport:
    return AppliedReport(messages.applied(reply.applied))


def _handed_over(reply: pb.HandOverReply) -> AppliedReport:
    pulls = tuple(
        HandedPull(pull.session, pull.epoch, pull.batch, pull.token, pull.unseen, pull.batches, pull.is_round)
        for pull in reply.pulls
    )
    return AppliedReport(messages.applied(reply.applied), pulls=pulls)


def _snapshot_said(reply: pb.SnapshotReply) -> AppliedReport:
    return AppliedReport(messages.applied(reply.applied), reply.held_seconds)


def _saved(reply: pb.GetSavedReply) -> Saved:
    files = tuple(
        CheckpointFile(path=file.path, bytes=file.bytes, crc32=file.crc32, checkpoint=file.checkpoint)
        for file in reply.files
    )
    return Saved(reply.done, reply.written_bytes, reply.problem, files, reply.examined_rows)


def _nothing(_: pb.ResumeReply | pb.AbandonReply) -> AppliedReport:
    return AppliedReport({})
