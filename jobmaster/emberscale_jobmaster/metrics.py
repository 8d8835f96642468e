"""The master's Prometheus metrics: the state of the job at each scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from emberscale_api import metrics
from emberscale_api.job.roles import Role
from emberscale_api.job.status import JobPhase
from emberscale_api.rpc import master_pb2 as pb
from emberscale_jobmaster.runtime import JobRuntime
from emberscale_jobmaster.state import committed_samples, phase_of
from emberscale_jobmaster.status import plan


class JobMetrics(Collector):
    """Reads a job's state and observations at every scrape."""

    def __init__(self, runtime: JobRuntime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """The metrics of this moment."""
        state, seen = self._runtime.snapshot()
        spec = self._runtime.spec
        current = phase_of(state, spec)
        alive = GaugeMetricFamily(metrics.MEMBERS_ALIVE, "Live members, by role", labels=["role"])
        for role in (Role.PS, Role.WORKER):
            slots = (slot for slot in state.members.slots.values() if slot.role is role)
            alive.add_metric([role.value], sum(slot.process is not None and slot.process.alive for slot in slots))
        yield alive
        planned = GaugeMetricFamily(metrics.PLANNED_REPLICAS, "Planned members, by role", labels=["role"])
        for part in plan(state, spec).roles:
            planned.add_metric([pb.Role.Name(part.role).lower()], part.replicas)
        yield planned
        samples, expected = committed_samples(state, spec), spec.training.epochs * state.training_records
        yield GaugeMetricFamily(
            metrics.JOB_PROGRESS_RATIO, "Share of all epochs' samples that is trained", samples / (expected or 1)
        )
        throughput = seen.meter.rate(self._runtime.now()) if current is JobPhase.TRAINING else None
        yield GaugeMetricFamily(metrics.JOB_THROUGHPUT, "Recent throughput in samples per second", throughput or 0.0)
        yield GaugeMetricFamily(metrics.LOSS, "Recent progressive log loss", seen.window.loss())
        yield GaugeMetricFamily(metrics.AUC_RATIO, "Recent progressive area under the ROC curve", seen.window.auc())
        yield GaugeMetricFamily(metrics.SHARDS_LEASED, "Live leases", len(state.ledger.leases))
        yield CounterMetricFamily(metrics.LEASES_EXPIRED_TOTAL, "Lapsed leases", seen.lapses)
        yield CounterMetricFamily(metrics.RECOVERIES_TOTAL, "Roll-backs to a checkpoint", state.recoveries)
