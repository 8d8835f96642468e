"""A real cluster, used through kubectl and helm, as a person does."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from api_objects import get
from eventually import NotInTimeError
from eventually import eventually as poll

T = TypeVar("T")

COMMAND = Path(sys.executable).with_name("emberscale")
"""The command line installed with this Python."""

IMAGE = "EMBERSCALE_E2E_IMAGE"
NEXT_IMAGE = "EMBERSCALE_E2E_NEXT_IMAGE"
CONTROL_PLANE_IMAGE = "EMBERSCALE_E2E_CONTROL_PLANE_IMAGE"
REDIS_IMAGE = "EMBERSCALE_E2E_REDIS_IMAGE"
POSTGRESQL_IMAGE = "EMBERSCALE_E2E_POSTGRESQL_IMAGE"
SHARED_FOLDER = "EMBERSCALE_E2E_FOLDER"
NODE_FAULT = "EMBERSCALE_E2E_NODE_FAULT"
AUDIT_LOG = "EMBERSCALE_E2E_AUDIT_LOG"
KEEP = "EMBERSCALE_E2E_KEEP"

SESSION = f"{time.time():.0f}"
"""Separates the checkpoints of one run of the suite from those of other runs."""
ROWS = 60_000
RECORDS = 54_000
EVALUATION_RECORDS = ROWS - RECORDS
"""The rows of the suite's data, the rows to train on, and the rows to evaluate."""
ENDLESS = 10_000
"""Epochs of a job that outlasts any test; `assert_exact_so_far` ends it."""
MODELS = {"name": "PYTHONPATH", "value": "/shared/models"}
"""The variable of pods that has the suite's models imported."""
UNHURRIED_MODEL = Path(__file__).with_name("unhurried_model.py")
"""The model of such a job: at full speed, the job would only take cores from other tests."""


class CommandFailedError(Exception):
    """kubectl or helm failed; the text is its output."""

    def __init__(self, command: Sequence[str], said: str) -> None:
        super().__init__(f"{shlex.join(command)}: {said.strip()}")
        self.said = said


def run(*command: str, stdin: str | None = None, timeout: float = 120) -> str:
    """Returns the standard output of a command. Raises CommandFailedError."""
    done = subprocess.run(
        command, env=_environment(), input=stdin, capture_output=True, text=True, timeout=timeout, check=False
    )
    if done.returncode:
        raise CommandFailedError(command, done.stderr + done.stdout)
    return done.stdout


def _environment() -> dict[str, str]:
    """Switches Go's garbage collector off: it would take half the CPU, and kubectl and helm end before they need it."""
    return {**os.environ, "GOGC": "off"}


def kubectl(*arguments: str, stdin: str | None = None, timeout: float = 120) -> str:
    """Returns the standard output of kubectl. Raises CommandFailedError."""
    return run("kubectl", *arguments, stdin=stdin, timeout=timeout)


def apply(*documents: Mapping[str, Any], namespace: str = "default") -> str:
    """Runs kubectl apply, and returns its output."""
    everything = {"apiVersion": "v1", "kind": "List", "items": documents}
    return kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(everything))  # YAML would not quote 00000008


def eventually(look: Callable[[], T | None], what: str, seconds: float, every: float = 1.0) -> T:
    """Polls as all tests do, but only once a second: most looks start kubectl."""
    return poll(look, what, seconds, every)


ENDED = ("Complete", "Failed")
"""Phases that a job does not leave."""
_INDEX = "emberscale.io/index"


@dataclass(frozen=True)
class Place:
    """Where jobs run: a namespace, and a folder that all nodes share."""

    namespace: str
    folder: str


@contextmanager
def most_pods(place: Place, most: int) -> Iterator[None]:
    """Has the cluster refuse new pods beyond a number; those that run stay."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": most}},
    }
    apply(quota, namespace=place.namespace)
    try:
        yield
    finally:
        kubectl("delete", "resourcequota", "pods", "-n", place.namespace)


@dataclass(frozen=True)
class Job:
    """One TrainingJob on the cluster."""

    name: str
    namespace: str

    @property
    def selector(self) -> str:
        return f"emberscale.io/job-name={self.name}"

    def read(self) -> Any:
        return get("trainingjob", self.name, self.namespace)

    def status(self) -> Any:
        return self.read().get("status") or {}

    def phase(self) -> str:
        return str(self.status().get("phase", ""))

    def samples(self) -> int:
        return int((self.status().get("progress") or {}).get("samples", 0))

    def condition(self, kind: str) -> Any:
        """Returns the condition of a type, or None."""
        return next((entry for entry in self.status().get("conditions", ()) if entry["type"] == kind), None)

    def pods(self, role: str = "") -> list[Any]:
        selector = self.selector + (f",emberscale.io/role={role}" if role else "")
        return list(get("pods", namespace=self.namespace, selector=selector))

    def running(self, role: str) -> list[Any]:
        """Returns the pods of a role that run and are not being deleted, by index."""
        live = [
            pod
            for pod in self.pods(role)
            if pod["status"].get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        return sorted(live, key=lambda pod: int(pod["metadata"]["labels"][_INDEX]))

    def member(self, role: str, index: int, seconds: float = 180) -> Any:
        """Returns the pod of a member once it runs."""

        def found() -> Any:
            return next((pod for pod in self.running(role) if pod["metadata"]["labels"][_INDEX] == str(index)), None)

        return eventually(found, f"{role}-{index} of {self.name} runs", seconds)

    def events(self) -> list[Any]:
        """Events on the job, oldest first."""
        everything = get("events", namespace=self.namespace)
        mine = [event for event in everything if event["involvedObject"]["name"] == self.name]
        return sorted(mine, key=lambda event: str(event.get("eventTime") or event["lastTimestamp"]))

    def logs(self) -> str:
        """Returns the last lines of each pod's log, for the report of a failure."""
        parts = []
        for pod in self.pods():
            name = pod["metadata"]["name"]
            try:
                said = kubectl("logs", name, "-n", self.namespace, "--tail=15")
            except CommandFailedError as error:
                said = error.said
            parts.append(f"--- {name}: {pod['status'].get('phase')}\n{said}")
        return "\n".join(parts)

    def until(self, what: str, look: Callable[[Any], T | None], seconds: float) -> T:
        """Polls until `look` finds something in the status, and returns that.

        Raises NotInTimeError with a report on the job; if the job ends first, it does so at once.
        """

        def found() -> T | None:
            status = self.status()
            it = look(status)
            if not it and status.get("phase") in ENDED:
                raise NotInTimeError(f"{self.name} has ended without it: {what}")
            return it

        try:
            return eventually(found, f"{what}, of {self.name}", seconds)
        except NotInTimeError as error:
            raise NotInTimeError(f"{error}\n{self.report()}") from error

    def report(self) -> str:
        """Returns everything known about a job that did not do what a test waited for."""
        told = "\n".join(f"{event['reason']}: {event['message']}" for event in self.events())
        return f"{json.dumps(self.status(), indent=1)}\n{told}\n{self.logs()}"

    def wait_for_samples(self, samples: int, seconds: float = 600) -> None:
        """Waits until at least this many samples are committed."""

        def committed(status: Any) -> bool:
            return int((status.get("progress") or {}).get("samples", 0)) >= samples

        self.until(f"{samples} samples", committed, seconds)

    def wait_for_phase(self, phase: str, seconds: float = 300) -> None:
        """Waits for a phase; fails at once if the job ends in another."""
        self.until(f"phase {phase}", lambda status: status.get("phase") == phase, seconds)

    def wait_complete(self, seconds: float = 600) -> Any:
        """Returns the status once the job is Complete; fails at once if the job fails."""
        return self.until("Complete", lambda status: status if status.get("phase") == "Complete" else None, seconds)


_AUDIT = """
import json, sys
from emberscale._run.checkpoints import SavedCheckpoints, audit_checkpoints
folder = SavedCheckpoints(sys.argv[1])
report, refused = audit_checkpoints(folder, folder.find({sys.argv[2]}))
told = report.as_document() if report else {"refused": refused}
told.pop("epochs", None)  # Kubernetes keeps 4 KiB
open("/dev/termination-log", "w").write(json.dumps(told))
"""


def run_in_pod(
    name: str,
    place: Place,
    command: Sequence[str],
    user: int = 65532,
    seconds: float = 240,
    labels: Mapping[str, str] | None = None,
    files: str = "",
) -> str:
    """Runs a command in a pod with the shared folder at /shared; returns what it writes to /dev/termination-log.

    `files` names a ConfigMap, which becomes a folder of that name. The result comes from the pod's status, since that
    outlives its logs.
    """
    mounts = [{"name": "shared", "mountPath": "/shared"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shared", "hostPath": {"path": place.folder, "type": "DirectoryOrCreate"}},
    ]
    if files:
        mounts.append({"name": "files", "mountPath": f"/{files}"})
        volumes.append({"name": "files", "configMap": {"name": files}})
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsUser": user},
            "containers": [
                {
                    "name": "main",
                    "image": setting(IMAGE),
                    "imagePullPolicy": "IfNotPresent",
                    "command": list(command),
                    "env": [MODELS],
                    "volumeMounts": mounts,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ],
            "volumes": volumes,
        },
    }
    apply(pod, namespace=place.namespace)

    def ended() -> Any:
        status = get("pod", name, place.namespace)["status"]
        return status if status.get("phase") in ("Succeeded", "Failed") else None

    status = eventually(ended, f"pod {name} ends", seconds)
    said = str(status["containerStatuses"][0]["state"]["terminated"].get("message", ""))
    kubectl("delete", "pod", name, "-n", place.namespace, "--wait=false")
    assert status["phase"] == "Succeeded", said
    return said


def audit(job: Job, place: Place) -> Any:
    """Returns how often each sample was applied, by the servers' own records: see `emberscale audit`."""
    document = job.read()
    command = ["python", "-c", _AUDIT, document["spec"]["checkpoint"]["uri"], document["metadata"]["uid"]]
    return json.loads(run_in_pod(f"audit-{job.name}", place, command))


def assert_exact(job: Job, place: Place, records: int = RECORDS) -> None:
    """Asserts that every sample of one epoch was applied exactly once, on every server."""
    counted = audit(job, place)
    assert (counted["missing"], counted["once"], counted["repeated"]) == (0, records, 0), counted
    assert counted["contradictions"] == []


def assert_exact_so_far(job: Job, place: Place) -> None:
    """Suspends a job that would train for hours; asserts that each counted sample was applied once, on every server."""
    kubectl("patch", "tj", job.name, "-n", job.namespace, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    job.wait_for_phase("Suspended")
    counted = audit(job, place)
    assert (counted["once"], counted["repeated"], counted["contradictions"]) == (job.samples(), 0, []), counted


_LOCAL_RUN = """
import json, subprocess, sys
open("/tmp/job.json", "w").write(sys.argv[1])
ended = subprocess.run(["emberscale", "run", "/tmp/job.json", "--workdir", "/tmp/run"], capture_output=True, text=True)
said = open("/tmp/run/summary.json").read() if ended.returncode == 0 else ended.stderr[-2000:]
open("/dev/termination-log", "w").write(json.dumps(json.loads(said)["auc"]) if ended.returncode == 0 else said)
sys.exit(ended.returncode)
"""


def auc_of_local_run(document: Mapping[str, Any], place: Place) -> float:
    """Returns the AUC of the same job under `emberscale run`, as processes of one pod."""
    spec = {key: dict(part) for key, part in document["spec"].items()}
    del spec["checkpoint"]
    for role in ("master", "ps", "worker"):
        spec[role] = {key: part for key, part in spec[role].items() if key == "replicas"}
    local = json.dumps({**document, "spec": spec})
    return float(run_in_pod("local-run", place, ["python", "-c", _LOCAL_RUN, local], seconds=600))


def manifest(name: str, place: Place, epochs: int = 1, replicas: int = 1, **spec: Any) -> dict[str, Any]:
    """A TrainingJob over the suite's data with `replicas` small servers and workers each; `spec` replaces whole parts.

    Its lease timeout is long, since a busy machine delays live processes; tests of silent processes shorten it. Only
    test_flash.py uses the Redis for flash checkpoints, since it also stops it. A job of ENDLESS epochs trains slowly.
    """
    volume = {"name": "shared", "hostPath": {"path": place.folder}}
    template = {
        "volumes": [volume],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}],
        "env": [MODELS],
    }
    model = {"model": {"entrypoint": f"{UNHURRIED_MODEL.stem}:build"}} if epochs == ENDLESS else {}

    def resources(memory: str) -> dict[str, Any]:
        return {"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": memory}}

    base = {
        "data": {"train": ["/shared/criteo/train-*.tsv"], "evaluation": ["/shared/criteo/evaluation.tsv"]},
        "training": {"batchSize": 128, "epochs": epochs},
        "sharding": {"minBatches": 2, "maxBatches": 8, "leaseTimeout": "60s"},
        "master": {"resources": resources("512Mi"), "template": template},
        "ps": {"replicas": replicas, "resources": resources("1Gi"), "template": template},
        "worker": {"replicas": replicas, "resources": resources("1536Mi"), "template": template},
        "checkpoint": {
            "uri": f"/shared/checkpoints/{SESSION}/{place.namespace}/{name}",
            "interval": "5s",
            "flash": {"mode": "Disabled"},
        },
        "runPolicy": {"backoffLimit": 50},
    }
    return {
        "apiVersion": "emberscale.io/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": name},
        "spec": {**base, **model, **spec},
    }


def submit(document: Mapping[str, Any], place: Place) -> Job:
    """Applies a TrainingJob."""
    apply(document, namespace=place.namespace)
    return Job(document["metadata"]["name"], place.namespace)


def setting(name: str, default: str = "") -> str:
    """Returns one of the suite's environment variables."""
    return os.environ.get(name) or default
