"""Asynchronous calls to parameter servers: each reports its answer when it arrives."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from emberscale_api.checkpoint import is_flash, number_of
from emberscale_api.job.status import MAX_COUNT
from emberscale_api.routing import PsAddress
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.codec import damaged_file_of, message_of, same_fields
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
    ServerRequest,
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
    """Channels to the parameter servers of a job, one per address, kept open.

    * `manifest`: the job's manifest, as JSON.
    * `uri_of`: returns the URI of a checkpoint by its id.
    * `tell`: is called with the answer to each call, from any thread.
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
        method, kind, read = _CALLS[type(call.request)]
        request = self._message(kind, call.server, call.request)
        future = getattr(self._stub(call.server), method).future(request, timeout=call.seconds)
        # Even if nobody waits for the answer: gRPC cancels a call without references.
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
        where: dict[str, Any] = {"operation": call.operation, "serial": call.serial, "server": call.server.index}
        try:
            reply = done.result()
            messages.check_numbers(reply)
            answer = read(reply)
        except grpc.RpcError as error:
            problem, file = error.details() or "", damaged_file_of(error)
            return ServerFailed(now=self._now(), code=error.code().name, problem=problem, damaged_file=file, **where)
        except grpc.FutureCancelledError:
            return ServerFailed(now=self._now(), code="CANCELLED", problem="the call was abandoned", **where)
        except ValueError as error:
            return ServerFailed(now=self._now(), code="INTERNAL", problem=str(error), **where)
        return ServerAnswered(now=self._now(), answer=answer, **where)

    def _message(self, kind: type[Message], server: PsAddress, asked: ServerRequest) -> Message:
        known: dict[str, Any] = {"incarnation": server.incarnation}
        match asked:
            case AssignCall() | PrepareCall():
                known["routing"] = messages.wire_routing(asked.table, ready=False)
                known["manifest_json"] = self._manifest
                known["checkpoint_uri"] = self._uri_of(asked.checkpoint) if asked.checkpoint else ""
                order = asked.parity
                known |= {"parity": order.parity, "no_parity": order.is_forgone, "async_parity": order.is_async}
            case HoldCall() | SettleCall() | SnapshotCall() | ResumeCall() | HandOverCall() | SwitchCall():
                seconds = getattr(asked, "hold_seconds", 0.0)
                known["barrier"] = message_of(pb.Barrier, asked, number=asked.barrier, hold_seconds=seconds, **known)
        match asked:
            case PrepareCall(priority=saves):
                known["priority_uris"] = [self._uri_of(save) for save in saves]
            case HoldCall(checkpoint=checkpoint):
                known["checkpoint"] = number_of(checkpoint) if checkpoint else 0
            case SettleCall(settle=batches):
                known["settle"] = messages.wire_applied(batches)
            case SnapshotCall(checkpoint=checkpoint):
                known["uri"] = checkpoint if is_flash(checkpoint) else f"{self._uri_of(checkpoint)}/"
            case SwitchCall(applied=batches, rebuilt=rebuilt):
                known["applied"] = messages.wire_applied(batches)
                known["rebuilt"] = [
                    pb.RebuiltRows(server=server, applied=messages.wire_applied(has)) for server, has in rebuilt.items()
                ]
        return message_of(kind, asked, **known)

    def _stub(self, server: PsAddress) -> rpc.ParameterServerStub:
        with self._lock:
            channel = self._channels.get(server.control)
            if channel is None:
                channel = open_channel(server.control, self._token, self._authority)
                self._channels[server.control] = channel
        return rpc.ParameterServerStub(channel)


def _loaded(reply: pb.AssignReply) -> Loaded:
    return same_fields(Loaded, reply, applied=messages.applied(reply.applied))


def _saved(reply: pb.GetSavedReply) -> Saved:
    if sum(file.bytes for file in reply.files) > MAX_COUNT:
        raise ValueError("the files of a checkpoint have more bytes than any storage holds")
    return same_fields(Saved, reply)


def _copied(reply: pb.CopyReply) -> CopyReport:
    rebuilt = {rows.server: messages.applied(rows.applied) for rows in reply.rebuilt}
    return same_fields(CopyReport, reply, rebuilt=rebuilt)


def _said(reply: pb.HoldReply | pb.SettleReply | pb.SwitchReply) -> AppliedReport:
    return AppliedReport(messages.applied(reply.applied))


def _handed_over(reply: pb.HandOverReply) -> AppliedReport:
    pulls = tuple(same_fields(HandedPull, pull) for pull in reply.pulls)
    return AppliedReport(messages.applied(reply.applied), pulls=pulls)


def _snapshot_said(reply: pb.SnapshotReply) -> AppliedReport:
    return AppliedReport(messages.applied(reply.applied), reply.held_seconds)


def _nothing(_: pb.ResumeReply | pb.AbandonReply) -> AppliedReport:
    return AppliedReport({})


_CALLS: Mapping[type[ServerRequest], tuple[str, type[Message], Callable[[Any], ServerAnswer]]] = {
    AssignCall: ("Assign", pb.AssignRequest, _loaded),
    HoldCall: ("Hold", pb.HoldRequest, _said),
    SettleCall: ("Settle", pb.SettleRequest, _said),
    SnapshotCall: ("Snapshot", pb.SnapshotRequest, _snapshot_said),
    ResumeCall: ("Resume", pb.ResumeRequest, _nothing),
    SavedCall: ("GetSaved", pb.GetSavedRequest, _saved),
    PrepareCall: ("Prepare", pb.PrepareRequest, partial(same_fields, Prepared)),
    CopyCall: ("Copy", pb.CopyRequest, _copied),
    HandOverCall: ("HandOver", pb.HandOverRequest, _handed_over),
    SwitchCall: ("Switch", pb.SwitchRequest, _said),
    AbandonCall: ("Abandon", pb.AbandonRequest, _nothing),
}
"""By the type of a request, its method and message, and what reads the reply."""
