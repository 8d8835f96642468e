"""The job of `auto_scaling.py`: a TrainingJob on the cluster, whose speed is measured and whose shape is edited."""

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from api_objects import get
from cluster import (
    ENDLESS,
    KEEP,
    SHARED_FOLDER,
    Job,
    Place,
    apply,
    eventually,
    kubectl,
    manifest,
    run_in_pod,
    setting,
    submit,
)
from emberscale_api.job import cpu_cores
from emberscale_api.metrics import CPU_SECONDS_TOTAL, SAMPLES_TOTAL
from emberscale_api.readable import rate_text
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.brain_pb2_grpc import BrainStub
from emberscale_api.rpc.token import open_channel
from emberscale_api.shape import GIB
from installation import SYSTEM, arguments_of, helm_install, helm_uninstall, redis_volume
from reporting import say

CORES = 0.8
"""The cores for all workers and parameter servers together, well below the machine's, which runs the cluster too."""
BAD_START = 0.04
"""The cores of each of the first two processes: a tenth together."""
STEP = 0.02
BATCH = 256
RECORDS = 120_000
NAMESPACE = "auto-scaling"
FOLDER = "/shared/auto-scaling"
_METRICS_PORT = 9090
_METRICS_SECONDS = 10.0
_SHAPE_SECONDS = 600.0


@dataclass(frozen=True)
class Shape:
    """Numbers of workers and parameter servers, and the cores of each."""

    workers: int
    ps: int
    worker_cpu: float
    ps_cpu: float

    @property
    def cpu(self) -> float:
        """The cores of all together."""
        return self.workers * self.worker_cpu + self.ps * self.ps_cpu

    def __str__(self) -> str:
        return f"{self.workers} x {self.worker_cpu:.3g} + {self.ps} x {self.ps_cpu:.3g}"


@dataclass(frozen=True)
class Window:
    """A measurement at one shape, which came with so many `plans`, the last one for the `reason`.

    `worker_use` and `ps_use` are shares of the limits, `idle` the idle share of the machine.
    """

    shape: Shape
    plans: int
    reason: str
    samples_per_second: float
    worker_use: float
    ps_use: float
    idle: float

    def __str__(self) -> str:
        return (
            f"{rate_text(self.samples_per_second):>18}, workers used {self.worker_use:.0%} of their limits, "
            f"PS {self.ps_use:.0%}, {self.idle:.0%} of the machine was idle"
        )


@dataclass(frozen=True)
class _Reading:
    """Counters of the job's processes by pod, each with its time."""

    samples: Mapping[str, tuple[float, float]]
    cpu: Mapping[str, tuple[float, float]]


def install() -> Place:
    """Installs the chart with a brain for this benchmark, and makes the data; returns the place for the job."""
    place = Place(NAMESPACE, setting(SHARED_FOLDER, "/var/tmp/emberscale-e2e"))
    for name in (SYSTEM, NAMESPACE):
        apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    script = (
        f"mkdir -p {FOLDER} /shared/checkpoints /shared/redis && (test -f {FOLDER}/metadata.json || "
        f"emberscale data synth {FOLDER} --rows {RECORDS} --seed 1 --parts 2) && chmod -R a+rwX /shared"
    )
    run_in_pod("prepare-data", place, ["sh", "-c", script], user=0)
    apply(*redis_volume(f"{place.folder}/redis"), namespace=SYSTEM)
    values = [
        "brain.enabled=true",
        f"brain.cluster.cpu={CORES * 1000:g}m",
        "brain.cluster.memory=16Gi",
        "brain.planning.interval=10s",
        "brain.resources.requests.cpu=50m",
        "postgresql.persistence.enabled=false",
    ]
    bounds = {"maxWorkers": 6, "maxPs": 3, "maxWorkerCpu": CORES, "maxPsCpu": CORES, "cpuStep": STEP}
    memory = {"maxWorkerMemory": "1Gi", "maxPsMemory": "1Gi"}
    helm_install(*arguments_of(values), "--set-json", f"brain.bounds={json.dumps(bounds | memory)}")
    return place


def remember_a_bad_start(document: Mapping[str, Any], place: Place) -> None:
    """Tells the brain of a similar job whose last shape was the bad start, and of which nothing was measured."""
    key = base64.b64decode(get("secret", "emberscale-brain", SYSTEM)["data"]["token"]).decode()
    address = f"{get('service', 'emberscale-brain', SYSTEM)['spec']['clusterIP']}:50061"
    uid = f"bad-start-{time.time():.0f}"
    description = pb.JobDescription(
        architecture="DLRM",
        batch_size=BATCH,
        dense_bytes=500_000,
        embedding_dimension=26 * 16,
        tables=26,
        total_samples=RECORDS * ENDLESS,
        name=document["metadata"]["name"],
        optimizer="RowWiseAdagrad",
        data_bytes=RECORDS * 230,
        epochs=ENDLESS,
    )
    shape = pb.Shape(workers=1, ps=1, worker_cpu=BAD_START, ps_cpu=BAD_START, worker_memory=GIB, ps_memory=GIB)
    submission = pb.SubmitJobRequest(
        job_uid=uid, owner=place.namespace, description=description, current=shape, fixed=True
    )
    outcome = pb.ReportOutcomeRequest(job_uid=uid, phase="Complete", final_shape=shape)
    with open_channel(address, key, None) as channel:
        brain = BrainStub(channel)
        brain.SubmitJob(submission, timeout=60)
        brain.ReportOutcome(outcome, timeout=60)


def job_document(place: Place) -> dict[str, Any]:
    """The manifest: it says nothing of numbers of processes, cores and memory."""
    document = manifest("auto", place)
    spec = document["spec"]
    spec["data"] = {"train": [f"{FOLDER}/train-*.tsv"]}
    spec["training"] = {"batchSize": BATCH, "epochs": ENDLESS, "stalenessWarmup": 0}
    spec["checkpoint"] |= {"interval": "30m"}
    spec["scaling"] = {"mode": "Auto", "profileInterval": "10s", "cooldown": "30s"}
    del spec["sharding"]
    for role in ("ps", "worker"):
        spec[role] = {"template": spec[role]["template"]}
    return document


class AutoJob:
    """The running job."""

    def __init__(self, place: Place) -> None:
        document = job_document(place)
        remember_a_bad_start(document, place)
        self._job: Job = submit(document, place)
        self._pool = urllib3.PoolManager(timeout=_METRICS_SECONDS, retries=3)

    def told(self) -> list[tuple[str, str]]:
        """Returns reason and message of the job's Events, oldest first."""
        return [(event["reason"], event["message"]) for event in self._job.events()]

    def plan(self) -> dict[str, Any]:
        """Returns the plan in force, as the status tells it."""
        plan: dict[str, Any] = self._job.status().get("plan") or {}
        return plan

    def plans(self) -> int:
        """Returns the changes of shape so far."""
        return int(self.plan().get("scalings", 0))

    def fix(self, shape: Shape) -> None:
        """Edits the manifest to a fixed shape, and waits until it is in force."""
        memory = f"{GIB}"

        def role(replicas: int, cpu: float) -> dict[str, Any]:
            limits = {"cpu": f"{round(cpu * 1000)}m", "memory": memory}
            return {"replicas": replicas, "resources": {"limits": limits}}

        spec = {
            "scaling": {"mode": "Manual"},
            "worker": role(shape.workers, shape.worker_cpu),
            "ps": role(shape.ps, shape.ps_cpu),
        }
        patch = json.dumps({"spec": spec})
        kubectl("patch", "tj", self._job.name, "-n", self._job.namespace, "--type=merge", "-p", patch)
        self.await_shape(shape)

    def await_shape(self, wanted: Shape | None = None) -> Shape:
        """Waits until a shape, or this one, is in force, and returns it."""

        def there() -> Shape | None:
            shape = self.shape()
            return shape if shape is not None and wanted in (None, shape) else None

        return eventually(there, f"the shape {wanted or 'that is planned'} is in force", _SHAPE_SECONDS)

    def shape(self) -> Shape | None:
        """Returns the shape in force; None while it changes, or while the job does not train."""
        status = self._job.status()
        plan, scaling = status.get("plan") or {}, self._job.condition("Scaling") or {}
        if status.get("phase") != "Training" or scaling.get("status") == "True":
            return None
        if not plan.get("worker") or not plan.get("ps") or status.get("appliedPs") != plan["ps"]["replicas"]:
            return None
        pods = {role: self._job.running(role) for role in ("worker", "ps")}
        for role, found in pods.items():
            if len(found) != plan[role]["replicas"] or not plan[role].get("cpu"):
                return None
            if any(round(_limit(pod), 3) != round(cpu_cores(plan[role]["cpu"]), 3) for pod in found):
                return None
        return Shape(
            len(pods["worker"]), len(pods["ps"]), cpu_cores(plan["worker"]["cpu"]), cpu_cores(plan["ps"]["cpu"])
        )

    def measure(self, seconds: float) -> Window | None:
        """Measures for some seconds; None if the shape was not the same throughout, or a process did not answer."""
        shape, plan = self.shape(), self.plan()
        before = self._read() if shape is not None else None
        psutil.cpu_times_percent()
        time.sleep(seconds)
        idle = psutil.cpu_times_percent().idle / 100
        after = self._read() if before is not None else None
        if shape is None or before is None or after is None or self.shape() != shape:
            return None
        if before.samples.keys() != after.samples.keys() or before.cpu.keys() != after.cpu.keys():
            return None
        used = {pod: _rate(before.cpu[pod], after.cpu[pod]) for pod in before.cpu}
        workers = before.samples.keys()
        return Window(
            shape,
            int(plan.get("scalings", 0)),
            plan.get("reason", ""),
            sum(_rate(before.samples[pod], after.samples[pod]) for pod in workers),
            sum(used[pod] for pod in workers) / (shape.workers * shape.worker_cpu),
            sum(used[pod] for pod in used.keys() - workers) / (shape.ps * shape.ps_cpu),
            idle,
        )

    def end(self) -> None:
        """Deletes the job with its namespace, and the installation unless it is to be kept."""
        kubectl("delete", "namespace", self._job.namespace, timeout=180)
        if not setting(KEEP):
            helm_uninstall()

    def _read(self) -> _Reading | None:
        """Reads the processes' own counters; None if one does not answer."""
        samples, cpu = {}, {}
        for role in ("worker", "ps"):
            for pod in self._job.running(role):
                name, address = pod["metadata"]["name"], pod["status"]["podIP"]
                try:
                    answer = self._pool.request("GET", f"http://{address}:{_METRICS_PORT}/metrics")
                except urllib3.exceptions.HTTPError as error:
                    say(f"  {name} does not answer: {error}")
                    return None
                now = time.monotonic()
                counters = _counters(answer.data.decode())
                cpu[name] = now, counters[CPU_SECONDS_TOTAL]
                if role == "worker":
                    samples[name] = now, counters[SAMPLES_TOTAL]
        return _Reading(samples, cpu)


def _counters(text: str) -> dict[str, float]:
    """Returns the sums of the counters that this benchmark reads."""
    found = {SAMPLES_TOTAL: 0.0, CPU_SECONDS_TOTAL: 0.0}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in found:
                found[sample.name] += sample.value
    return found


def _limit(pod: Mapping[str, Any]) -> float:
    """Returns the cores that the kubelet has set for a pod's only container; 0 if it has set none yet."""
    statuses = pod["status"].get("containerStatuses") or [{}]
    cpu = ((statuses[0].get("resources") or {}).get("limits") or {}).get("cpu")
    return 0.0 if cpu is None else cpu_cores(str(cpu))


def _rate(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])
