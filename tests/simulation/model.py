"""The rules for a whole job, checked whenever something changes.

* A server applies a batch once to each unit that the batch touches, and only to units that it owns.
* A server takes its part of a checkpoint once: no two checkpoints have one number.
* Once a table is in force, every server serves it.
* Servers of one generation never own the same unit: no server applies a push to a unit that another owns by a later
  table.
* A batch that a worker counts as committed, or the ledger as done, is applied to all units that it touches, and stays
  applied until the history ends with its generation.
* A gradient is no staler than the bound allows, in batches. The worker's own pushes do not make its rounds stale.
* A worker sees each of its earlier rounds once: in the rows that it pulls, or in the changes that it adds to them.
* No push of a lease is applied on a server that knows that the lease has ended.
* A complete checkpoint holds all rows, with the same batches in each, except those that partial recoveries took from
  some rows; the checkpoint itself records these.
* A partial recovery takes only what its server had, is recorded, and stays within the target.
* A snapshot is taken in a barrier that has not lapsed.
* The job never goes back to a checkpoint older than the newest sound one.
* One master at a time writes the state, and no token stands for two leases.
* A server that is rebuilt from parity has every batch that its predecessor has acknowledged, and each of its rows has
  exactly the batches of its record. A predecessor that lives on acknowledges nothing any more.
* No row that has yet to be rebuilt is served, saved or moved. It arrives once, exactly as parity has it, unless the job
  rolls back, for which something else must happen.
* If parity may lag, the rebuilt server lacks no more acknowledged batches than the bound, those that its predecessor
  acknowledges later included. The ledger counts none of them as done, except those that the record has, which the
  master records as forgotten. A worker that counted others as committed counted too early, and they are applied again.
* In the end, each batch of each epoch is applied once to all units that it touches.

`checkpoint_rules`, `staleness_rules` and `master_rules` check what needs no history of each row; the rest is here.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tests.simulation.checkpoint_rules import CheckpointRules, batches_of, forgotten_by, recorded
from tests.simulation.faults import (
    ADOPTED,
    ARRIVED,
    FOUND,
    HALF_PUSHED,
    LAGGED,
    MISSING,
    REBUILT,
    RELOADED,
    SWITCHED,
)
from tests.simulation.master_rules import MasterRules
from tests.simulation.staleness_rules import StalenessRules
from tests.simulation.units import UNITS, Batch, Unit, batches_in, owner, touched, touching
from tests.simulation.world import SimulationError

from emberscale_api.routing import RoutingTable
from emberscale_api.wire import Header
from emberscale_jobmaster.state import JobState
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.worker.leases import ShardLease

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.parameter_server import ParameterServer
    from tests.simulation.worker import Worker


class Model:
    """Observes everything, and raises SimulationError when a rule is broken."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self.checkpoints = CheckpointRules(cluster)
        self.staleness = StalenessRules(cluster)
        self.masters = MasterRules(cluster)
        self._committed: defaultdict[tuple[int, Unit], set[Batch]] = defaultdict(set)
        self._tables: dict[tuple[int, int], RoutingTable] = {}
        self._barrier_of: dict[tuple[str, str], int] = {}
        """The barrier in which a server, by its incarnation, took its part of a checkpoint."""
        self._forgotten: defaultdict[tuple[int, Unit], set[Batch]] = defaultdict(set)
        """By generation: batches that count as applied to a unit, and that a partial recovery took from it."""
        self._acknowledged: defaultdict[tuple[str, int], set[Batch]] = defaultdict(set)
        """By a server's incarnation and the generation: the batches that it has acknowledged."""
        self._lacking: defaultdict[tuple[int, Unit], set[Batch]] = defaultdict(set)
        """By generation: acknowledged batches that a rebuilt unit lacks, and that will be applied to it again."""
        self._predecessors: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        """By a server's incarnation and the generation: the incarnations of lost servers whose rows it has got."""
        self._holder: dict[tuple[int, int], str] = {}
        """By generation and index: the incarnation of the server that adopted a table last."""
        self._agreed: dict[tuple[int, int], set[Batch]] = {}
        """By a move's number and the index of a lost server: the batches in its rows, as another server says."""
        self._awaited: defaultdict[str, dict[Unit, set[Batch]]] = defaultdict(dict)
        """By a server's incarnation: the rows that have yet to arrive, and what they will have."""
        self.missing_since = 0.0
        self._trained: set[tuple[str, int]] = set()
        """Pairs of a server's incarnation and a generation in which it has applied pushes."""

    # Parameter servers

    def adopted(self, server: "ParameterServer", table: RoutingTable, checkpoint: str) -> None:
        """A server begins to serve a table."""
        server.trace(f"adopts generation {table.generation} from {checkpoint or 'nothing'}")
        if table.servers[server.index].incarnation != server.incarnation:
            self._broken(f"{server.name} adopts a table that names {table.servers[server.index].incarnation}")
        known = self._tables.get((table.generation, table.version))
        if known is not None and known != table:
            routed = [self._cluster.server_of(other.incarnation) for other in known.owners]
            serving = [one for one in routed if one is not None and one.alive and one.core.serving]
            if any(one.table == known and (one.incarnation, table.generation) in self._trained for one in serving):
                self._broken(f"two tables of generation {table.generation}, version {table.version} are served")
            # A ledger that has lost its tail reuses numbers. What was trained under the earlier table is gone.
            for unit in UNITS:
                self._committed.pop((table.generation, unit), None)
        self._tables[table.generation, table.version] = table
        self._holder[table.generation, server.index] = server.incarnation
        self._awaited.pop(server.incarnation, None)
        manifest = self._cluster.folder.manifests().get(checkpoint)
        for unit in UNITS:
            if owner(table, unit) == server.index:
                self._forgotten[table.generation, unit] = (
                    forgotten_by(manifest, unit) if manifest is not None else set()
                )

    def reloaded(
        self, server: "ParameterServer", table: RoutingTable, settled: AppliedBatches, rows: dict[Unit, set[Batch]]
    ) -> None:
        """A server replaces a lost one, with rows from a checkpoint and the survivors' record of batches."""
        self._cluster.reaches(RELOADED)
        record = recorded(settled)
        for unit in UNITS:
            if owner(table, unit) != server.index:
                continue
            held = rows.get(unit, set())
            counted = touching(record, unit)
            if unknown := self._committed[table.generation, unit] - counted:
                self._broken(f"{server.name} replaces a lost server, and its record lacks {sorted(unknown)} for {unit}")
            if unknown := held - counted:
                self._broken(f"{server.name} loads {sorted(unknown)} of {unit}, which its record lacks")
            self._forgotten[table.generation, unit] = counted - held

    def agreed(self, server: "ParameterServer", transfer: Transfer, lost: int, batches: AppliedBatches) -> None:
        """A server says which batches the rows of a lost one have; they are sent, or follow on demand."""
        server.trace(f"has found what ps-{lost} had")
        self._agreed.setdefault((transfer.number, lost), recorded(batches))
        if transfer.on_demand:
            self._cluster.reaches(FOUND)

    def rebuilt(
        self,
        server: "ParameterServer",
        transfer: Transfer,
        before: RoutingTable,
        records: Mapping[int, AppliedBatches],
        arrived: Mapping[Unit, set[Batch]],
    ) -> None:
        """A server gets rows that others rebuild from parity; `records` are of the lost servers that had them."""
        self._cluster.reaches(REBUILT if server.index in records else ADOPTED)
        after = transfer.table
        own = {unit: owner(before, unit) for unit in UNITS if owner(after, unit) == server.index}
        rows, missing = dict(arrived), {unit for unit in own if server.misses(unit)}
        for unit in missing:
            agreed = touching(self._agreed[transfer.number, own[unit]], unit)
            rows[unit] = agreed - self._forgotten[after.generation, unit]
        expected: dict[Unit, set[Batch]] = {}
        for lost, record in records.items():
            units = [unit for unit, earlier_owner in own.items() if earlier_owner == lost]
            expected |= self._expected(server, after.generation, lost, recorded(record), units, rows)
        for unit in UNITS:
            if rows.get(unit, set()) != expected.get(unit, set()):
                wanted = sorted(expected.get(unit, set()))
                self._broken(f"{server.name} is rebuilt with {sorted(rows.get(unit, set()))} in {unit} for {wanted}")
        self._awaited[server.incarnation] = {unit: set(expected[unit]) for unit in missing}
        self.missing_since = self._cluster.world.now
        if unknown := [unit for unit in missing if not expected[unit]]:
            self._broken(f"{server.name} waits for {unknown[0]}, which was never changed")
        if missing:
            self._cluster.reaches(MISSING)

    def arrived(self, server: "ParameterServer", unit: Unit, batches: frozenset[Batch]) -> None:
        """A row arrives that a server has served without its content."""
        server.trace(f"gets {unit}")
        self._cluster.reaches(ARRIVED)
        expected = self._awaited[server.incarnation].pop(unit, None)
        if expected is None:
            self._broken(f"{server.name} gets {unit}, which it does not miss")
        elif batches != expected:
            self._broken(f"{server.name} gets {sorted(batches)} in {unit} for {sorted(expected)}")

    def _has(self, server: "ParameterServer", unit: Unit) -> set[Batch]:
        """Returns the batches in a server's row, or those that it will have."""
        awaited = self._awaited.get(server.incarnation)
        found = None if awaited is None else awaited.get(unit)
        return server.rows.get(unit, set()) if found is None else found

    def _expected(
        self,
        server: "ParameterServer",
        generation: int,
        lost: int,
        record: set[Batch],
        units: list[Unit],
        rows: Mapping[Unit, set[Batch]],
    ) -> dict[Unit, set[Batch]]:
        """Returns the batches that a server should find in the units of a lost one, and notes what they lack."""
        predecessor = self._holder.get((generation, lost), "")
        acknowledged = self._acknowledged[predecessor, generation]
        counted = {unit: touching(record, unit) for unit in units}
        new = {unit: counted[unit] - rows.get(unit, set()) - self._forgotten[generation, unit] for unit in units}
        forgotten = set[Batch]().union(*new.values())
        self._predecessors[server.incarnation, generation].add(predecessor)
        self._within_bound(server, predecessor, (acknowledged - record) | forgotten)
        if foreign := forgotten - acknowledged:
            self._broken(f"{server.name} forgets {sorted(foreign)}, which {predecessor} has not acknowledged")
        expected = {}
        for unit in units:
            earlier = self._forgotten[generation, unit] & counted[unit]
            self._forgotten[generation, unit] = gone = earlier | touching(forgotten, unit)
            expected[unit] = counted[unit] - gone
            self._lacks(generation, unit, acknowledged - record)
        return expected

    def _within_bound(self, server: "ParameterServer", before: str, lacking: set[Batch]) -> None:
        """Checks that a rebuilt server lacks no more of what its predecessor has acknowledged than parity may lag."""
        bound = self._cluster.scenario.lag
        if len(lacking) > (0 if bound is None else bound.pushes):
            self._broken(f"{server.name} replaces {before}, and lacks {sorted(lacking)}, which that one acknowledged")
        if lacking:
            self._cluster.reaches(LAGGED)

    def _lacks(self, generation: int, unit: Unit, batches: set[Batch]) -> None:
        """Notes that a unit lacks batches that were acknowledged, and that nobody may count as done."""
        lacking = touching(batches, unit)
        self._lacking[generation, unit] |= lacking
        self._committed[generation, unit] -= lacking

    def acknowledged(self, server: "ParameterServer", header: Header, units: tuple[Unit, ...]) -> None:
        """A server acknowledges a push that it has applied, now or earlier."""
        batches = set(batches_in(header))
        if self.masters.can_lose and _table_of(server).owners[0].index == server.index:
            self._cluster.reaches(f"{HALF_PUSHED}worker-{header.worker}")
        self._acknowledged[server.incarnation, header.generation] |= batches
        for other in self._later(header):
            for unit in units:
                if owner(_table_of(other), unit) != other.index:
                    continue
                lacks = touching(batches, unit) - self._has(other, unit)
                lacks -= self._forgotten[header.generation, unit]
                if lacks and self._has_rows_of(other, server, header.generation):
                    self._lacks(header.generation, unit, lacks)
                    self._within_bound(other, server.incarnation, self._lacked(other, server, header.generation))
                elif lacks:
                    self._broken(f"{server.name} answers for {lacks}, which {other.name}, who owns {unit}, lacks")

    def _has_rows_of(self, server: "ParameterServer", lost: "ParameterServer", generation: int) -> bool:
        return lost.incarnation in self._predecessors[server.incarnation, generation]

    def _lacked(self, server: "ParameterServer", lost: "ParameterServer", generation: int) -> set[Batch]:
        """Returns what a lost server has acknowledged and what some of its rows on this server lack."""
        lacked = set[Batch]()
        for unit in UNITS:
            if lost.index == owner(_table_of(lost), unit) and server.index == owner(_table_of(server), unit):
                known = self._has(server, unit) | self._forgotten[generation, unit]
                lacked |= touching(self._acknowledged[lost.incarnation, generation], unit) - known
        return lacked

    def switched(self, server: "ParameterServer", table: RoutingTable) -> None:
        """A server has adopted a later table of its generation."""
        if self._awaited.get(server.incarnation) and server.missing is None:
            self._broken(f"{server.name} switches though rows have yet to arrive")
        server.trace(f"switches to generation {table.generation}, version {table.version}")
        if server.index < len(table.servers) and table.servers[server.index].incarnation != server.incarnation:
            self._broken(f"{server.name} switches to a table that names {table.servers[server.index].incarnation}")
        if self._tables.setdefault((table.generation, table.version), table) != table:
            self._broken(f"two tables of generation {table.generation}, version {table.version} are served")
        self._holder[table.generation, server.index] = server.incarnation
        known = [other.core.known for other in self._cluster.servers()]
        if all(one == (table.generation, table.version) for one in known):
            self._cluster.reaches(SWITCHED)

    def assigned(self, server: "ParameterServer", loaded: AppliedBatches) -> None:
        """A server answers that its rows are as loaded."""
        if more := recorded(server.core.applied) - recorded(loaded):
            self._broken(f"{server.name} calls an assignment done though its rows have trained on by {sorted(more)}")

    def pulled(self, server: "ParameterServer", session: int, header: Header, units: tuple[Unit, ...]) -> None:
        """A server answers a pull."""
        self._owned(server, units)
        if any(self._has_rows_of(other, server, header.generation) for other in self._later(header)):
            return  # a replaced server may read what came before it was lost, since it can no longer answer
        rows = {unit: server.rows.get(unit, set()) | self._forgotten[header.generation, unit] for unit in units}
        for unit, known in rows.items():
            if missing := self._committed[header.generation, unit] - known:
                self._broken(f"{server.name} answers a pull of {unit} without the committed batches {sorted(missing)}")
        self.staleness.pulled(server, session, header, rows)

    def applying(self, server: "ParameterServer", session: int, header: Header, units: tuple[Unit, ...]) -> None:
        """A server is about to apply a push."""
        batch = (header.epoch, header.batch)
        server.trace(f"applies batch {batch} of worker-{header.worker} under lease {header.token}")
        self._owned(server, units)
        self._trained.add((server.incarnation, header.generation))
        if server.core.known != (header.generation, header.version):
            self._broken(f"{server.name} at {server.core.known} applies a push of {header.generation, header.version}")
        for other in self._later(header):
            if self._has_rows_of(other, server, header.generation):
                continue  # a replaced server may apply it, since it can no longer answer
            if taken := [unit for unit in units if owner(_table_of(other), unit) == other.index]:
                self._broken(f"{server.name} applies a push to {taken[0]}, which {other.name} owns since")
        batches = batches_in(header)
        for unit in units:
            if again := server.rows.get(unit, set()).intersection(batches):
                self._broken(f"{server.name} applies batches {sorted(again)} twice to {unit}")
            if table := server.table:
                self._lacking[table.generation, unit].difference_update(batches)
        if any(one not in server.core.applied for one in batches):
            self._broken(f"{server.name} applies a round {batch} that it has not recorded whole")
        if server.knows_dead(header.token):
            self._broken(f"{server.name} applies batch {batch} under lease {header.token}, which has ended")
        self.staleness.applied(server, session, header, units)

    def _later(self, header: Header) -> "list[ParameterServer]":
        """Returns the servers with a later table of the generation than a request."""
        return [
            one
            for one in self._cluster.servers()
            if one.table is not None and one.core.known[0] == header.generation and one.core.known[1] > header.version
        ]

    def snapshot_taken(self, server: "ParameterServer", held_until: float, checkpoint: str, barrier: int) -> None:
        """A server has taken a snapshot in a barrier that was last granted until `held_until`."""
        first = self._barrier_of.setdefault((server.incarnation, checkpoint), barrier)
        if first != barrier:
            self._broken(f"{server.name} takes checkpoint {checkpoint} in barriers {first} and {barrier}")
        if self._cluster.world.now >= held_until:
            self._broken(f"{server.name} takes a snapshot in a barrier that has lapsed")
        if self._awaited.get(server.incarnation):
            self._broken(f"{server.name} takes a snapshot of rows that have yet to arrive")

    def _owned(self, server: "ParameterServer", units: tuple[Unit, ...]) -> None:
        table = server.table
        if table is None or any(owner(table, unit) != server.index for unit in units):
            self._broken(f"{server.name} serves units that it does not own")
        if missing := [unit for unit in units if unit in self._awaited.get(server.incarnation, ())]:
            self._broken(f"{server.name} serves {missing[0]}, which has yet to arrive")

    # Workers

    def committed(self, worker: "Worker", batch: Batch, table: RoutingTable) -> None:
        """A worker counts a batch as committed."""
        worker.trace(f"commits batch {batch}")
        self._on_servers(table, {batch}, f"{worker.name} committed", self._lacking)
        for unit in touched(batch):
            if batch not in self._lacking[table.generation, unit]:
                self._committed[table.generation, unit].add(batch)

    def evaluated(self, worker: "Worker", lease: ShardLease) -> None:
        """A worker has evaluated a shard."""
        worker.trace(f"evaluated [{lease.start}, {lease.stop}) of epoch {lease.epoch}")

    # The end

    def ended(self, job: JobState) -> None:
        """The job is Complete."""
        scenario = self._cluster.scenario
        everything = {(epoch, number) for epoch in range(scenario.epochs) for number in range(scenario.batches)}
        manifests = self._cluster.folder.manifests()
        if not manifests:
            self._broken("the job is Complete without a checkpoint")
        final = manifests[max(manifests)]
        if batches_of(final.applied) != everything:
            self._broken(f"the last checkpoint lacks {sorted(everything - batches_of(final.applied))}")
        self.checkpoints.check(final)
        evaluated = [(result.epoch, result.samples) for result in job.evaluations]
        wanted = [(epoch, scenario.evaluation_batches) for epoch in range(1, scenario.epochs + 1)]
        if scenario.evaluation_batches and evaluated != wanted:
            self._broken(f"evaluated {evaluated} instead of {wanted}")
        if job.own_errors:
            self._broken(f"{job.own_errors} exits count as the job's own errors")

    def ledger_counts(self, table: RoutingTable, batches: set[Batch]) -> None:
        """The ledger counts batches as done."""
        self._on_servers(table, batches, "the ledger counts as done", self._lacking)

    def _on_servers(
        self, table: RoutingTable, batches: set[Batch], who: str, lacking: Mapping[tuple[int, Unit], set[Batch]]
    ) -> None:
        """Checks that batches are in all rows that they touch, except those `lacking` under a later table."""
        for found in self._cluster.servers():
            if found.table is None or not found.core.serving or found.core.known[0] != table.generation:
                continue  # its rows are gone with their history
            for batch in batches:
                for unit in touched(batch):
                    if batch in self._forgotten[table.generation, unit]:
                        continue
                    if found.table.version < table.version and owner(table, unit) != found.index:
                        continue  # others own its rows since, and it has yet to hear so
                    if found.table.version > table.version and batch in lacking.get((table.generation, unit), ()):
                        continue
                    if owner(found.table, unit) == found.index and batch not in self._has(found, unit):
                        self._broken(f"{who} batch {batch}, which {found.name} has not applied to {unit}")

    def _broken(self, what: str) -> None:
        raise SimulationError(what)


def _table_of(server: "ParameterServer") -> RoutingTable:
    assert server.table is not None
    return server.table
