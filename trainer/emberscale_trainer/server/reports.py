"""The reports of a parameter server: what it has done, and what it holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.job.running import AdmissionCounts


@dataclass(slots=True)
class Totals:
    """A server's totals since it started.

    `pull_seconds` and `push_seconds` are spent under the lock; `hold_seconds` waiting for a barrier, the staleness
    bound or a switch, summed over the requests that waited.
    """

    pulls: int = 0
    pushes: int = 0
    repeated: int = 0
    pull_seconds: float = 0.0
    push_seconds: float = 0.0
    hold_seconds: float = 0.0


@dataclass(frozen=True)
class Figures:
    """Rows of each embedding table, and the bytes that all tables take.

    * `admission`: what became of keys and rows since the process started, also of rows that a roll-back has dropped, by
      the table; only of tables with admission or eviction.
    """

    rows: dict[str, int]
    table_bytes: int
    admission: Mapping[str, AdmissionCounts] = field(default_factory=dict)


@dataclass(slots=True)
class ParityTotals:
    """What a server has sent for parity since it started, under all routing tables: items, and their bytes."""

    items: int = 0
    bytes: int = 0
