"""What the operator says of itself: probes that fail when reconciling makes no progress, and Prometheus metrics."""

import time
from collections import Counter as Tally
from collections.abc import Iterator

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from emberscale_api.job.status import JobPhase
from emberscale_operator.kubernetes.client import ApiClient
from emberscale_operator.kubernetes.fleet import Fleet

_COMPLETION_BUCKETS = (60, 300, 900, 1800, 3600, 7200, 14400, 28800, 86400, 259200)


class Pulse:
    """Whether the operator gets anywhere: the fleet's sweep beats it."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._last = time.monotonic()
        self.leads = False

    def beat(self) -> None:
        """Progress was made."""
        self._last = time.monotonic()

    @property
    def healthy(self) -> bool:
        """Whether progress was made lately; one that waits for the lease has nothing to do."""
        return not self.leads or time.monotonic() - self._last < self._patience


class OperatorMetrics(Collector):
    """Jobs by phase, how long they took, and what the operator asked of the API server."""

    def __init__(self, client: ApiClient, fleet: Fleet) -> None:
        self._client = client
        self._fleet = fleet
        self._completed: dict[str, tuple[str, float]] = {}

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        """Everything, as of now."""
        phases = GaugeMetricFamily("emberscale_jobs", "TrainingJobs by phase", labels=["phase"])
        counts = Tally(controller.phase for controller in self._fleet.controllers.values())
        for phase in JobPhase:
            phases.add_metric([phase], counts[phase])
        yield phases
        self._note_completions()
        ends = CounterMetricFamily("emberscale_jobs_ended", "TrainingJobs that ended, by reason", labels=["reason"])
        for reason, count in sorted(Tally(reason for reason, _ in self._completed.values()).items()):
            ends.add_metric([reason], count)
        yield ends
        seconds = sorted(seconds for reason, seconds in self._completed.values() if reason == "Completed")
        histogram = HistogramMetricFamily(
            "emberscale_job_completion_seconds", "From a job's start to its completion (JCT)"
        )
        buckets = [(str(float(bound)), sum(value <= bound for value in seconds)) for bound in _COMPLETION_BUCKETS]
        histogram.add_metric([], [*buckets, ("+Inf", len(seconds))], sum(seconds))
        yield histogram
        calls = CounterMetricFamily(
            "emberscale_operator_api_calls", "Calls to the API server", labels=["verb", "resource"]
        )
        for (verb, resource), count in sorted(self._client.calls.items()):
            calls.add_metric([verb, resource], count)
        yield calls
        yield CounterMetricFamily(
            "emberscale_operator_defects", "Errors that nothing in the operator expected", value=self._fleet.defects
        )

    def _note_completions(self) -> None:
        for (_, uid), controller in self._fleet.controllers.items():
            status = controller.status
            if status is None or status.completion_time is None or status.start_time is None:
                continue
            reason = "Completed" if status.phase is JobPhase.COMPLETE else status.reason
            self._completed[uid] = (reason, (status.completion_time - status.start_time).total_seconds())


async def serve(pulse: Pulse, registry: CollectorRegistry, health_port: int, metrics_port: int) -> web.AppRunner:
    """Serves `/healthz`, `/readyz` and `/metrics`. Raises OSError for a port that is taken."""

    async def health(request: web.Request) -> web.Response:
        if pulse.healthy:
            return web.Response(text="ok\n")
        return web.Response(status=503, text="reconciling makes no progress\n")

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
