"""The operator as a whole: kopf watches, the fleet reconciles, the lease keeps a second one waiting."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import kopf
import structlog
from prometheus_client import CollectorRegistry

from emberscale_api.job.training_job import API_VERSION, GROUP, PLURAL, VERSION
from emberscale_api.telemetry import ProcessMetrics, configure_logging
from emberscale_operator.kubernetes import names
from emberscale_operator.kubernetes.backend import KubernetesBackend, control
from emberscale_operator.kubernetes.census import TRAINING_JOB, Census, WatchedKind
from emberscale_operator.kubernetes.claims import BrainClaims
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiUnavailableError
from emberscale_operator.kubernetes.events import EventRecorder
from emberscale_operator.kubernetes.flash_tenants import FlashTenants
from emberscale_operator.kubernetes.fleet import Fleet
from emberscale_operator.kubernetes.health import OperatorMetrics, Tallies, serve
from emberscale_operator.kubernetes.job import JobKey
from emberscale_operator.kubernetes.lease import LeaderLease, LeaseLostError, account_owner
from emberscale_operator.kubernetes.namespaces import await_closing, readable_namespaces
from emberscale_operator.kubernetes.pod_warnings import PodWarnings
from emberscale_operator.kubernetes.settings import Settings
from emberscale_operator.kubernetes.tenants import Tenants

_CRD_SECONDS = 5.0
_END_SECONDS = 5.0
"""How long the operator waits for its watches to end, and for calls that it cancels."""
_log = structlog.get_logger()


class WatchedCluster:
    """The objects from kopf's watches: TrainingJobs, and the pods that carry a job's label."""

    def __init__(self) -> None:
        self._jobs: Mapping[JobKey, Any] = {}
        self._pods: Mapping[JobKey, Any] = {}

    def attach(self, jobs: Mapping[JobKey, Any], pods: Mapping[JobKey, Any]) -> None:
        """Takes the indices, which kopf keeps up to date from then on."""
        self._jobs, self._pods = jobs, pods

    def job(self, key: JobKey, uid: str) -> Mapping[str, Any] | None:
        """The TrainingJob of this uid as last seen; one of its name that is gone may still be there beside it."""
        return next((body for body in self._jobs.get(key, ()) if body["metadata"]["uid"] == uid), None)

    def pods(self, key: JobKey) -> Sequence[Mapping[str, Any]]:
        """The pods that carry the job's label."""
        return tuple(self._pods.get(key, ()))

    def versions(self, kind: WatchedKind, namespace: str) -> Mapping[str, str]:
        """The resourceVersion of every object of a kind, by uid, in a namespace; "" stands for the whole cluster."""
        found = self._jobs if kind is TRAINING_JOB else self._pods
        stores = (store for key, store in found.items() if namespace in ("", key.namespace))
        bodies = (body["metadata"] for store in stores for body in store)
        return {metadata["uid"]: metadata["resourceVersion"] for metadata in bodies}


def run(settings: Settings) -> int:
    """Runs until SIGTERM; returns the exit code."""
    configure_logging("", "operator", 0, settings.log_level)
    _forward_library_logs(settings.log_level)
    try:
        return asyncio.run(_run(settings))
    except (ApiUnavailableError, LeaseLostError, OSError) as error:
        _log.error("operator_stopping", problem=str(error))
        return 1


class _LibraryLogs(logging.Handler):
    """Log records of libraries, as events like our own."""

    def emit(self, record: logging.LogRecord) -> None:
        problem = repr(record.exc_info[1]) if record.exc_info else ""
        _log.log(record.levelno, record.getMessage(), library=record.name.partition(".")[0], problem=problem)


def _forward_library_logs(level: int) -> None:
    """Forwards library logs. kopf logs every event that it handles, which is useful only for debugging."""
    logging.basicConfig(handlers=[_LibraryLogs()], level=level if level <= logging.DEBUG else logging.WARNING)


async def _run(settings: Settings) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    client = await ApiClient.connect()
    cluster = WatchedCluster()
    registry = CollectorRegistry()
    tallies = Tallies(registry)
    warnings = PodWarnings(client)
    flash = FlashTenants(settings.flash_redis_url, settings.installation) if settings.flash_redis_url else None
    brain = settings.brain_address
    claims = BrainClaims(brain, settings.brain_token, settings.brain_authority) if brain else None
    tenants = Tenants(settings.redis_url, settings.installation, flash=flash, claims=claims)
    kept = (tenants, *(one for one in (flash, claims) if one is not None))
    fleet = Fleet(
        lambda key, uid: control(
            KubernetesBackend(
                key,
                uid,
                cluster,
                client,
                EventRecorder(client, settings.identity),
                warnings,
                tallies,
                settings,
                tenants,
            ),
            time.time,
        ),
        bury=tenants.remove,
    )
    census = Census(client, cluster, settings.watch_namespaces, settings.resync, tenants.sweep)
    registry.register(OperatorMetrics(client, fleet, tenants))
    registry.register(ProcessMetrics())
    web = await serve((fleet.stuck, lambda _: census.behind()), registry, settings.health_port, settings.metrics_port)
    lease = await LeaderLease.connect(settings.namespace, settings.lease_name, settings.identity, account_owner())
    try:
        if not await _first(stopping, _ready(client, lease)):
            return 0
        readable = asyncio.create_task(readable_namespaces(client, settings.watch_namespaces))  # beside `lease.keep`
        watching = asyncio.create_task(_watch(readable, cluster, fleet, stopping))
        others = [
            asyncio.create_task(coroutine)
            for coroutine in (
                lease.keep(),
                census.keep(),
                *(one.keep() for one in kept),
                await_closing(client, readable),
                stopping.wait(),
            )
        ]
        await _until_one_ends(watching, others, stopping, fleet.close)
        await lease.release()
        return 0
    finally:
        await web.cleanup()
        for one in (*kept, lease, client):
            await one.close()


async def _until_one_ends(
    watching: asyncio.Task[Any],
    others: Sequence[asyncio.Task[Any]],
    stopping: asyncio.Event,
    close: Callable[[], Awaitable[None]],
) -> None:
    """Returns once one of the tasks has ended, and so all of them. Raises what that task raised.

    `stopping` ends the watches within a moment, `close` ends what they wake; the other tasks run for ever.
    """
    done, _ = await asyncio.wait({watching, *others}, return_when=asyncio.FIRST_COMPLETED)
    stopping.set()
    await close()
    await asyncio.wait({watching}, timeout=_END_SECONDS)
    for task in (watching, *others):
        task.cancel()
    await asyncio.wait({watching, *others}, timeout=_END_SECONDS)
    for task in done:
        task.result()


async def _first(stopping: asyncio.Event, work: Any) -> bool:
    """Whether the work was done before the operator was told to stop."""
    task, stop = asyncio.create_task(work), asyncio.create_task(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        stop.cancel()
        task.result()
        return True
    task.cancel()
    return False


async def _ready(client: ApiClient, lease: LeaderLease) -> None:
    """Waits for the definition of TrainingJobs, which kopf looks for only once, and for the lease."""
    told = False
    while True:
        try:
            found = await client.get(f"/apis/{API_VERSION}")
            if any(resource["name"] == PLURAL for resource in found["resources"]):
                break
        except ApiError as error:
            if error.status != 404:
                raise ApiUnavailableError(str(error)) from error
        if not told:
            _log.warning("crd_missing", crd=PLURAL)
            told = True
        await asyncio.sleep(_CRD_SECONDS)
    await lease.acquire()


async def _watch(
    readable: Awaitable[Sequence[str]], cluster: WatchedCluster, fleet: Fleet, stopping: asyncio.Event
) -> None:
    namespaces = await readable
    registry = build_registry(cluster, fleet)
    stop_kopf = asyncio.Event()
    task = asyncio.create_task(
        kopf.operator(
            registry=registry,
            settings=kopf_settings(),
            clusterwide=not namespaces,
            namespaces=namespaces,
            standalone=True,
            stop_flag=stop_kopf,
        )
    )
    stop = asyncio.create_task(stopping.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop_kopf.set()
    stop.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def kopf_settings() -> kopf.OperatorSettings:
    """Returns settings with which kopf writes nothing to objects: no handler needs it, and there are no finalizers."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.label_selectors["pods"] = names.JOB_LABEL
    settings.networking.request_timeout = 60
    settings.persistence.finalizer = f"{GROUP}/kopf"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    settings.execution.default_backoff = 10
    return settings


def build_registry(cluster: WatchedCluster, fleet: Fleet) -> kopf.OperatorRegistry:
    """The handlers: two indices, and a wake-up for every event."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> Any:
        return kopf.login_with_kubeconfig(**kwargs) or kopf.login_with_service_account(**kwargs)

    @kopf.index(GROUP, VERSION, PLURAL, id="jobs_by_key", registry=registry)
    async def jobs_by_key(namespace: str | None, name: str, body: kopf.Body, **_: Any) -> dict[JobKey, Any]:
        return {JobKey(namespace or "", name): _needed_of_job(body)}

    @kopf.index("", "v1", "pods", id="pods_by_job", labels={names.JOB_LABEL: kopf.PRESENT}, registry=registry)
    async def pods_by_job(
        namespace: str | None, labels: Mapping[str, str], body: kopf.Body, **_: Any
    ) -> dict[JobKey, Any]:
        return {JobKey(namespace or "", labels[names.JOB_LABEL]): _needed(body)}

    @kopf.on.event(GROUP, VERSION, PLURAL, registry=registry)
    async def job_event(
        namespace: str | None, name: str, uid: str, jobs_by_key: Any = (), pods_by_job: Any = (), **_: Any
    ) -> None:
        cluster.attach(jobs_by_key, pods_by_job)
        fleet.see(JobKey(namespace or "", name), uid)

    @kopf.on.event("", "v1", "pods", labels={names.JOB_LABEL: kopf.PRESENT}, registry=registry)
    async def pod_event(
        namespace: str | None, labels: Mapping[str, str], jobs_by_key: Any = (), pods_by_job: Any = (), **_: Any
    ) -> None:
        cluster.attach(jobs_by_key, pods_by_job)
        fleet.wake(JobKey(namespace or "", labels[names.JOB_LABEL]))

    return registry


_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "generation", "ownerReferences")
_TIMES = ("creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")


def _metadata_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata that the operator reads: others may write any labels and annotations."""
    metadata = body["metadata"]
    ours = {
        part: {name: text for name, text in (metadata.get(part) or {}).items() if name.startswith(f"{GROUP}/")}
        for part in ("labels", "annotations")
    }
    return ours | {name: metadata[name] for name in (*_IDENTITY, *_TIMES) if name in metadata}


def _needed_of_job(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a TrainingJob that the operator reads, to save memory: managed fields are as large as it."""
    return {**body, "metadata": _metadata_of(body)}


def _needed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a pod that the operator reads, which is small, to save memory."""
    spec = body["spec"]
    containers = [
        {"name": container["name"], "resources": dict(container.get("resources") or {})}
        for container in spec["containers"]
    ]
    return {
        "metadata": _metadata_of(body),
        "spec": {"nodeName": spec.get("nodeName"), "containers": containers},
        "status": body.get("status") or {},
    }
