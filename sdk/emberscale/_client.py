"""TrainingJobs on a cluster, from Python."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

from emberscale_api.errors import InvalidError
from emberscale_api.job import TrainingJob, TrainingJobSpec, load_manifest
from emberscale_api.job.roles import Role
from emberscale_api.job.status import ENDED, JobPhase, TrainingJobStatus, UnreadableStatusError, parse_status
from emberscale_api.job.training_job import GROUP, PLURAL, VERSION
from emberscale_api.job.units import IN_WORDS
from emberscale_api.readable import duration_text

_ROWS_MOVE = frozenset({JobPhase.TRAINING, JobPhase.EVALUATING})
_YET_TO_TRAIN = frozenset({JobPhase.PENDING, JobPhase.PREPARING, JobPhase.RESTORING})
_WATCH_SECONDS = 240
"""How long a watch lasts before it is renewed, as a silent connection is not always noticed."""
_GONE = 410
_BUDGET_IS_SPENT = 429
"""The answer to an eviction that a PodDisruptionBudget does not allow now."""
_TWO_BUDGETS = "more than one PodDisruptionBudget"
"""Part of the answer to an eviction that no budget allows, ever: Kubernetes evicts no pod that two of them select."""
_MERGE_PATCH = "application/merge-patch+json"


class ClusterError(InvalidError):
    """The cluster cannot be reached, or refuses a call; the text is the cluster's own."""


class JobNotFoundError(ClusterError):
    """The TrainingJob does not exist."""


@dataclass(frozen=True)
class JobEvent:
    """An Event of a job: what the operator did, and why; `time` is as Kubernetes writes it."""

    time: str
    type: str
    reason: str
    message: str


class TrainingJobClient:
    """One namespace's TrainingJobs; the namespace of the kubeconfig's context unless another is named.

    Every method raises ClusterError, and JobNotFoundError for a job that does not exist.
    """

    def __init__(self, namespace: str | None = None) -> None:
        configuration = client.Configuration()
        try:
            _load(configuration)
        except (config.ConfigException, OSError) as error:
            problem = str(error).rstrip(".")
            raise ClusterError(f"no cluster: {problem}; set KUBECONFIG to the file of one") from error
        self.namespace = namespace or _context_namespace()
        self._place = (GROUP, VERSION, self.namespace, PLURAL)
        api = client.ApiClient(configuration)
        self._jobs = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)

    def submit(self, job: TrainingJob | Path) -> str:
        """Creates a job, from a manifest file or from Python; returns its name."""
        manifest = load_manifest(job) if isinstance(job, Path) else job
        body = manifest.model_dump(mode="json", by_alias=True, exclude_unset=True, context=IN_WORDS)
        body["metadata"].pop("namespace", None)
        self._call(self._jobs.create_namespaced_custom_object, *self._place, body)
        return manifest.metadata.name

    def status(self, name: str) -> TrainingJobStatus:
        """Returns the status that the operator last wrote; a Pending one before the first."""
        found = self._call(self._jobs.get_namespaced_custom_object, *self._place, name)
        return _status_of(found)

    def list(self) -> dict[str, TrainingJobStatus]:
        """The status of every job, by name."""
        found = self._call(self._jobs.list_namespaced_custom_object, *self._place)
        return {item["metadata"]["name"]: _status_of(item) for item in found["items"]}

    def follow(self, name: str, timeout: float | None = None) -> Iterator[TrainingJobStatus]:
        """Yields the current status, then each later one as the API server reports it.

        Raises JobNotFoundError when the job is deleted, and TimeoutError after `timeout` seconds.
        """
        limit = math.inf if timeout is None else timeout
        deadline = time.monotonic() + limit
        while True:
            found = self._call(
                self._jobs.list_namespaced_custom_object,
                *self._place,
                field_selector=f"metadata.name={name}",
            )
            if not found["items"]:
                raise JobNotFoundError(f'{PLURAL}.{GROUP} "{name}" not found')
            status = _status_of(found["items"][0])
            yield status
            for status in self._changes(name, found["metadata"]["resourceVersion"], deadline):
                yield status
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"TrainingJob {name} is {status.phase} after {duration_text(limit)}: {status.message}"
                )

    def _changes(self, name: str, version: str, deadline: float) -> Iterator[TrainingJobStatus]:
        """Statuses newer than a resource version, until the watch ends for whatever reason."""
        seconds = math.ceil(min(_WATCH_SECONDS, max(1.0, deadline - time.monotonic())))
        events = watch.Watch().stream(
            self._jobs.list_namespaced_custom_object,
            *self._place,
            field_selector=f"metadata.name={name}",
            resource_version=version,
            timeout_seconds=seconds,
            _request_timeout=seconds + 30,
        )
        try:
            for event in events:
                if event["type"] == "DELETED":
                    raise JobNotFoundError(f"TrainingJob {name} was deleted")
                yield _status_of(event["object"])
        except ApiException as error:
            if error.status != _GONE:
                raise ClusterError(_words_of(error)) from error
        except HTTPError:
            return  # the caller lists again, which says whether the cluster can be reached

    def wait(
        self,
        name: str,
        phases: frozenset[JobPhase] = ENDED,
        timeout: float | None = None,
        observer: Callable[[TrainingJobStatus], None] = lambda _: None,
    ) -> TrainingJobStatus:
        """Waits until the job is in one of `phases`; by default, until it has ended. Raises TimeoutError.

        `observer` gets every status on the way; `timeout` is in seconds.
        """
        for status in self.follow(name, timeout):
            observer(status)
            if status.phase in phases:
                break
        return status

    def logs(self, name: str, member: str = "master-0", follow: bool = False) -> Iterator[str]:
        """Yields log lines of the newest pod of a member such as `worker-1`; `follow` continues until the pod ends."""
        pod = self._newest_pod(name, member)
        if not follow:
            text: str = self._call(self._core.read_namespaced_pod_log, pod, self.namespace)
            yield from text.splitlines()
            return
        response = self._call(
            self._core.read_namespaced_pod_log, pod, self.namespace, follow=True, _preload_content=False
        )
        for line in response:
            yield line.decode("utf-8", errors="replace").removesuffix("\n")

    def events(self, name: str) -> tuple[JobEvent, ...]:
        """The job's Events, oldest first."""
        selector = f"involvedObject.kind=TrainingJob,involvedObject.name={name}"
        found = self._call(self._core.list_namespaced_event, self.namespace, field_selector=selector)
        events = [
            JobEvent(str(event.event_time or event.last_timestamp), event.type, event.reason, event.message)
            for event in found.items
        ]
        return tuple(sorted(events, key=lambda event: event.time))

    def suspend(self, name: str) -> None:
        """Suspends a job: a checkpoint is taken, and the pods are deleted."""
        self._patch(name, {"spec": {"suspend": True}})

    def resume(self, name: str) -> None:
        """Resumes a job from its checkpoint."""
        self._patch(name, {"spec": {"suspend": False}})

    def scale(
        self, name: str, edit: Callable[[TrainingJobSpec], TrainingJobSpec]
    ) -> tuple[TrainingJobSpec, TrainingJobSpec]:
        """Changes the numbers of processes to those that `edit` returns; returns the spec before and after."""
        found = self._call(self._jobs.get_namespaced_custom_object, *self._place, name)
        phase = _status_of(found).phase
        if phase in ENDED:
            raise ClusterError(f"TrainingJob {name} is {phase}: it has no processes to scale")
        before = TrainingJob.from_json(
            json.dumps({key: found[key] for key in ("apiVersion", "kind", "metadata", "spec")})
        )
        after = edit(before.spec)
        patch = {
            role: {"replicas": new.replicas, "minReplicas": new.min_replicas, "maxReplicas": new.max_replicas}
            for role, old, new in (("ps", before.spec.ps, after.ps), ("worker", before.spec.worker, after.worker))
            if old.replicas != new.replicas
        }
        if patch:
            self._patch(name, {"spec": patch})
        return before.spec, after

    def drain(
        self,
        name: str,
        index: int,
        timeout: float = 600.0,
        observer: Callable[[TrainingJobStatus], None] = lambda _: None,
    ) -> str:
        """Evicts the pod of a parameter server, as `kubectl drain` does; returns the pod's name.

        Waits up to `timeout` seconds for a job that does not train yet, and calls `observer` with its status at once
        and upon every change. Raises ClusterError with the reason if the rows cannot move away first.
        """
        server = f"ps-{index}"
        pod = _server_pod(name, self._until_rows_move(name, server, timeout, observer), index)
        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=pod, namespace=self.namespace))
        try:
            self._call(self._core.create_namespaced_pod_eviction, pod, self.namespace, body)
        except ClusterError as error:
            if isinstance(error.__cause__, ApiException) and error.__cause__.status == _BUDGET_IS_SPENT:
                why = "another parameter server is away; try again once it has a successor with its share of the rows"
                raise ClusterError(f"{server}: {why}: {error}") from error
            if _TWO_BUDGETS in str(error):
                remedy = (
                    f"leave pods with the label emberscale.io/job-name out of the other budget that selects {pod}; "
                    f"`kubectl get pdb -n {self.namespace}` lists it beside {name}-ps"
                )
                raise ClusterError(f"{server}: {error} Nothing can drain its node either: {remedy}") from error
            raise
        return pod

    def _until_rows_move(
        self, name: str, server: str, timeout: float, observer: Callable[[TrainingJobStatus], None]
    ) -> TrainingJobStatus:
        """Returns a job's status once its rows can move. Raises ClusterError if they never will, or not in time."""
        try:
            for status in self.follow(name, timeout):
                if status.phase in _ROWS_MOVE:
                    return status
                if status.phase not in _YET_TO_TRAIN:
                    raise ClusterError(
                        f"{server}: TrainingJob {name} is {status.phase}: rows move only while it trains or evaluates"
                    )
                observer(status)
        except TimeoutError as error:
            raise ClusterError(f"{server}: its rows move only while the job trains or evaluates: {error}") from error
        raise AssertionError("a job is followed until it is gone")

    def kill(self, name: str, index: int) -> str:
        """Deletes the pod of a parameter server without a grace period; returns the pod's name.

        Kubernetes leaves it a moment all the same, in which a server with few rows may give them away.
        """
        pod = _server_pod(name, self.status(name), index)
        self._call(self._core.delete_namespaced_pod, pod, self.namespace, grace_period_seconds=0)
        return pod

    def delete(self, name: str) -> None:
        """Deletes the job and everything that belongs to it; its checkpoints stay."""
        self._call(self._jobs.delete_namespaced_custom_object, *self._place, name)

    def _patch(self, name: str, patch: dict[str, Any]) -> None:
        edit = self._jobs.patch_namespaced_custom_object
        self._call(edit, *self._place, name, patch, _content_type=_MERGE_PATCH)

    def _newest_pod(self, name: str, member: str) -> str:
        role, _, index = member.rpartition("-")
        labels = f"emberscale.io/job-name={name},emberscale.io/role={role},emberscale.io/index={index}"
        pods = self._call(self._core.list_namespaced_pod, self.namespace, label_selector=labels).items
        if not pods:
            raise JobNotFoundError(f"TrainingJob {name} has no pod of {member} in namespace {self.namespace}")
        newest = max(pods, key=lambda pod: int(pod.metadata.labels.get("emberscale.io/incarnation", "0")))
        pod_name: str = newest.metadata.name
        return pod_name

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except ApiException as error:
            kind = JobNotFoundError if error.status == 404 else ClusterError
            raise kind(_words_of(error)) from error
        except HTTPError as error:
            raise ClusterError(f"the cluster cannot be reached: {error}") from error


def _server_pod(name: str, status: TrainingJobStatus, index: int) -> str:
    """The pod of a parameter server. Raises ClusterError if there is none."""
    pods = {member.index: member.pod for member in status.members if member.role == str(Role.PS) and member.pod}
    if index not in pods:
        known = ", ".join(f"ps-{one}" for one in sorted(pods)) or "none"
        raise ClusterError(f"ps-{index}: TrainingJob {name} has no such parameter server; it has {known}")
    return pods[index]


def _status_of(body: Mapping[str, Any]) -> TrainingJobStatus:
    try:
        return parse_status(body.get("status") or {})
    except UnreadableStatusError as error:
        name = body["metadata"]["name"]
        raise ClusterError(f"TrainingJob {name}: {error}; install the version of the cluster's operator") from error


def _load(configuration: client.Configuration) -> None:
    """Loads the configuration from KUBECONFIG, this pod's service account, or the user's own file."""
    if not os.environ.get("KUBECONFIG") and os.environ.get("KUBERNETES_SERVICE_HOST"):
        config.load_incluster_config(client_configuration=configuration)
    else:
        config.load_kube_config(_kubeconfig(), client_configuration=configuration)


def _kubeconfig() -> str:
    """The current value of the variable: the library reads it only on import."""
    return os.environ.get("KUBECONFIG") or "~/.kube/config"


def _context_namespace() -> str:
    try:
        _, active = config.list_kube_config_contexts(_kubeconfig())
    except config.ConfigException:
        return "default"
    namespace: str = active["context"].get("namespace", "default")
    return namespace


def _words_of(error: ApiException) -> str:
    """Returns the API server's message without its wrapping."""
    try:
        message: str = json.loads(error.body or "")["message"]
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
    return message
