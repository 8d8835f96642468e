"""Drains a parameter server of a run under way: its rows move away, and another process takes its place."""

from pathlib import Path

import grpc

from emberscale._drill import check_runs
from emberscale._run.master import live_servers, open_master, status_of, unanswered
from emberscale._run.scaling import folder_under_way
from emberscale_api.errors import InvalidError
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterStub

_CALL_SECONDS = 20.0
_REASON = "`emberscale drain`"


def drain_run(root: Path, index: int) -> None:
    """Begins to drain and replace a parameter server of the run in this folder.

    Raises InvalidError with the reason if the server cannot be drained, and UnavailableError if the master does not
    answer.
    """
    with open_master(root, folder_under_way(root)) as channel:
        stub: MasterStub = MasterStub(channel)
        try:
            _replace(stub, index)
        except grpc.RpcError as error:
            raise unanswered(root, error) from error


def _replace(stub: MasterStub, index: int) -> None:
    """Raises InvalidError if the server cannot be drained, and grpc.RpcError if the call fails."""
    servers = live_servers(status_of(stub, _CALL_SECONDS))
    check_runs(index, servers)
    asked = pb.DrainRequest(index=index, incarnation=servers[index], reason=_REASON)
    reply = stub.Replace(asked, timeout=_CALL_SECONDS)
    if reply.begun:
        return
    if reply.may_go:
        raise InvalidError(f"ps-{index}: it owns no rows now, so there is nothing to drain")
    others = "the other parameter servers are leaving, or have yet to start"
    raise InvalidError(f"ps-{index}: nobody can take over its rows now: {others}; try again in a moment")
