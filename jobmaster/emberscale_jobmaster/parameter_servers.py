"""Asynchronous calls to parameter servers: each reports its answer when it arrives."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc

from emberscale_api.checkpoint import is_flash, number_of
from emberscale_api.job.status import MAX_COUNT
from emberscale_api.routing import PsAddress
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc import master_pb2_grpc as rpc
from emberscale_api.rpc.codec import message_of, same_fields
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
        method, request, read = self._translated(call)
        future = method.future(request, timeout=call.seconds)
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
        where = {"operation": call.operation, "serial": call.serial, "server": call.server.index}
        try:
            reply = done.result()
            messages.check_numbers(reply)
            answer = read(reply)
        except grpc.RpcError as error:
            return ServerFailed(now=self._now(), code=error.code().name, problem=error.details() or "", **where)
        except grpc.FutureCancelledError:
            return ServerFailed(now=self._now(), code="CANCELLED", problem="the call was abandoned", **where)
        except ValueError as error:
            return ServerFailed(now=self._now(), code="INTERNAL", problem=str(error), **where)
        return ServerAnswered(now=self._now(), answer=answer, **where)

    def _translated(self, call: CallServer) -> tuple[Any, Any, Callable[[Any], ServerAnswer]]:
        stub, server, asked = self._stub(call.server), call.server, call.request
        match asked:
            case AssignCall():
                assign = message_of(pb.AssignRequest, asked, **self._begun_with(asked))
                return stub.Assign, assign, _loaded
            case HoldCall():
                barrier = _barrier(server, asked, asked.hold_seconds)
                taken = number_of(asked.checkpoint) if asked.checkpoint else 0
                return stub.Hold, message_of(pb.HoldRequest, asked, barrier=barrier, checkpoint=taken), _said
            case SettleCall():
                barrier = _barrier(server, asked, asked.hold_seconds)
                settle = messages.wire_applied(asked.settle)
                return stub.Settle, message_of(pb.SettleRequest, asked, barrier=barrier, settle=settle), _said
            case SnapshotCall(checkpoint=checkpoint):
                barrier = _barrier(server, asked, asked.hold_seconds)
                uri = checkpoint if is_flash(checkpoint) else f"{self._uri_of(checkpoint)}/"
                return stub.Snapshot, message_of(pb.SnapshotRequest, asked, barrier=barrier, uri=uri), _snapshot_said
            case ResumeCall():
                return stub.Resume, pb.ResumeRequest(barrier=_barrier(server, asked)), _nothing
            case SavedCall():
                saved = message_of(pb.GetSavedRequest, asked, incarnation=server.incarnation)
                return stub.GetSaved, saved, _saved
            case PrepareCall():
                saves = [self._uri_of(save) for save in asked.priority]
                prepare = message_of(
                    pb.PrepareRequest,
                    asked,
                    **self._begun_with(asked),
                    incarnation=server.incarnation,
                    priority_uris=saves,
                )
                return stub.Prepare, prepare, partial(same_fields, Prepared)
            case CopyCall():
                return stub.Copy, message_of(pb.CopyRequest, asked, incarnation=server.incarnation), _copied
            case HandOverCall():
                barrier = _barrier(server, asked, asked.hold_seconds)
                return stub.HandOver, message_of(pb.HandOverRequest, asked, barrier=barrier), _handed_over
            case SwitchCall():
                applied = messages.wire_applied(asked.applied)
                switch = message_of(pb.SwitchRequest, asked, barrier=_barrier(server, asked), applied=applied)
                return stub.Switch, switch, _said
            case AbandonCall():
                return stub.Abandon, pb.AbandonRequest(move=asked.move, incarnation=server.incarnation), _nothing

    def _begun_with(self, asked: AssignCall | PrepareCall) -> dict[str, Any]:
        """Returns what a server needs to know about its job."""
        return {
            "routing": messages.wire_routing(asked.table, ready=False),
            "manifest_json": self._manifest,
            "checkpoint_uri": self._uri_of(asked.checkpoint) if asked.checkpoint else "",
        }

    def _stub(self, server: PsAddress) -> rpc.ParameterServerStub:
        with self._lock:
            channel = self._channels.get(server.control)
            if channel is None:
                channel = open_channel(server.control, self._token, self._authority)
                self._channels[server.control] = channel
        return rpc.ParameterServerStub(channel)


def _barrier(
    server: PsAddress,
    asked: HoldCall | SettleCall | SnapshotCall | ResumeCall | HandOverCall | SwitchCall,
    hold_seconds: float = 0.0,
) -> pb.Barrier:
    named = {"number": asked.barrier, "hold_seconds": hold_seconds, "incarnation": server.incarnation}
    return message_of(pb.Barrier, asked, **named)


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
