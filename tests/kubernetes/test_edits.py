"""Edits of a running job: its pods get new limits in place, and its number of workers new bounds."""

import json
from typing import Any

import pytest

from api_objects import get
from cluster import (
    ENDLESS,
    CommandFailedError,
    Job,
    Place,
    apply,
    assert_exact_so_far,
    eventually,
    kubectl,
    manifest,
    submit,
)

pytestmark = pytest.mark.timeout(1200)

_READ_CGROUP = """
import pathlib
def read(*names):
    return next(path.read_text().split() for path in map(pathlib.Path, names) if path.exists())
cpu = read("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
period = cpu[1] if cpu[1:] else read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")[0]
memory = read("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")[0]
print(int(cpu[0]) / int(period), memory)
"""


def limits_in_force(job: Job, pod: Any) -> tuple[float, int]:
    """Returns the cores and bytes of memory that the kernel allows a pod's container."""
    name = pod["metadata"]["name"]
    cores, memory = kubectl("exec", name, "-n", job.namespace, "--", "python", "-c", _READ_CGROUP).split()
    return float(cores), int(memory)


def edit(job: Job, spec: dict[str, Any]) -> None:
    kubectl("patch", "tj", job.name, "-n", job.namespace, "--type=merge", "-p", json.dumps({"spec": spec}))


def test_limits_of_running_pods_change_in_place(place: Place) -> None:
    # one worker: with two, a busy machine may make one slower than the other, and it would be replaced
    document = manifest("resized", place, epochs=ENDLESS)
    job = submit(document, place)
    job.wait_for_samples(1)
    members = [pod for role in ("ps", "worker") for pod in job.running(role)]
    assert [limits_in_force(job, pod) for pod in members] == [(1.0, 1 << 30), (1.0, 1536 << 20)]

    limits = {"ps": {"cpu": "1500m", "memory": "1280Mi"}, "worker": {"cpu": "750m", "memory": "2Gi"}}
    edit(job, {role: {"resources": {"limits": of_role}} for role, of_role in limits.items()})

    def in_force() -> bool:
        found = [limits_in_force(job, pod) for pod in members]
        return found == [(1.5, 1280 << 20), (0.75, 2 << 30)]

    eventually(lambda: in_force() or None, "the kernel allows what the manifest says now", seconds=180)

    def told() -> dict[str, str]:
        status = job.status()
        return {f"{entry['role']}-{entry['index']}": entry.get("memory") for entry in status["members"]}

    changed = {"ps-0": "1280Mi", "worker-0": "2048Mi"}
    eventually(lambda: changed.items() <= told().items() or None, "the status says so", seconds=120)
    messages = {event["message"] for event in job.events() if event["reason"] in ("ResizedPSPod", "ResizedWorkerPod")}
    way = {"ps": "cpu 1 -> 1.5, memory 1024Mi -> 1280Mi", "worker": "cpu 1 -> 0.75, memory 1536Mi -> 2048Mi"}
    assert messages == {
        f"{pod['metadata']['name']} was resized in place, without a restart: "
        f"{way[pod['metadata']['labels']['emberscale.io/role']]}"
        for pod in members
    }
    job.wait_for_samples(job.samples() + 1)
    status = job.status()
    assert [status[role].get("restarts", 0) for role in ("ps", "worker")] == [0, 0]
    assert {pod["metadata"]["uid"] for pod in members} <= {pod["metadata"]["uid"] for pod in job.pods()}
    assert_exact_so_far(job, place)


def test_a_resize_that_no_node_can_do_is_told_and_disturbs_nobody(place: Place) -> None:
    job = submit(manifest("greedy", place, epochs=ENDLESS), place)
    job.wait_for_samples(1)
    resources = {"requests": {"memory": "4000Gi"}, "limits": {"memory": "4000Gi"}}
    edit(job, {"worker": {"resources": resources}})

    def told() -> str | None:
        events = (event for event in job.events() if event["reason"] == "FailedToResizeWorkerPod")
        return next((event["message"] for event in events), None)

    assert "greedy-worker-0-1 keeps its resources" in eventually(told, "the job says so", seconds=180)
    job.wait_for_samples(job.samples() + 1)
    assert job.status()["worker"].get("restarts", 0) == 0
    assert_exact_so_far(job, place)


def test_bounds_of_the_number_of_workers_change_while_it_runs(place: Place) -> None:
    document = manifest("bounded", place, epochs=ENDLESS)
    del document["spec"]["worker"]["replicas"]
    document["spec"]["worker"] |= {"minReplicas": 1, "maxReplicas": 1}
    job = submit(document, place)
    job.wait_for_samples(1)
    job.member("worker", 0)
    assert len(job.running("worker")) == 1
    edit(job, {"worker": {"minReplicas": 3, "maxReplicas": 3}})
    eventually(lambda: len(job.running("worker")) == 3 or None, "three workers", seconds=240)
    edit(job, {"worker": {"minReplicas": 2, "maxReplicas": 2}})
    eventually(lambda: len(job.running("worker")) == 2 or None, "no more than the new bound", seconds=240)
    assert_exact_so_far(job, place)


def test_a_job_with_bounds_is_sized_by_its_plan_and_by_nobody_else(place: Place) -> None:
    """An autoscaler finds no number of workers to start from, and `kubectl scale` would contradict the bounds."""
    document = manifest("bounded", place, suspend=True)
    bounds = {"minReplicas": 2, "maxReplicas": 4}
    document["spec"]["worker"] = {**document["spec"]["worker"], "replicas": None, **bounds}
    job = submit(document, place)
    with pytest.raises(CommandFailedError, match="give either replicas, or minReplicas and maxReplicas"):
        kubectl("scale", f"tj/{job.name}", "-n", job.namespace, "--replicas=3")
    target = {"apiVersion": "emberscale.io/v1alpha1", "kind": "TrainingJob", "name": job.name}
    cpu = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}}}
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": job.name},
        "spec": {"scaleTargetRef": target, "minReplicas": 1, "maxReplicas": 8, "metrics": [cpu]},
    }
    apply(autoscaler, namespace=job.namespace)

    def gives_up() -> bool:
        found = get("hpa", job.name, job.namespace).get("status", {}).get("conditions", ())
        return any(condition["status"] == "False" for condition in found)

    eventually(lambda: gives_up() or None, "the autoscaler says that it cannot", seconds=180)
    worker = job.read()["spec"]["worker"]
    assert {name: worker.get(name) for name in ("replicas", *bounds)} == {"replicas": None, **bounds}
