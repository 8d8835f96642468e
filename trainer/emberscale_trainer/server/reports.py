"""The reports of a parameter server: its work and its rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.job.running import AdmissionCounts


@dataclass(slots=True)
class Totals:
    """A server's totals since it started.

    * `wanted_rows`: rows that had yet to be rebuilt when requests came for them.
    * `pull_seconds`, `push_seconds`: gathering and stepping rows under the lock, so that they never add up to more than
      the time.
    * `hold_seconds`: waiting for a barrier, the staleness bound, a switch, missing rows or memory, summed over the
      requests that waited.
    """

    pulls: int = 0
    pushes: int = 0
    repeated: int = 0
    pull_seconds: float = 0.0
    push_seconds: float = 0.0
    hold_seconds: float = 0.0
    wanted_rows: int = 0


@dataclass(frozen=True)
class Figures:
    """The rows of each embedding table that the server owns, and the bytes of all tables.

    * `admission`: the counts of keys and rows since the process started, including rows that a roll-back has dropped;
      by table, only for tables with admission or eviction.
    """

    rows: dict[str, int]
    table_bytes: int
    admission: Mapping[str, AdmissionCounts] = field(default_factory=dict)


@dataclass(slots=True)
class ParityTotals:
    """The items, and their bytes, that a server has sent for parity since it started, under all routing tables."""

    items: int = 0
    bytes: int = 0
