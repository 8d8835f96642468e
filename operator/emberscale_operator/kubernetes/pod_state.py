"""Translates a pod into an instance of the job machine, with the reason why it waits."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from emberscale_api.environment import SUPERSEDED_EXIT_CODE, UNUSABLE_EXIT_CODE
from emberscale_api.job import cpu_cores, memory_bytes
from emberscale_api.job.roles import Role
from emberscale_api.job.status import fitting_reason
from emberscale_operator.kubernetes.job import parse_time
from emberscale_operator.kubernetes.names import LIMITS_ANNOTATION, MANIFEST_ANNOTATION, instance_of
from emberscale_operator.machine import ExitReason, Instance, InstanceExit, InstanceId, InstanceState, Resources

LOST_SECONDS = 10.0
"""A pod that still exists so long after its deadline is on a node that has fallen silent."""
GRACE_SECONDS = 15
"""How long a pod may take to end that has nothing to give away."""
_FROM_OUTSIDE = frozenset(
    {
        "Evicted",
        "NodeAffinity",
        "NodeLost",
        "NodeShutdown",
        "OutOfcpu",
        "OutOfmemory",
        "OutOfpods",
        "Preempting",
        "Shutdown",
        "Terminated",
        "UnexpectedAdmissionError",
    }
)
"""`status.reason` of pods that the cluster ended."""
_OWN_LIMIT = re.compile(r"exceeds the total limit of containers|local ephemeral storage limit|Usage of EmptyDir volume")
"""What the kubelet says of a pod that it evicts for more storage than the pod itself may use, whatever its node has."""
_UNSEEN = "Unknown"
"""The reason of a container whose end nobody saw: its node has started again, and it is gone. Its exit code is 255."""
_STRIPPED_SECONDS = 30.0
"""How long a pod stays whose annotation with limits is missing: a policy may take it from each successor, too."""
_OTHER_NOTATION = re.compile(r"(\d+(?:\.\d+)?)(Ei|[nuE]|[eE][+-]?\d{1,2})")
"""Quantities that a manifest cannot have, but a LimitRange or a webhook can."""
_SIGKILL, _SIGTERM = 9, 15
_QUIET_WAITS = frozenset({"", "ContainerCreating", "PodInitializing"})


@dataclass(frozen=True)
class Waiting:
    """The reason why a pod does not run yet: a CamelCase word, and a sentence."""

    reason: str
    message: str


@dataclass(frozen=True)
class PodView:
    """One pod of a job.

    * `waiting`: why it does not run yet.
    * `cause`, `detail`: how it ended: a CamelCase reason, and what it said last.
    * `mounting`: it has been preparing for a while, and its status does not say why.
    * `limits`: those that its running container has, which after a resize differ for a while from those in `instance`;
      None if unknown.
    * `resizing`: what keeps it from the limits in `instance`.
    """

    name: str
    uid: str
    node: str
    address: str
    instance: Instance
    waiting: Waiting | None = None
    cause: str = ""
    detail: str = ""
    mounting: bool = False
    limits: Resources | None = None
    resizing: Waiting | None = None

    @property
    def id(self) -> InstanceId:
        """The pod's instance id."""
        return self.instance.id

    @property
    def running(self) -> bool:
        """Whether its process runs, and nobody asked it to end."""
        return self.instance.state is InstanceState.RUNNING


def view_pod(pod: Mapping[str, Any], now: float, ending_since: float | None = None) -> PodView | None:
    """The pod as of `now`, in seconds since 1970; None for one that is not an instance of a job.

    `ending_since` is when its deletion was first seen: from then on it has all of its time to end, as the API server's
    clock may be behind.
    """
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status") or {}
    identity = instance_of(metadata.get("labels") or {})
    if identity is None:
        return None
    own = _named(status.get("containerStatuses") or (), identity.role)
    ended = _exit(metadata, status, own, now, ending_since)
    state = _state(metadata, status, ended is not None)
    going_on = state in (InstanceState.PENDING, InstanceState.RUNNING)
    created = parse_time(metadata["creationTimestamp"])
    waiting = _waiting(status) if going_on else None
    own_spec = _named(spec["containers"], identity.role)
    asked = _asked(metadata)
    waits_for_a_node = state is InstanceState.PENDING and _condition(status, "PodScheduled").get("status") == "False"
    unplaced = waits_for_a_node and (asked is not None or now - created > _STRIPPED_SECONDS)
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        node=spec.get("nodeName") or "",
        address=status.get("podIP") or "",
        instance=Instance(
            identity,
            state,
            asked if asked is not None and waits_for_a_node else _resources(own_spec),
            _started(own, created),
            ended.exit if ended else None,
            name=metadata["uid"],
            revision=(metadata.get("annotations") or {}).get(MANIFEST_ANNOTATION, ""),
            ready=going_on and _condition(status, "Ready").get("status") == "True",
            holds_log=_over(status),
            unplaced=unplaced,
        ),
        waiting=waiting,
        cause=ended.cause if ended else "",
        detail=ended.detail if ended else "",
        mounting=(
            waiting is None
            and going_on
            and status.get("phase", "Pending") == "Pending"
            and bool(spec.get("nodeName"))
            and now - created > 3.0
        ),
        limits=_limits(own) if going_on else None,
        resizing=_resizing(status) if going_on else None,
    )


def _state(metadata: Mapping[str, Any], status: Mapping[str, Any], ended: bool) -> InstanceState:
    if ended:
        return InstanceState.EXITED
    if "deletionTimestamp" in metadata:
        return InstanceState.TERMINATING
    return InstanceState.RUNNING if status.get("phase") == "Running" else InstanceState.PENDING


@dataclass(frozen=True)
class _Exit:
    exit: InstanceExit
    cause: str
    detail: str


def _over(status: Mapping[str, Any]) -> bool:
    """Whether nothing of the pod runs any more. Its phase says so only a moment after its last container has ended."""
    containers = status.get("containerStatuses") or ()
    ended = bool(containers) and all("terminated" in (container.get("state") or {}) for container in containers)
    return ended or status.get("phase") in ("Succeeded", "Failed")


def _named(containers: Sequence[Mapping[str, Any]], role: Role) -> Mapping[str, Any]:
    """The container of the job's own process, in a spec or a status; others may have been injected around it."""
    return next((container for container in containers if container.get("name") == role), {})


def _exit(
    metadata: Mapping[str, Any],
    status: Mapping[str, Any],
    own: Mapping[str, Any],
    now: float,
    ending_since: float | None,
) -> _Exit | None:
    deletion = metadata.get("deletionTimestamp")
    terminated = (own.get("state") or {}).get("terminated") or {}
    # a pod lives on after its own process where a sidecar does
    if status.get("phase") not in ("Succeeded", "Failed") and not terminated:
        if deletion is None or now < (due := _end_due(metadata, status, ending_since)) + LOST_SECONDS:
            return None
        ended = InstanceExit(ExitReason.NODE_LOST, -_SIGKILL, at=due)
        return _Exit(ended, "NodeLost", "its node does not answer")
    # the clock of its node may be ahead of ours, and what follows from the end is to wait for neither
    at = min(parse_time(terminated["finishedAt"]), now) if terminated.get("finishedAt") else now
    code = int(terminated.get("exitCode", 1))
    said = terminated.get("message") or status.get("message") or ""
    outside = _outside_cause(status)
    if terminated.get("reason") == "OOMKilled":
        reason, cause = ExitReason.OOM_KILLED, "OOMKilled"
    elif outside == "Evicted" and _OWN_LIMIT.search(status.get("message") or ""):
        reason, cause, said = ExitReason.ERROR, "StorageLimitExceeded", status["message"]
        code = code or 128 + _SIGTERM  # one that exits with 0 was told to end: its work is not done
    elif outside:
        # whatever the exit code and the log say: the process was told to end
        reason, cause = ExitReason.KILLED, outside
        said = status.get("message") or _condition(status, "DisruptionTarget").get("message") or said
    elif terminated.get("reason") == _UNSEEN:
        reason, cause = ExitReason.KILLED, "NodeRestarted"
    elif status.get("phase") == "Succeeded" or code == 0:
        reason, cause = ExitReason.COMPLETED, "Completed"
    elif code in (128 + _SIGKILL, 128 + _SIGTERM):
        reason, cause = ExitReason.KILLED, "Killed"
    elif code == SUPERSEDED_EXIT_CODE:
        reason, cause = ExitReason.KILLED, "Superseded"
    elif code == UNUSABLE_EXIT_CODE:
        # a requirement is missing: the pod continues once it is there, and the job is not at fault
        reason, cause = ExitReason.KILLED, "Unusable"
    else:
        reason, cause = ExitReason.ERROR, "Error"
    signed = 128 - code if code > 128 else code
    ending = InstanceExit(reason, signed, at, deleted=deletion is not None and not outside)
    return _Exit(ending, cause, _last_words(said))


def _last_words(said: str) -> str:
    """Returns the last line that has words: that of a traceback names the error, and gRPC's ends with a bracket."""
    lines = (line.strip() for line in reversed(said.splitlines()))
    return next((line for line in lines if any(map(str.isalnum, line))), "")


def _end_due(metadata: Mapping[str, Any], status: Mapping[str, Any], ending_since: float | None) -> float:
    """Returns when a pod that is being deleted ends at the latest, unless its node is lost: then it is not ready.

    A parameter server may take long to give its rows away, but not on a node that does not answer.
    """
    due, grace = parse_time(metadata["deletionTimestamp"]), float(metadata.get("deletionGracePeriodSeconds") or 0)
    shorter = 0.0 if _condition(status, "Ready").get("status") == "True" else max(0.0, grace - GRACE_SECONDS)
    return max(due, due if ending_since is None else ending_since + grace) - shorter


def _outside_cause(status: Mapping[str, Any]) -> str:
    disruption = _condition(status, "DisruptionTarget")
    if disruption.get("status") == "True":
        return str(disruption.get("reason") or "Evicted")
    reason = status.get("reason") or ""
    return reason if reason in _FROM_OUTSIDE else ""


def _waiting(status: Mapping[str, Any]) -> Waiting | None:
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return Waiting(*fitting_reason(scheduled.get("reason") or "", scheduled.get("message") or "", "Unschedulable"))
    containers: Sequence[Mapping[str, Any]] = status.get("containerStatuses") or ()
    for container in containers:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "") not in _QUIET_WAITS:
            return Waiting(*fitting_reason(waiting["reason"], waiting.get("message") or "", "Waiting"))
    return None


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((condition for condition in status.get("conditions") or () if condition["type"] == kind), {})


def _started(own: Mapping[str, Any], created: float) -> float:
    for state in ("running", "terminated"):
        started = ((own.get("state") or {}).get(state) or {}).get("startedAt")
        if started:
            return parse_time(started)
    return created


def _resizing(status: Mapping[str, Any]) -> Waiting | None:
    """Returns why a resize is not done, in the kubelet's words: `Deferred`, `Infeasible` or `Error`."""
    for kind in ("PodResizePending", "PodResizeInProgress"):
        found = _condition(status, kind)
        if found.get("status") == "True" and found.get("reason"):
            return Waiting(found["reason"], found.get("message") or "")
    return None


def _limits(own: Mapping[str, Any]) -> Resources | None:
    return _resources(own) if own.get("resources") and (own.get("state") or {}).get("running") else None


def _asked(metadata: Mapping[str, Any]) -> Resources | None:
    """Returns the limits that a pod was created with; None if it does not say.

    If the cluster gave it others, a successor would get those, too: it must not seem to differ from what is wanted.
    """
    written = (metadata.get("annotations") or {}).get(LIMITS_ANNOTATION, "")
    try:
        return _limited(json.loads(written))
    except (AttributeError, RecursionError, ValueError):  # somebody has edited or removed it
        return None


def _resources(container: Mapping[str, Any]) -> Resources:
    return _limited((container.get("resources") or {}).get("limits") or {})


def _limited(limits: Mapping[str, Any]) -> Resources:
    cpu, memory = limits.get("cpu"), limits.get("memory")
    return Resources(
        None if cpu is None else round(cpu_cores(_as_in_manifests(str(cpu))), 3),
        None if memory is None else memory_bytes(_as_in_manifests(str(memory))),
    )


def _as_in_manifests(quantity: str) -> str:
    """Writes a quantity in a notation that manifests may use, if it is in another one."""
    match = _OTHER_NOTATION.fullmatch(quantity)
    if match is None:
        return quantity
    powers = {"Ei": Decimal(1 << 60), "E": Decimal(10) ** 18, "u": Decimal(10) ** -6, "n": Decimal(10) ** -9}
    factor = powers[match[2]] if match[2] in powers else Decimal(f"1{match[2]}")
    return f"{Decimal(match[1]) * factor:f}"
