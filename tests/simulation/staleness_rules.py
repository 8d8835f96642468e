"""The rules for what workers train on: no gradient is staler than allowed, and each earlier round is seen once."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tests.simulation.units import Batch, Unit, batches_in, touched, touching
from tests.simulation.world import SimulationError

from emberscale_api.wire import Header

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.parameter_server import ParameterServer
    from tests.simulation.worker import Worker


class StalenessRules:
    """Observes the pulls, pushes and rounds of all sessions."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._seen: dict[tuple[str, int, Batch], int] = {}
        self._applied: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._own: defaultdict[tuple[str, int, int], int] = defaultdict(int)
        """By server, generation and session: the batches of `_applied` that the session pushed itself."""
        self._rounds: defaultdict[int, Counter[Batch]] = defaultdict(Counter)
        """By session: how often it has begun to train each batch in a round."""
        self._pulled: defaultdict[tuple[int, Batch], dict[Unit, tuple[frozenset[Batch], frozenset[Batch]]]]
        self._pulled = defaultdict(dict)
        """By session and first batch of a round: the batches in the pulled rows, and the session's own among them."""
        self._pushed: defaultdict[tuple[int, Unit], set[Batch]] = defaultdict(set)
        """By session: the batches that it has pushed, without those of earlier processes."""

    def pulled(self, server: "ParameterServer", session: int, header: Header, rows: Mapping[Unit, set[Batch]]) -> None:
        """A server answers a pull with rows that have, or count as having, these batches."""
        if not header.is_read_only:
            batch = (header.epoch, header.batch)
            self._seen[server.name, session, batch] = self._others(server, session, header)
            if header.is_round:
                for unit, known in rows.items():
                    self._pulled[session, batch][unit] = (
                        frozenset(known),
                        frozenset(known & self._pushed[session, unit]),
                    )

    def _others(self, server: "ParameterServer", session: int, header: Header) -> int:
        """Returns the number of batches on a server that make a pull stale."""
        count = self._applied[server.name, header.generation]
        return count - self._own[server.name, header.generation, session] if header.is_round else count

    def begins_round(
        self, worker: "Worker", session: int, batches: tuple[Batch, ...], added: tuple[Batch, ...]
    ) -> None:
        """A worker begins to train a round, after adding the changes of the `added` batches to the pulled rows.

        A batch that it trains again, since its lease lapsed after the push, is in both the rows and the changes.
        """
        trained = self._rounds[session]
        for unit, (seen, own) in self._pulled.pop((session, batches[0])).items():
            for earlier, times_trained in trained.items():
                if unit in touched(earlier) and (
                    earlier in own and times_trained == 1 if earlier in added else earlier not in seen
                ):
                    times = "twice" if earlier in added else "never"
                    raise SimulationError(
                        f"{worker.name} begins {batches[0]} with its own batch {earlier} {times} in {unit}"
                    )
        trained.update(batches)

    def applied(self, server: "ParameterServer", session: int, header: Header, units: tuple[Unit, ...]) -> None:
        """A server applies a push."""
        batch, batches = (header.epoch, header.batch), batches_in(header)
        if header.is_round:
            for unit in units:
                self._pushed[session, unit].update(touching(batches, unit))
        if self._is_forgotten(server, session, header):
            return  # a push that was under way when its worker left counts against nobody's bound
        key = (server.name, header.generation)
        seen = self._seen.pop((server.name, session, batch), None)
        bound = self._cluster.spec.training.max_staleness
        since = self._others(server, session, header)
        if seen is not None and since - seen > bound:
            raise SimulationError(
                f"{server.name} applies batch {batch} of worker-{header.worker} {since - seen} batches "
                f"after its pull; the bound is {bound}"
            )
        self._applied[key] += header.batches
        self._own[*key, session] += header.batches

    def _is_forgotten(self, server: "ParameterServer", session: int, header: Header) -> bool:
        """Whether the first server, which keeps the bound, knows that this pull's worker or lease has ended."""
        keeper = self._cluster.server_of(server.table.owners[0].incarnation) if server.table is not None else None
        return keeper is None or session in keeper.ended_sessions or keeper.knows_dead(header.token)
