"""`emberscale drain`: what it refuses, and which master it asks; tests/e2e runs it next to a job."""

from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.sdk.test_scale import held
from typer.testing import CliRunner

from emberscale._cli import app
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterServicer, add_MasterServicer_to_server
from emberscale_api.rpc.token import TokenCheck
from emberscale_operator.local.folder import RunFolder

__all__ = ["held"]


class Master(MasterServicer):
    """A master that answers a drain with `reply`; ps-0 and ps-1 are alive."""

    def __init__(self) -> None:
        self.asked: list[pb.DrainRequest] = []
        self.reply = pb.DrainReply(begun=True)

    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.JobStatus:
        members = [pb.Member(role=pb.PS, index=index, incarnation=f"life-{index}") for index in range(3)]
        members.append(pb.Member(role=pb.WORKER, index=7, incarnation="life-7"))
        return pb.JobStatus(members=[pb.MemberStatus(member=one, alive=one.index != 2) for one in members])

    def Replace(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        self.asked.append(request)
        return self.reply


@pytest.fixture
def master(held: Path) -> Iterator[Master]:
    """The master of the run in `held`; it accepts drains only from the operator."""
    folder = RunFolder(held)
    master = Master()  # type: ignore[abstract]  # nobody makes the other calls
    check = TokenCheck("a job's", folder.operator_token.read_text(), ("Replace",))
    server = grpc.server(futures.ThreadPoolExecutor(2), interceptors=[check])
    add_MasterServicer_to_server(master, server)
    folder.master_address.write_text(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    yield master
    server.stop(None).wait(60)


def drain(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["drain", *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_the_master_of_the_run_is_asked(held: Path, master: Master) -> None:
    told = f"{held}: ps-1 gives its rows away and is replaced; training continues meanwhile"
    assert drain(held, "ps-1") == (0, told)
    (asked,) = master.asked
    assert (asked.index, asked.incarnation) == (1, "life-1")


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (pb.DrainReply(), "ps-1: nobody can take over its rows now"),
        (pb.DrainReply(may_go=True), "ps-1: it owns no rows now, so there is nothing to drain"),
    ],
)
def test_a_drain_that_has_not_begun_is_refused(held: Path, master: Master, reply: pb.DrainReply, said: str) -> None:
    master.reply = reply
    code, output = drain(held, "ps-1")
    assert code == 2
    assert said in output


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("ps-2", "ps-2: no such parameter server runs; running are ps-0, ps-1"),
        ("ps-7", "ps-7: no such parameter server runs"),
        ("worker-7", "worker-7: only parameter servers hold rows; name one, such as ps-1"),
        ("1", "1: write the name of a parameter server, such as ps-1"),
        ("ps-01", "ps-01: write the name of a parameter server"),
        ("ps-", "ps-: write the name of a parameter server"),
    ],
)
def test_other_names_are_refused(held: Path, master: Master, server: str, said: str) -> None:
    code, output = drain(held, server)
    assert code == 2
    assert said in output
    assert not master.asked


def test_a_run_that_is_just_starting_is_to_be_asked_again(held: Path) -> None:
    RunFolder(held).master_address.unlink()
    code, output = drain(held, "ps-0")
    assert code == 2
    assert "the run is just starting, or about to end; try again in a moment" in output


def test_a_master_that_is_away_is_said(held: Path) -> None:
    code, output = drain(held, "ps-0")
    assert code == 2
    assert "the master of the run does not answer" in output
