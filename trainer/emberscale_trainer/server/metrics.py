"""The Prometheus metrics of a parameter server."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from emberscale_api import metrics
from emberscale_api.telemetry import labelled
from emberscale_trainer.server.protection import RowProtection
from emberscale_trainer.server.state import ServerState

_ADMISSION = (
    (metrics.TABLE_ADMITTED_ROWS_TOTAL, "Keys that got a row in a table with admission", "admitted"),
    (metrics.TABLE_REFUSED_PUSHES_TOTAL, "Pushes of keys without a row that were only counted", "refused"),
    (metrics.TABLE_EVICTED_ROWS_TOTAL, "Rows removed by eviction", "evicted"),
)
"""Metrics of tables with admission or eviction, and the counts that they show."""


class ServerMetrics(Collector):
    """Counters of the state and of its protection, read when scraped, and measurements of checkpoints."""

    def __init__(self, state: ServerState, protection: RowProtection, registry: CollectorRegistry) -> None:
        self._state = state
        self._protection = protection
        self._snapshot_pause = Histogram(
            metrics.SNAPSHOT_PAUSE_SECONDS,
            "Seconds for which pushes were held beyond settling, for a snapshot",
            registry=registry,
        )
        self._checkpoint = Histogram(
            metrics.CHECKPOINT_SECONDS,
            "Seconds that writing this server's part of a checkpoint took",
            buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000),
            registry=registry,
        )
        self._checkpoint_bytes = Counter(metrics.CHECKPOINT_BYTES, "Bytes written into checkpoints", registry=registry)
        registry.register(self)

    def snapshot_taken(self, pause_seconds: float) -> None:
        """Counts a snapshot and its pause."""
        self._snapshot_pause.observe(pause_seconds)

    def checkpoint_written(self, seconds: float, size: int) -> None:
        """Counts a written snapshot."""
        self._checkpoint.observe(seconds)
        self._checkpoint_bytes.inc(size)

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """The state's figures at this moment."""
        totals = self._state.totals
        outcomes = {"applied": totals.pushes, "repeated": totals.repeated}
        yield labelled(CounterMetricFamily, metrics.PUSHES_TOTAL, "Pushes by outcome", ["outcome"], outcomes)
        yield CounterMetricFamily(metrics.PULLS_TOTAL, "Pulls answered", value=totals.pulls)
        stages = stage_seconds(self._state)
        yield labelled(CounterMetricFamily, metrics.STAGE_SECONDS_TOTAL, "Seconds spent by stage", ["stage"], stages)
        figures = self._state.figures()
        yield labelled(GaugeMetricFamily, metrics.TABLE_ROWS, "Rows held, by table", ["table"], figures.rows)
        for name, text, attribute in _ADMISSION:
            counts = {table: getattr(told, attribute) for table, told in figures.admission.items()}
            yield labelled(CounterMetricFamily, name, text, ["table"], counts)
        yield GaugeMetricFamily(metrics.TABLE_BYTES, "Memory of the tables", value=figures.table_bytes)
        yield from self._missing()
        yield from self._parity()

    def _missing(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        missing = self._state.missing
        text = "Rows that are served and have yet to be rebuilt from parity"
        yield GaugeMetricFamily(metrics.PS_MISSING_ROWS, text, value=0 if missing is None else missing.count)
        text = "Missing rows that requests have waited for: degraded reads"
        yield CounterMetricFamily(metrics.PS_WANTED_ROWS_TOTAL, text, value=self._state.totals.wanted_rows)

    def _parity(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        group, totals = self._protection.group, self._protection.totals
        if group is None:
            return
        lag = "Items of deltas that a server which holds their parity has yet to acknowledge"
        yield GaugeMetricFamily(metrics.PS_PARITY_LAG_ITEMS, lag, value=group.lag_items)
        pushes = "Pushes whose deltas a server which holds their parity has yet to acknowledge: what a loss may forget"
        yield GaugeMetricFamily(metrics.PS_PARITY_LAG_PUSHES, pushes, value=group.lag_pushes)
        size = "Bytes of these deltas"
        yield GaugeMetricFamily(metrics.PS_PARITY_LAG_BYTES, size, value=group.lag_bytes)
        sent = "Items of deltas sent to the servers that hold their parity"
        yield CounterMetricFamily(metrics.PS_PARITY_DELTAS_TOTAL, sent, value=totals.items)
        yield CounterMetricFamily(metrics.PS_PARITY_SENT_BYTES_TOTAL, "Bytes of these items", value=totals.bytes)
        held = "Memory of the parity held for other servers"
        yield GaugeMetricFamily(metrics.PS_PARITY_BYTES, held, value=group.blocks.nbytes)


def stage_seconds(state: ServerState) -> dict[str, float]:
    """Returns seconds by stage.

    * `pull`, `push`, `hold`: as in `Totals`.
    * `memory`: the time in which pushes waited because the server was near its memory limit.
    """
    totals = state.totals
    return {
        "pull": totals.pull_seconds,
        "push": totals.push_seconds,
        "hold": totals.hold_seconds,
        "memory": state.core.pressure.seconds,
    }
