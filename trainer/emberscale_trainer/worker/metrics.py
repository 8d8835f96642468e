"""The Prometheus metrics of a worker."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from emberscale_api import metrics
from emberscale_trainer.worker.statistics import WorkerStatistics


class WorkerMetrics(Collector):
    """The statistics' totals, read when scraped."""

    def __init__(self, statistics: WorkerStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The totals at this moment."""
        statistics = self._statistics
        yield CounterMetricFamily(metrics.SAMPLES_TOTAL, "Samples trained on", value=statistics.total_samples)
        yield CounterMetricFamily(metrics.BATCHES_TOTAL, "Batches trained on", value=statistics.total_batches)
        stages = CounterMetricFamily(metrics.STAGE_SECONDS_TOTAL, "Seconds spent by stage", labels=["stage"])
        for stage, seconds in statistics.total_stages.items():
            stages.add_metric([stage], seconds)
        yield stages
        traffic = CounterMetricFamily(
            metrics.WIRE_BYTES_TOTAL, "Bytes exchanged with parameter servers", labels=["direction"]
        )
        for direction, size in zip(("received", "sent"), statistics.total_traffic, strict=True):
            traffic.add_metric([direction], size)
        yield traffic
        yield CounterMetricFamily(metrics.IDS_TOTAL, "Rows that batches look up", value=statistics.total_ids)
        yield CounterMetricFamily(
            metrics.KEYS_TOTAL, "Distinct keys among those of a batch", value=statistics.total_keys
        )
