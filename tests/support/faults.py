"""Harms what runs on the cluster: kills processes on their nodes, deletes pods, empties Redis."""

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from api_objects import get
from cluster import IMAGE, eventually, kubectl, setting
from installation import REDIS, SYSTEM

_NAME = "emberscale-e2e-killer"
_SLOWED_SECONDS, _RUNNING_SECONDS = 2.9, 0.1
"""A slowed process does less work than processes that a busy machine keeps waiting for their servers."""
_KILL = """
import os, select, signal, sys
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
pids = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        cgroup, name = open(f"/proc/{pid}/cgroup").read(), open(f"/proc/{pid}/comm").read().strip()
        found = any(uid in cgroup for uid in (sys.argv[2], sys.argv[2].replace("-", "_"))) and name != "pause"
        if found and sys.argv[1] in SIGNALS:
            os.kill(int(pid), SIGNALS[sys.argv[1]])
    except (FileNotFoundError, ProcessLookupError):
        continue
    if found:
        pids.append(int(pid))
        print(pid)
while sys.argv[1] == "slow":
    for number, seconds in ((signal.SIGSTOP, float(sys.argv[3])), (signal.SIGCONT, float(sys.argv[4]))):
        for pid in pids:
            os.kill(pid, number)
        if select.select([sys.stdin], [], [], seconds)[0]:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            sys.exit()
"""


class ProcessKiller:
    """Kills the processes of pods with SIGKILL, which a container's first process is immune to from inside.

    A privileged pod on each node sees the node's processes.
    """

    def kill(self, pod: Any) -> None:
        """Kills all of a pod's processes. The pod may already be gone."""
        self._run("kill", pod)

    def stop(self, pod: Any) -> None:
        """Stops all of a pod's processes for good: they hang without dying."""
        self._run("stop", pod)

    def processes(self, pod: Any) -> list[int]:
        """Returns the ids of a pod's processes on its node, even if Kubernetes no longer knows the pod."""
        return [int(line) for line in self._run("list", pod).split()]

    @contextmanager
    def slowed(self, pod: Any) -> Iterator[Callable[[], bool]]:
        """Limits a pod's processes to a thirtieth of the time while the body runs.

        Yields a function that returns whether they are still slowed; that ends once one of them has ended.
        """
        more = (str(_SLOWED_SECONDS), str(_RUNNING_SECONDS))
        slows = subprocess.Popen(["kubectl", *self._command("slow", pod, *more)], stdin=subprocess.PIPE)
        try:
            yield lambda: slows.poll() is None
        finally:
            slows.communicate(timeout=60)

    def _run(self, what: str, pod: Any) -> str:
        return kubectl(*self._command(what, pod))

    def _command(self, what: str, pod: Any, *more: str) -> list[str]:
        """Returns kubectl's arguments; the remote command ends with its standard input."""
        node = pod["spec"]["nodeName"]
        here = next(entry for entry in _killers() if entry["spec"]["nodeName"] == node)
        script = ["python3", "-c", _KILL, what, pod["metadata"]["uid"], *more]
        return ["exec", "-i", "-n", SYSTEM, here["metadata"]["name"], "--", *script]


def _killers() -> list[Any]:
    return list(get("pods", namespace=SYSTEM, selector=f"app={_NAME}"))


def start_process_killers() -> None:
    """Starts a pod on every node; it stays until the suite's namespace is deleted."""
    container = {
        "name": "killer",
        "image": setting(IMAGE),
        "imagePullPolicy": "IfNotPresent",
        "command": ["sleep", "infinity"],
        "securityContext": {"privileged": True, "runAsUser": 0},
    }
    spec = {
        "hostPID": True,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"kubernetes.io/os": "linux"},
    }
    template = {"metadata": {"labels": {"app": _NAME}}, "spec": spec}
    daemons = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": _NAME},
        "spec": {"selector": {"matchLabels": {"app": _NAME}}, "template": template},
    }
    kubectl("apply", "-n", SYSTEM, "-f", "-", stdin=json.dumps(daemons))

    def ready() -> bool:
        status = get("daemonset", _NAME, SYSTEM)["status"]
        return bool(status.get("numberReady", 0) >= max(1, status.get("desiredNumberScheduled", 0)))

    eventually(lambda: ready() or None, "the killers run", seconds=180)


def delete_pod(pod: Any) -> None:
    """Deletes a pod like `kubectl delete pod`; the pod may already be gone."""
    metadata = pod["metadata"]
    kubectl("delete", "pod", metadata["name"], "-n", metadata["namespace"], "--ignore-not-found", "--wait=false")


def running(selector: str) -> Any:
    """Returns the pod of a component of the installation, once one runs."""

    def found() -> Any:
        pods = get("pods", namespace=SYSTEM, selector=selector)
        return next((pod for pod in pods if is_live(pod) and pod["status"].get("phase") == "Running"), None)

    return eventually(found, f"a pod with {selector} runs", seconds=180)


def is_live(pod: Any) -> bool:
    """Whether a pod should be running: it has not ended, and nobody has asked it to end.

    The end of the last container counts, since nodes report it before the pod's phase.
    """
    containers = pod["status"].get("containerStatuses") or ()
    ended = bool(containers) and all("terminated" in (container.get("state") or {}) for container in containers)
    asked_to_end = "deletionTimestamp" in pod["metadata"]
    return not ended and not asked_to_end and pod["status"].get("phase") in ("Pending", "Running")


def redis_loses_its_data(killer: ProcessKiller) -> None:
    """Removes Redis' files and kills its process, so that the next one starts empty."""
    pod = running(REDIS)
    kubectl("exec", "-n", SYSTEM, pod["metadata"]["name"], "--", "sh", "-c", "rm -rf /data/*")
    killer.kill(pod)
