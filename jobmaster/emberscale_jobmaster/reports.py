"""What members report with their heartbeats: their resources, and their work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.job.running import AdmissionCounts, Traffic
from emberscale_api.routing import ParityTrouble


@dataclass(frozen=True)
class Vitals:
    """Resources of a process, as it reports them."""

    memory_bytes: int = 0
    peak_memory_bytes: int = 0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class WorkReport:
    """A worker's work since its previous report; the histograms are of predictions, by label.

    `stage_seconds` and `traffic` are since the worker started, so that a new master learns of them.
    """

    samples: int
    loss_sum: float
    positives: Sequence[int]
    negatives: Sequence[int]
    stage_seconds: Mapping[str, float]
    truncated_records: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    rounds: RoundsDecision | None = None
    """Whether it trains rounds now, and why; None where the manifest disables them."""


@dataclass(frozen=True)
class ServerReport:
    """A parameter server's rows, and its work since it started."""

    rows: Mapping[str, int]
    table_bytes: int
    applied_batches: int
    repeated_batches: int
    stage_seconds: Mapping[str, float]
    admission: Mapping[str, AdmissionCounts] = field(default_factory=dict)
    """By table with admission or eviction, since the tables were created; a roll-back recreates them."""
    delays_for_memory: bool = False
    """Whether pushes wait because the server is near its memory limit."""
    protected_version: int = 0
    """The version of the routing table under which others hold parity of all its rows; 0: none."""
    parity_trouble: ParityTrouble | None = None
    missing_rows: int = 0
    """Rows that it serves and that have yet to arrive: they are rebuilt from parity."""
