"""The reports of a parameter server: what it has done, what it holds, and its rows as of a barrier."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.job.running import AdmissionCounts
from emberscale_trainer.partition import Ownership
from emberscale_trainer.server.barrier import Outcome
from emberscale_trainer.table import Snapshot, TableStore


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

    * `admission`: what became of keys and rows, by the table; only of tables with admission or eviction.
    """

    rows: dict[str, int]
    table_bytes: int
    admission: Mapping[str, AdmissionCounts] = field(default_factory=dict)


@dataclass(slots=True)
class ParityTotals:
    """What a server has sent for parity since it started, under all routing tables: items, and their bytes."""

    items: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class ParityFigures:
    """A server's part in the parity of its job.

    * `lag_items`: items that the holder furthest behind has yet to acknowledge.
    * `sent_items`, `sent_bytes`: as in `ParityTotals`.
    * `held_bytes`: memory of the parity that is held here for others.
    """

    lag_items: int
    sent_items: int
    sent_bytes: int
    held_bytes: int


@dataclass(frozen=True, eq=False)
class Taken:
    """The rows as of a barrier that ended with a snapshot.

    * `owned`: what the server owned. The tables may hold more.
    """

    outcome: Outcome
    snapshot: Snapshot
    tables: TableStore
    owned: Ownership
