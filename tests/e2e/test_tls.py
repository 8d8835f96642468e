"""A job whose whole process tree has certificates: master, parameter servers, workers and the brain beside it."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from certificates import certificate_folder
from emberscale_api.environment import TLS_FOLDER
from emberscale_api.rpc import master_pb2 as pb
from emberscale_api.rpc.master_pb2_grpc import MasterStub
from emberscale_api.rpc.token import open_channel
from local_jobs import Job

OPEN: dict[str, Any] = {
    "ps": {"replicas": None, "maxReplicas": 2},
    "worker": {"replicas": None, "maxReplicas": 2},
    "training": {"epochs": 2},
}


def refusal(address: str, authority: bytes | None) -> grpc.StatusCode:
    """What somebody hears who does not know the token."""
    with open_channel(address, "a guess", authority) as channel, pytest.raises(grpc.RpcError) as raised:
        MasterStub(channel).GetStatus(pb.GetStatusRequest(), timeout=20)
    return raised.value.code()


def master_address(job: Job) -> str:
    """As the master's first line says."""
    log = job.run_folder / "logs" / "master-0.log"
    job.wait_for(lambda: log.exists() and '"serving"' in log.read_text())
    (line,) = (line for line in log.read_text().splitlines() if '"serving"' in line)
    return str(json.loads(line)["address"])


def test_a_job_with_certificates_trains_as_any_other(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = certificate_folder(tmp_path / "tls")
    monkeypatch.setenv(TLS_FOLDER, str(folder))
    job = make_job(OPEN)
    job.start()
    address = master_address(job)
    assert refusal(address, (folder / "ca.crt").read_bytes()) is grpc.StatusCode.UNAUTHENTICATED
    assert refusal(address, None) is grpc.StatusCode.UNAVAILABLE
    finished = job.finish()
    assert finished.summary["phase"] == "Complete", finished.stderr + job.logs()[-8000:]
    assert finished.summary["plan"]["version"] >= 1, "the brain was heard"
    audit = job.exact_audit()
    assert audit["once"] == finished.summary["expected_samples"]


def test_certificates_that_are_of_no_use_keep_a_job_from_starting(
    make_job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS_FOLDER, str(certificate_folder(tmp_path / "tls", ended=timedelta(days=2))))
    finished = make_job().run()
    assert finished.code == 2
    assert f"{tmp_path}/tls/tls.crt: is refused" in finished.stderr
    assert "certificate has expired" in finished.stderr
