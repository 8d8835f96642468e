"""Jobs with TLS on a real cluster: their own certificates, the brain's certificate, and peers that are refused."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from api_objects import get
from cluster import ENDLESS, Place, assert_exact_so_far, manifest, run, run_in_pod, submit
from installation import RELEASE, SYSTEM, arguments_of, helm_install

pytestmark = [pytest.mark.timeout(1200), pytest.mark.alone]

_CALL = """
import json, sys, grpc
from emberscale_api.rpc import brain_pb2, brain_pb2_grpc, master_pb2, master_pb2_grpc
from emberscale_api.rpc.token import open_channel
said = {}
for name, address, token, authority, answers in json.loads(sys.argv[1]):
    patience = {"timeout": 60 if answers else 10, "wait_for_ready": answers}
    with open_channel(address, token, authority.encode() or None) as channel:
        try:
            if name.startswith("brain"):
                brain_pb2_grpc.BrainStub(channel).GetPlan(brain_pb2.GetPlanRequest(job_uid="none"), **patience)
            else:
                master_pb2_grpc.MasterStub(channel).GetStatus(master_pb2.GetStatusRequest(), **patience)
            said[name] = "OK"
        except grpc.RpcError as error:
            said[name] = error.code().name
open("/dev/termination-log", "w").write(json.dumps(said))
"""


@pytest.fixture
def plain_again(installed: str) -> Iterator[None]:
    """Restores the suite's release after a test that switches TLS on."""
    yield
    helm_install()


def with_tls() -> list[str]:
    """Returns helm's arguments for TLS and the brain, sized for this small cluster."""
    values = [
        "tls.enabled=true",
        "brain.enabled=true",
        "brain.cluster.cpu=2",
        "brain.cluster.memory=6Gi",
        "brain.planning.interval=2s",
        "brain.resources.requests.cpu=50m",
        "postgresql.persistence.enabled=false",
    ]
    return [*arguments_of(values), "--set-json", "brain.bounds.cpuStep=0.5"]  # --set takes no fractions


def secret(name: str, namespace: str) -> dict[str, str]:
    data = get("secret", name, namespace)["data"]
    return {key: base64.b64decode(content).decode() for key, content in data.items()}


def call(place: Place, calls: list[tuple[str, str, str, str, bool]]) -> Any:
    """Returns how calls from a pod beside the job end.

    Each call has a name, an address, a token, an authority in PEM, and whether to wait until it is answered.
    """
    return json.loads(run_in_pod("caller", place, ["python", "-c", _CALL, json.dumps(calls)]))


def test_jobs_get_tls_from_when_it_is_switched_on_and_those_that_run_go_on_as_they_are(
    plain_again: None, place: Place
) -> None:
    # one worker: with two, a busy machine may make one slower than the other, and it would be replaced
    before = submit(manifest("older", place, epochs=ENDLESS), place)
    before.wait_for_samples(1)
    helm_install(*with_tls())
    before.wait_for_samples(before.samples() + 1)
    status = before.status()
    assert [status[role].get("restarts", 0) for role in ("ps", "worker")] == [0, 0]
    assert_exact_so_far(before, place)
    assert secret("older-token", place.namespace).keys() == {"token", "operator-token", "store-password"}

    # only now that the cluster is free: otherwise the brain would make the job wait for room
    document = manifest("secure", place, epochs=ENDLESS)
    document["spec"]["scaling"] = {"profileInterval": "2s", "cooldown": "10s"}
    for role in ("ps", "worker"):
        document["spec"][role] = {"template": document["spec"][role]["template"], "maxReplicas": 2}
    job = submit(document, place)
    job.wait_for_samples(1)
    ours, brains = secret("secure-token", place.namespace), secret("emberscale-brain-tls", SYSTEM)
    master = f"secure-master.{place.namespace}.svc:7070"
    brain, token = f"emberscale-brain.{SYSTEM}.svc:50061", secret("emberscale-brain", SYSTEM)["token"]
    assert job.phase() not in ("Complete", "Failed")
    assert call(
        place,
        [
            ("master, by the job's authority", master, ours["token"], ours["ca.crt"], True),
            ("master, by the brain's", master, ours["token"], brains["ca.crt"], False),
            ("master, plain", master, ours["token"], "", False),
            ("brain, by its own authority", brain, token, brains["ca.crt"], True),
            ("brain, by the job's", brain, token, ours["ca.crt"], False),
            ("brain, plain", brain, token, "", False),
        ],
    ) == {
        "master, by the job's authority": "OK",
        "master, by the brain's": "UNAVAILABLE",
        "master, plain": "UNAVAILABLE",
        "brain, by its own authority": "NOT_FOUND",
        "brain, by the job's": "UNAVAILABLE",
        "brain, plain": "UNAVAILABLE",
    }
    job.until("a plan of the brain", lambda status: (status.get("plan") or {}).get("brainVersion"), seconds=240)
    assert_exact_so_far(job, place)

    run("helm", "test", RELEASE, "-n", SYSTEM, "--timeout=120s", timeout=150)
    helm_install(*with_tls())
    assert secret("emberscale-brain-tls", SYSTEM) == brains
