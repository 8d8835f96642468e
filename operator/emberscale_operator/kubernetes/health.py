"""The operator's own health: Prometheus metrics, and probes that fail when it misses events or gets stuck."""

import time
from collections.abc import Callable, Iterator, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from emberscale_api.job.status import JobPhase, TrainingJobStatus
from emberscale_api.metrics import JOB_PHASE, JOB_REDIS_BYTES, REDIS_MEMORY_RATIO, REDIS_UP
from emberscale_api.telemetry import labelled
from emberscale_operator.kubernetes.client import ApiClient
from emberscale_operator.kubernetes.fleet import Fleet
from emberscale_operator.kubernetes.pod_state import PodView
from emberscale_operator.kubernetes.tenants import Tenants

_COMPLETION_BUCKETS = (60, 300, 900, 1800, 3600, 7200, 14400, 28800, 86400, 259200)
_MOST_REASONS = 64
_OTHER = "Other"


class Tallies:
    """Ends of jobs by reason, their completion times, and ends of pods that were still wanted, by cause.

    Masters, which run a team's own code, name the reasons: new ones beyond a number count as `Other`.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ends = Counter(
            "emberscale_jobs_ended", "TrainingJobs that ended, by reason", ["reason"], registry=registry
        )
        self._completion = Histogram(
            "emberscale_job_completion_seconds",
            "From a job's start to its completion (JCT)",
            buckets=_COMPLETION_BUCKETS,
            registry=registry,
        )
        self._failures = Counter(
            "emberscale_pod_failures",
            "Pods that ended unplanned, by role and cause",
            ["role", "reason"],
            registry=registry,
        )
        self._reconciliations = Counter(
            "emberscale_operator_reconciliations", "Reconciliations of jobs", registry=registry
        )
        self._reasons: set[str] = set()
        # only a series that exists from the start shows its first increase
        self._ends.labels("Completed")

    def count_reconciliation(self) -> None:
        """Counts a reconciliation."""
        self._reconciliations.inc()

    def count_job_end(self, status: TrainingJobStatus) -> None:
        """Counts a job that has become Complete or Failed."""
        complete = status.phase is JobPhase.COMPLETE
        self._ends.labels("Completed" if complete else self._counted_as(status.reason)).inc()
        if complete and status.start_time is not None and status.completion_time is not None:
            self._completion.observe((status.completion_time - status.start_time).total_seconds())

    def _counted_as(self, reason: str) -> str:
        if len(self._reasons) < _MOST_REASONS:
            self._reasons.add(reason)
        return reason if reason in self._reasons else _OTHER

    def count_pod_end(self, view: PodView) -> None:
        """Counts a pod that ended unasked."""
        if view.cause != "Completed":
            self._failures.labels(str(view.id.role), view.cause).inc()


_UNREAD = "Unknown"

Check = Callable[[float], str | None]
"""Takes the monotonic clock's seconds; returns what is wrong, in words, or None."""


class OperatorMetrics(Collector):
    """The phase of each job, with or without a master, the calls to the API server, and the state of Redis.

    A job whose object or status this operator has not read, or cannot, is in the phase `Unknown`.
    """

    def __init__(self, client: ApiClient, fleet: Fleet, tenants: Tenants) -> None:
        self._client = client
        self._fleet = fleet
        self._tenants = tenants

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields the present metrics."""
        phases = {
            (key.namespace, key.name, controller.standing.phase if controller.standing else _UNREAD): 1.0
            for (key, _), controller in self._fleet.controllers.items()
        }
        text, labels = "1 for the phase that a TrainingJob is in", ["namespace", "training_job"]
        yield labelled(GaugeMetricFamily, JOB_PHASE, text, [*labels, "phase"], phases)
        name, calls = "emberscale_operator_api_calls", dict(sorted(self._client.calls.items()))
        yield labelled(CounterMetricFamily, name, "Calls to the API server", ["verb", "resource"], calls)
        # only a series that exists from the start shows its first increase
        none = {(verb, resource, "0"): 0 for verb, resource in calls}
        name, refused = "emberscale_operator_api_refused", {**none, **self._client.refused}
        text, of_calls = "Calls that the API server refused, or did not answer (0)", ["verb", "resource", "status"]
        yield labelled(CounterMetricFamily, name, text, of_calls, refused)
        yield CounterMetricFamily(
            "emberscale_operator_defects", "Unexpected errors in the operator", value=self._fleet.defects
        )
        if self._tenants.up is not None:
            yield GaugeMetricFamily(REDIS_UP, "1 while Redis executes the operator's commands", float(self._tenants.up))
        if self._tenants.fill is not None:
            yield GaugeMetricFamily(REDIS_MEMORY_RATIO, "Redis memory in use over its maxmemory", self._tenants.fill)
        sizes, jobs = self._tenants.sizes, self._fleet.controllers
        stored = {(key.namespace, key.name): sizes[uid] for key, uid in jobs if uid in sizes}
        text = "What a job keeps in a Redis that is half full"
        yield labelled(GaugeMetricFamily, JOB_REDIS_BYTES, text, labels, stored)


async def serve(
    checks: Sequence[Check], registry: CollectorRegistry, health_port: int, metrics_port: int
) -> web.AppRunner:
    """Serves `/healthz`, `/readyz` and `/metrics`. Raises OSError for a port that is taken."""

    async def health(request: web.Request) -> web.Response:
        now = time.monotonic()
        problems = [problem for check in checks if (problem := check(now)) is not None]
        if not problems:
            return web.Response(text="ok\n")
        return web.Response(status=503, text="".join(f"{problem}\n" for problem in problems))

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )

    application = web.Application()
    application.router.add_get("/healthz", health)
    application.router.add_get("/readyz", health)
    application.router.add_get("/metrics", metrics)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    for port in {health_port, metrics_port}:
        await web.TCPSite(runner, port=port).start()
    return runner
