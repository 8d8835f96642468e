"""An in-memory API server, and an operator of one job that may be killed at any of its calls."""

import asyncio
import base64
import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry

from emberscale_operator.controller import JobController
from emberscale_operator.kubernetes.backend import KubernetesBackend, control
from emberscale_operator.kubernetes.client import ApiError, ApiUnavailableError
from emberscale_operator.kubernetes.events import EventRecorder
from emberscale_operator.kubernetes.health import Tallies
from emberscale_operator.kubernetes.job import JobKey
from emberscale_operator.kubernetes.pod_warnings import PodWarnings
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.machine import Policy
from emberscale_operator.machine.restarts import Backoff
from training_jobs import job_body

KEY = JobKey("team-a", "ctr")
START = 1_767_225_600.0
SETTINGS = Settings(image="emberscale:1", redis_url="redis://redis:6379/0", namespace="ops", identity="op-1")
PATIENT = Policy(backoff=Backoff(base=0.0), backoff_limit=1000)

BACK_OFF = [5, 10, 20, 40, 80, 160, 300, 300, 300]
"""The seconds between attempts that fail again and again."""

WANTED = ["master-0", "ps-0", "ps-1", "worker-0", "worker-1", "worker-2"]
"""The pods of the job of `new_api`."""


class KilledError(Exception):
    """The operator died in the middle of a call."""


class MemoryApi:
    """Objects by path. `job` and `pods` show the objects as of the last `sync`."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.now = START
        self.body = body
        self.objects: dict[str, dict[str, Any]] = {}
        self.writes: Counter[str] = Counter()
        self.events: list[str] = []
        self.kill_in = 1 << 30
        self.kill_after = False
        self.refusal: ApiError | ApiUnavailableError | None = None
        self.most_live: Counter[str] = Counter()
        self._numbers = itertools.count(1)
        self._seen: list[dict[str, Any]] = []
        self._seen_body = copy.deepcopy(body)

    def job(self, key: JobKey, uid: str) -> Mapping[str, Any] | None:
        return self._seen_body if self._seen_body["metadata"]["uid"] == uid else None

    def pods(self, key: JobKey) -> Sequence[Mapping[str, Any]]:
        return self._seen

    def sync(self) -> None:
        self._seen = [{**pod, "status": copy.copy(pod["status"])} for pod in self.all_pods()]
        self._seen_body = {**self.body, "metadata": dict(self.body["metadata"]), "spec": dict(self.body["spec"])}

    def all_pods(self) -> list[dict[str, Any]]:
        return [body for path, body in self.objects.items() if "/pods/" in path]

    def live_pods(self) -> list[dict[str, Any]]:
        return [pod for pod in self.all_pods() if pod["status"]["phase"] in ("Pending", "Running")]

    def live_pod(self, slot: str) -> dict[str, Any]:
        """Returns the live pod of a member, such as `worker-0`."""
        return next(pod for pod in self.live_pods() if slot_of(pod) == slot)

    def edit_unseen(self, **spec: Any) -> None:
        """Replaces fields of the spec; the watch shows the job as it was until the next `sync`."""
        seen = self._seen_body
        self.edit(**spec)
        self._seen_body = seen

    def edit(self, **spec: Any) -> None:
        """Replaces fields of the spec, as a person does by applying a manifest."""
        self.body["spec"] |= spec
        self.body["metadata"]["generation"] += 1
        self._change_version()
        self.sync()

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._call(lambda: self._create(path, body))

    async def get(self, path: str, **query: str) -> dict[str, Any]:
        if path.endswith("/events"):
            return {"items": []}
        if path.endswith("/pods"):
            name = query.get("fieldSelector", "").removeprefix("metadata.name=")
            return {"items": [copy.deepcopy(pod) for pod in self.all_pods() if name in ("", pod["metadata"]["name"])]}
        if path.endswith("/trainingjobs"):
            return {"items": [copy.deepcopy(self.body)]}
        if path not in self.objects:
            return self._fail(404, "NotFound")
        return copy.deepcopy(self.objects[path])

    async def patch(self, path: str, body: dict[str, Any], kind: str = "") -> dict[str, Any]:
        return self._call(lambda: self._patch(path, body))

    async def delete(self, path: str, uid: str, grace_seconds: int | None = None) -> None:
        self._call(lambda: self._delete(path, uid))

    def _call(self, effect: Any) -> dict[str, Any]:
        self.kill_in -= 1
        if self.kill_in == 0 and not self.kill_after:
            raise KilledError
        answer: dict[str, Any] = effect()
        if self.kill_in == 0:
            raise KilledError
        return answer

    def _create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{path}/{body['metadata']['name']}"
        if name in self.objects:
            self._fail(409, "AlreadyExists")
        if path.endswith("/events"):
            self.events.append(body["reason"])
        else:
            if self.refusal is not None and path.endswith("/pods"):
                raise self.refusal
            self.writes["create"] += 1
        made = copy.deepcopy(body)
        made["metadata"] |= {"uid": f"uid-{next(self._numbers)}", "creationTimestamp": self._time()}
        if said := made.pop("stringData", None):
            made["data"] = {name: base64.b64encode(text.encode()).decode() for name, text in said.items()}
        if path.endswith("/pods"):
            made["status"] = {"phase": "Pending"}
        self.objects[name] = made
        for slot, count in Counter(slot_of(pod) for pod in self.live_pods()).items():
            self.most_live[slot] = max(self.most_live[slot], count)
        return dict(made)

    def _patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.writes["patch"] += 1
        if path.endswith("/status"):
            # of a custom resource: the API server compares the version, and ignores the uid
            if body["metadata"]["resourceVersion"] != self.body["metadata"]["resourceVersion"]:
                self._fail(409, "Conflict")
            self.body["status"] = merged(self.body.get("status", {}), body["status"])
            self._change_version()
            return copy.deepcopy(self.body)
        if path in self.objects:
            self.objects[path] = merged(self.objects[path], body)
        return self.body

    def _delete(self, path: str, uid: str) -> dict[str, Any]:
        self.writes["delete"] += 1
        if path in self.objects and self.objects[path]["metadata"]["uid"] == uid:
            del self.objects[path]
        return {}

    def _change_version(self) -> None:
        self.body["metadata"]["resourceVersion"] = str(int(self.body["metadata"]["resourceVersion"]) + 1)

    def _fail(self, status: int, reason: str) -> dict[str, Any]:
        raise ApiError(status, reason, reason)

    def _time(self) -> str:
        return datetime.fromtimestamp(self.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def run_pods(self) -> None:
        """Starts pending pods, as a kubelet does; they have no address, so the operator calls no master."""
        for pod in self.all_pods():
            if pod["status"]["phase"] == "Pending":
                pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}

    def end_pod(self, pod: dict[str, Any], code: int, reason: str = "Error") -> None:
        terminated = {"exitCode": code, "reason": reason, "finishedAt": self._time()}
        name = pod["spec"]["containers"][0]["name"]
        statuses = [{"name": name, "state": {"terminated": terminated}}]
        pod["status"] = {"phase": "Failed", "containerStatuses": statuses}


def merged(old: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    result = dict(old)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result


def pauses(times: Sequence[float]) -> list[int]:
    """Returns the seconds between these times, rounded."""
    return [round(later - sooner) for sooner, later in itertools.pairwise(times)]


def slot_of(pod: Mapping[str, Any]) -> str:
    labels = pod["metadata"]["labels"]
    return f"{labels['emberscale.io/role']}-{labels['emberscale.io/index']}"


def names_of(pods: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted(slot_of(pod) for pod in pods)


def new_api(**spec: Any) -> MemoryApi:
    return MemoryApi(job_body(ps={"replicas": 2}, worker={"replicas": 3}, **spec))


class Operator:
    """A controller that is restarted whenever it is killed."""

    def __init__(self, api: MemoryApi, policy: Policy | None = PATIENT) -> None:
        self.api = api
        self.policy = policy
        self.registry = CollectorRegistry()
        self.tallies = Tallies(self.registry)
        self.tenancy = NoRedis()
        self.controller = self.start()

    def start(self) -> JobController:
        api: Any = self.api  # the stub has every call that they make
        recorder, warnings = EventRecorder(api, "op-1"), PodWarnings(api)
        backend = KubernetesBackend(
            KEY, "job-uid", api, api, recorder, warnings, self.tallies, SETTINGS, self.tenancy, self.policy
        )
        return control(backend, lambda: self.api.now)

    async def step(self, seconds: float = 1.0) -> None:
        self.api.now += seconds
        try:
            await self.controller.step(self.api.now)
        except KilledError:
            self.api.kill_in = 1 << 30
            self.controller = self.start()

    async def settle(self, steps: int = 8, seconds: float = 1.0) -> None:
        for _ in range(steps):
            await self.step(seconds)
            self.api.sync()
            self.api.run_pods()
            self.api.sync()
        await asyncio.sleep(0)


class NoRedis:
    """Stands in for the users in Redis: it makes none, and answers `why` and `full` for every job.

    It remembers the uids of the jobs whose claims at the brain were to end.
    """

    why: str | None = None
    full: str | None = None

    def __init__(self) -> None:
        self.released: list[str] = []

    def admit(self, job_uid: str, namespace: str, password: str) -> None:
        return

    def expelled(self, job_uid: str) -> str | None:
        return self.why

    def fills(self, job_uid: str) -> str | None:
        return self.full

    def release(self, job_uid: str) -> None:
        self.released.append(job_uid)
