"""The master of a run under way, as other commands reach it."""

from pathlib import Path

import grpc

from emberscale._run.scaling import BETWEEN_LAUNCHES
from emberscale_api.errors import InvalidError, UnavailableError
from emberscale_api.job.roles import Role
from emberscale_api.job.running import JobStatus
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_api.rpc.running_codec import status_from_wire
from emberscale_api.rpc.token import open_channel
from emberscale_operator.local.folder import RunFolder


def open_master(root: Path, folder: RunFolder) -> grpc.Channel:
    """A channel to the master of the run under way in `root`, whose processes have this folder.

    Raises InvalidError where no master listens at the moment.
    """
    try:
        address = folder.master_address.read_text(encoding="utf-8")
        token = folder.operator_token.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InvalidError(f"{root}: {BETWEEN_LAUNCHES}") from error
    return open_channel(address, token)


def status_of(master: MasterStub, seconds: float) -> JobStatus:
    """Asks the master for the status of its job. Raises grpc.RpcError if it does not answer within `seconds`."""
    return status_from_wire(master.GetStatus(pb.GetStatusRequest(), timeout=seconds))


def unanswered(root: Path, error: grpc.RpcError) -> UnavailableError:
    """Returns the error of a call that the master of the run in `root` does not answer."""
    return UnavailableError(f"{root}: the master of the run does not answer ({error.details()})")


def live_servers(status: JobStatus) -> dict[int, str]:
    """Returns the incarnations of the parameter servers that the master considers alive, by index."""
    return {
        one.member.index: one.member.incarnation for one in status.members if one.member.role is Role.PS and one.alive
    }
