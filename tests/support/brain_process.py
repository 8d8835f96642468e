"""A brain in its own process, for tests that call it."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc

from emberscale_api.environment import TLS_FOLDER
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc import brain_pb2_grpc
from emberscale_api.rpc.token import open_channel
from eventually import eventually

# As `python -m emberscale_brain`, but its answers wait for a disk that is busy for longer than a master would.
_PROGRAM = """
import sys
from emberscale_brain.__main__ import main
from emberscale_brain.service import server

server._DURABLE_SECONDS = 60.0
sys.exit(main())
"""


class BrainProcess:
    """The brain as a process on a free port, with `path=value` settings; `stub` sends its token.

    It serves TLS with the certificates of `tls_folder`, if given.
    """

    def __init__(self, token_file: Path, log: Path, settings: Sequence[str], tls_folder: Path | None = None) -> None:
        self.log = log
        fixed = ["listen=127.0.0.1:0", "metrics=null", f"tokenFile={token_file}"]
        arguments = [part for setting in [*fixed, *settings] for part in ("--set", setting)]
        variables = {**os.environ, **({TLS_FOLDER: str(tls_folder)} if tls_folder else {})}
        authority = (tls_folder / "ca.crt").read_bytes() if tls_folder else None
        with log.open("w") as file:
            self._process = subprocess.Popen([sys.executable, "-c", _PROGRAM, *arguments], stderr=file, env=variables)
        self.address = f"127.0.0.1:{eventually(self._port)}"
        self._channel = open_channel(self.address, token_file.read_text(), authority)
        self.stub = brain_pb2_grpc.BrainStub(self._channel)

    @property
    def pid(self) -> int:
        """The id of the service, not of its planning process."""
        return self._process.pid

    def kill(self) -> None:
        """Kills it, as a crash would."""
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Returns its exit code once it has ended by itself."""
        return self._process.wait(timeout=60)

    def stop(self) -> None:
        """Stops it as Kubernetes would: SIGTERM first, SIGKILL if that takes too long."""
        self._channel.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()

    def report(self, job: str, *profiles: pb.Profile) -> pb.ReportProfileReply:
        reply: pb.ReportProfileReply = self.stub.ReportProfile(
            pb.ReportProfileRequest(job_uid=job, profiles=profiles), timeout=60
        )
        return reply

    def knows(self, job: str) -> bool:
        """Whether the job was submitted, and has not ended."""
        try:
            self.stub.GetPlan(pb.GetPlanRequest(job_uid=job), timeout=60)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return False
        return True

    def later_plan(self, job: str, newer_than: int) -> pb.BrainPlan:
        """Waits for a plan newer than a version, and returns it."""
        request = pb.GetPlanRequest(job_uid=job)
        eventually(lambda: self.stub.GetPlan(request, timeout=60).version > newer_than)
        plan: pb.BrainPlan = self.stub.GetPlan(request, timeout=60)
        return plan

    def _port(self) -> int | None:
        ended = self._process.poll() is not None
        for line in self.log.read_text().splitlines():
            if '"serving"' in line:
                return int(json.loads(line)["port"])
        if ended:
            raise RuntimeError(f"the brain ended: {self.log.read_text()}")
        return None
