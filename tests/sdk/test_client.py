"""The client against a fake API server; tests/kubernetes runs it against a real one."""

import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from emberscale._client import ClusterError, JobNotFoundError, TrainingJobClient
from emberscale_api.job.status import JobPhase
from training_jobs import job_body, training_job

JOBS = "/apis/emberscale.io/v1alpha1/namespaces/team-a/trainingjobs"
END = object()


class ApiServer(ThreadingHTTPServer):
    """A fake API server with one collection of TrainingJobs. A watch sends the items of `events`, and ends at END."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.jobs: dict[str, dict[str, Any]] = {}
        self.events: queue.Queue[Any] = queue.Queue()
        self.watches: list[str] = []
        self.patches: list[Any] = []
        self.submitted: list[Any] = []
        self.evictions: list[str] = []
        self.deletions: list[tuple[str, Any]] = []
        self.refusal_of_evictions: tuple[int, str] | None = None

    def put(self, name: str, phase: str) -> dict[str, Any]:
        job = {"metadata": {"name": name, "resourceVersion": "7"}, "status": {"phase": phase, "message": "as it is"}}
        self.jobs[name] = job
        return job

    def change(self, name: str, phase: str, kind: str = "MODIFIED") -> None:
        self.events.put({"type": kind, "object": self.put(name, phase)})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ApiServer

    def log_message(self, *arguments: Any) -> None:
        return

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        if "watch" in query:
            self._watch(query["resourceVersion"][0])
        elif address.path == JOBS:
            wanted = query.get("fieldSelector", [""])[0].removeprefix("metadata.name=")
            items = [job for name, job in self.server.jobs.items() if wanted in ("", name)]
            self._answer(200, {"metadata": {"resourceVersion": "7"}, "items": items})
        else:
            name = address.path.rpartition("/")[2]
            job = self.server.jobs.get(name)
            missing = {"message": f'trainingjobs.emberscale.io "{name}" not found'}
            self._answer(200 if job else 404, job or missing)

    def do_PATCH(self) -> None:
        self.server.patches.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(200, {})

    def do_POST(self) -> None:
        if self.path.endswith("/eviction"):
            self.server.evictions.append(self.path)
            status, message = self.server.refusal_of_evictions or (201, "")
            self._answer(status, {"message": message})
            return
        self.server.submitted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._answer(422, {"message": "spec.training.batchSize: Invalid value: 0"})

    def do_DELETE(self) -> None:
        address = urlsplit(self.path)
        self.server.deletions.append((address.path, parse_qs(address.query).get("gracePeriodSeconds")))
        self._answer(200, {})

    def _answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self, version: str) -> None:
        self.server.watches.append(version)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while (event := self.server.events.get(timeout=30)) is not END:
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
            if event["type"] == "ERROR":
                break
        self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    context = {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "team-a"}}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "me", "user": {"token": "x"}}],
        "contexts": [context],
        "current-context": "here",
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield server
    server.events.put(END)
    server.shutdown()
    thread.join()
    server.server_close()


def test_waiting_ends_with_the_job_and_sees_every_status_on_the_way(server: ApiServer) -> None:
    server.put("ctr", "Pending")
    client, seen = TrainingJobClient(), list[JobPhase]()
    for phase in ("Training", "Saving", "Complete"):
        server.change("ctr", phase)
    server.put("ctr", "Pending")
    assert client.namespace == "team-a"
    assert client.wait("ctr", observer=lambda status: seen.append(status.phase)).phase is JobPhase.COMPLETE
    assert seen == ["Pending", "Training", "Saving", "Complete"]
    assert server.watches == ["7"]


def test_a_watch_that_ends_is_begun_anew(server: ApiServer) -> None:
    server.put("ctr", "Training")
    server.events.put({"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}})
    server.events.put(END)
    server.change("ctr", "Failed")
    server.put("ctr", "Training")
    assert TrainingJobClient().wait("ctr").phase is JobPhase.FAILED
    assert len(server.watches) == 3


def test_a_job_that_is_deleted_is_not_waited_for(server: ApiServer) -> None:
    server.put("ctr", "Training")
    server.change("ctr", "Training", kind="DELETED")
    with pytest.raises(JobNotFoundError, match="ctr was deleted"):
        TrainingJobClient().wait("ctr")


def test_a_job_that_does_not_exist_is_named(server: ApiServer) -> None:
    for ask in (TrainingJobClient().wait, TrainingJobClient().status):
        with pytest.raises(JobNotFoundError, match='"ctr" not found'):
            ask("ctr")


def test_waiting_is_given_up_in_time_and_says_where_the_job_stands(server: ApiServer) -> None:
    server.put("ctr", "Training")
    server.events.put(END)
    with pytest.raises(TimeoutError, match=r"ctr is Training after 10ms: as it is"):
        TrainingJobClient().wait("ctr", timeout=0.01)


def test_the_api_servers_words_are_passed_on(server: ApiServer, tmp_path: Path) -> None:
    manifest = {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "ctr"},
        "spec": {"data": {"train": ["/data/*.tsv"]}},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    with pytest.raises(ClusterError, match=r"^spec\.training\.batchSize: Invalid value: 0$"):
        TrainingJobClient().submit(tmp_path / "job.yaml")


def test_durations_are_submitted_in_words(server: ApiServer) -> None:
    job = training_job(
        sharding={"heartbeatInterval": 0.5},
        checkpoint={"interval": 90, "flash": {"interval": 7.5}},
        runPolicy={"activeDeadline": "14d"},
    )
    with pytest.raises(ClusterError):
        TrainingJobClient().submit(job)
    (body,) = server.submitted
    assert body["spec"]["sharding"] == {"heartbeatInterval": "0.5s"}
    assert body["spec"]["checkpoint"] == {"interval": "90s", "flash": {"interval": "7.5s"}}
    assert body["spec"]["runPolicy"] == {"activeDeadline": "1209600s"}


def test_a_phase_of_a_newer_version_is_said_in_a_line(server: ApiServer) -> None:
    server.put("ctr", "Rebalancing")
    with pytest.raises(
        ClusterError, match=r"^TrainingJob ctr: .* cannot read status\.phase \('Rebalancing'\); install"
    ):
        TrainingJobClient().status("ctr")


def test_suspending_and_resuming_edit_one_field(server: ApiServer) -> None:
    client = TrainingJobClient()
    client.suspend("ctr")
    client.resume("ctr")
    assert server.patches == [{"spec": {"suspend": True}}, {"spec": {"suspend": False}}]


def test_scaling_edits_the_numbers_that_differ(server: ApiServer) -> None:
    bounds = {"minReplicas": 1, "maxReplicas": 8}
    spec: dict[str, Any] = {"data": {"train": ["/data/*.tsv"]}, "ps": {"replicas": 2}, "worker": bounds}
    server.jobs["ctr"] = server.put("ctr", "Training") | job_body("ctr", **spec)
    before, after = TrainingJobClient().scale("ctr", lambda job: job.resized(ps=2, worker=5))
    assert (before.worker.max_replicas, after.worker.replicas) == (8, 5)
    numbers = {"replicas": 5, "minReplicas": None, "maxReplicas": None}
    assert server.patches == [{"spec": {"worker": numbers}}]


def test_a_job_that_has_ended_has_nothing_to_scale(server: ApiServer) -> None:
    server.put("ctr", "Complete")
    with pytest.raises(ClusterError, match="TrainingJob ctr is Complete: it has no processes to scale"):
        TrainingJobClient().scale("ctr", lambda job: job)


def serve(server: ApiServer, *indexes: int, phase: str = "Training") -> None:
    """Adds a job with parameter servers of these indexes, and a worker."""
    members = [{"role": "ps", "index": index, "pod": f"ctr-ps-{index}-4"} for index in indexes]
    members.append({"role": "worker", "index": 7, "pod": "ctr-worker-7-4"})
    server.put("ctr", phase)["status"]["members"] = members


def serve_later(server: ApiServer, *indexes: int, phase: str) -> None:
    """Sends such a job to a watch as a change; the job itself stays as it was."""
    before = server.jobs["ctr"]
    serve(server, *indexes, phase=phase)
    server.events.put({"type": "MODIFIED", "object": server.jobs["ctr"]})
    server.jobs["ctr"] = before


def test_draining_evicts_the_pod(server: ApiServer) -> None:
    serve(server, 0, 1)
    assert TrainingJobClient().drain("ctr", 1) == "ctr-ps-1-4"
    assert server.evictions == ["/api/v1/namespaces/team-a/pods/ctr-ps-1-4/eviction"]


@pytest.mark.parametrize("phase", ["Training", "Evaluating"])
def test_a_job_that_is_yet_to_train_is_waited_for_and_drained_then(server: ApiServer, phase: str) -> None:
    serve(server, 0, 1, phase="Restoring")
    serve_later(server, 0, 1, phase="Preparing")
    serve_later(server, 0, 1, phase=phase)
    seen: list[str] = []
    assert TrainingJobClient().drain("ctr", 1, observer=lambda status: seen.append(status.phase)) == "ctr-ps-1-4"
    assert seen == ["Restoring", "Preparing"]
    assert len(server.evictions) == 1


def test_a_drain_waits_no_longer_than_it_may(server: ApiServer) -> None:
    serve(server, 0, 1, phase="Pending")
    server.events.put(END)
    with pytest.raises(
        ClusterError, match=r"ps-1: its rows move only while the job trains or evaluates: .* is Pending after 10ms"
    ):
        TrainingJobClient().drain("ctr", 1, timeout=0.01)
    assert not server.evictions


def test_a_drain_that_has_to_wait_for_another_is_refused(server: ApiServer) -> None:
    serve(server, 0, 1)
    server.refusal_of_evictions = (429, "Cannot evict pod as it would violate the pod's disruption budget.")
    with pytest.raises(ClusterError, match=r"ps-1: another parameter server is away; .*disruption budget"):
        TrainingJobClient().drain("ctr", 1)


def test_a_drain_that_a_second_budget_prevents_says_what_to_do(server: ApiServer) -> None:
    """A team may have a budget for all of its pods; Kubernetes 1.33 answers in these words."""
    serve(server, 0, 1)
    said = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
    server.refusal_of_evictions = (500, said)
    with pytest.raises(ClusterError) as refused:
        TrainingJobClient().drain("ctr", 1)
    assert str(refused.value) == (
        f"ps-1: {said} Nothing can drain its node either: leave pods with the label emberscale.io/job-name out of the "
        "other budget that selects ctr-ps-1-4; `kubectl get pdb -n team-a` lists it beside ctr-ps"
    )


@pytest.mark.parametrize(
    ("indexes", "phase", "said"),
    [
        ((0, 1), "Saving", "ps-1: TrainingJob ctr is Saving: rows move only while it trains or evaluates"),
        ((0, 1), "Suspended", "ps-1: TrainingJob ctr is Suspended: rows move only while it trains or evaluates"),
        ((0, 2), "Training", "ps-1: TrainingJob ctr has no such parameter server; it has ps-0, ps-2"),
    ],
)
def test_a_drain_that_would_lose_rows_is_refused(
    server: ApiServer, indexes: tuple[int, ...], phase: str, said: str
) -> None:
    serve(server, *indexes, phase=phase)
    with pytest.raises(ClusterError, match=said):
        TrainingJobClient().drain("ctr", 1)
    assert not server.evictions


def test_killing_deletes_the_pod_with_no_grace(server: ApiServer) -> None:
    serve(server, 0, 1)
    assert TrainingJobClient().kill("ctr", 1) == "ctr-ps-1-4"
    assert server.deletions == [("/api/v1/namespaces/team-a/pods/ctr-ps-1-4", ["0"])]
    with pytest.raises(ClusterError, match="ps-2: TrainingJob ctr has no such parameter server; it has ps-0, ps-1"):
        TrainingJobClient().kill("ctr", 2)
    assert len(server.deletions) == 1


def test_a_cluster_that_is_not_there_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="set KUBECONFIG"):
        TrainingJobClient()
