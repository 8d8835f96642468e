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
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tests.simulation.faults import (
    ADOPTED,
    ARRIVED,
    DEGRADED,
    FOUND,
    HALF_PUSHED,
    LAGGED,
    MISSING,
    PROTECTED,
    REBUILD,
    REBUILT,
    RELOAD,
    RELOADED,
    RESTORED,
    SAVED,
    SWITCHED,
)
from tests.simulation.folder import Manifest
from tests.simulation.units import UNITS, Batch, Unit, batches_in, owner, touched, touching
from tests.simulation.world import SimulationError

from buckets import bucket_of
from emberscale_api.job.roles import MemberId
from emberscale_api.routing import RoutingTable
from emberscale_api.wire import Header
from emberscale_jobmaster import ranges
from emberscale_jobmaster.losses import protected_servers
from emberscale_jobmaster.ranges import Applied
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.tasks import Task as MasterTask
from emberscale_trainer.partition import AppliedBatches
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.worker.leases import ShardLease

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.master import Master
    from tests.simulation.parameter_server import ParameterServer
    from tests.simulation.worker import Worker


class Model:
    """Observes everything, and raises SimulationError when a rule is broken."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._committed: defaultdict[tuple[int, Unit], set[Batch]] = defaultdict(set)
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
        self._tables: dict[tuple[int, int], RoutingTable] = {}
        self._newest_at_restore: dict[int, str] = {}
        self._granted: dict[int, tuple[MemberId, MasterTask]] = {}
        self._writer = ""
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
        self._missing_since = 0.0
        self._can_lose = False
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
        self._missing_since = self._cluster.world.now
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
        if self._can_lose and _table_of(server).owners[0].index == server.index:
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
        for unit in units:
            known = server.rows.get(unit, set()) | self._forgotten[header.generation, unit]
            if missing := self._committed[header.generation, unit] - known:
                self._broken(f"{server.name} answers a pull of {unit} without the committed batches {sorted(missing)}")
        if not header.is_read_only:
            batch = (header.epoch, header.batch)
            self._seen[server.name, session, batch] = self._others(server, session, header)
            if header.is_round:
                for unit in units:
                    known = server.rows.get(unit, set()) | self._forgotten[header.generation, unit]
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
                    self._broken(f"{worker.name} begins {batches[0]} with its own batch {earlier} {times} in {unit}")
        trained.update(batches)

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
        if header.is_round:
            for unit in units:
                self._pushed[session, unit].update(touching(batches, unit))
        if any(one not in server.core.applied for one in batches):
            self._broken(f"{server.name} applies a round {batch} that it has not recorded whole")
        if server.knows_dead(header.token):
            self._broken(f"{server.name} applies batch {batch} under lease {header.token}, which has ended")
        if self._is_forgotten(server, session, header):
            return  # a push that was under way when its worker left counts against nobody's bound
        key = (server.name, header.generation)
        seen = self._seen.pop((server.name, session, batch), None)
        bound = self._cluster.spec.training.max_staleness
        since = self._others(server, session, header)
        if seen is not None and since - seen > bound:
            self._broken(
                f"{server.name} applies batch {batch} of worker-{header.worker} {since - seen} batches "
                f"after its pull; the bound is {bound}"
            )
        self._applied[key] += header.batches
        self._own[*key, session] += header.batches

    def _later(self, header: Header) -> "list[ParameterServer]":
        """Returns the servers with a later table of the generation than a request."""
        return [
            one
            for one in self._cluster.servers()
            if one.table is not None and one.core.known[0] == header.generation and one.core.known[1] > header.version
        ]

    def _is_forgotten(self, server: "ParameterServer", session: int, header: Header) -> bool:
        """Whether the first server, which keeps the bound, knows that this pull's worker or lease has ended."""
        keeper = self._cluster.server_of(server.table.owners[0].incarnation) if server.table is not None else None
        return keeper is None or session in keeper.ended_sessions or keeper.knows_dead(header.token)

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

    def granted(self, member: MemberId, task: MasterTask) -> None:
        """A worker gets a lease. If two masters gave the same token, work on one task would count for the other."""
        before = self._granted.setdefault(task.token, (member, task))
        if before != (member, task):
            self._broken(f"{task} is granted to {member.slot}, and the token was given before for {before}")

    def evaluated(self, worker: "Worker", lease: ShardLease) -> None:
        """A worker has evaluated a shard."""
        worker.trace(f"evaluated [{lease.start}, {lease.stop}) of epoch {lease.epoch}")

    # The master

    def stepped(self, master: "Master", before: JobState, after: JobState) -> None:
        """A master's state has changed."""
        self._trace_step(master, before, after)
        if after.move is not None and (before.move is None or before.move.phase is not after.move.phase):
            self._cluster.reaches(after.move.phase if not after.move.lost else f"{REBUILD}{after.move.phase}")
        self._can_lose = _can_lose(after)
        if self._can_lose and not _can_lose(before):
            self._cluster.reaches(PROTECTED)
        if after.rebuilding is not None and before.rebuilding is None:
            self._cluster.reaches(DEGRADED)
        if after.reload is not None and (before.reload is None or before.reload.phase is not after.reload.phase):
            self._cluster.reaches(f"{RELOAD}{after.reload.phase}")
        if len(after.forgotten) > len(before.forgotten):
            allowed = self._cluster.spec.fault_tolerance.allowed_pls
            if after.pls > allowed and not self._cluster.scenario.parity:
                self._broken(f"the portion of lost samples is {after.pls}, and {allowed} is allowed")
            if after.routing.table.generation != before.routing.table.generation:
                self._broken("a partial recovery changes the generation")
        if after.routing.table.generation < before.routing.table.generation:
            self._broken(f"{master.name} goes back to generation {after.routing.table.generation}")
        if after.recoveries > before.recoveries and before.misses_rows and self._cluster.is_calm(self._missing_since):
            self._broken("the job rolls back while rows are rebuilt on demand, and nothing else has happened")
        if before.restore is None and after.restore is not None:
            self._newest_at_restore[after.routing.table.generation] = self.newest_sound()
        if after.routing.ready and not before.routing.ready:
            newest = self._newest_at_restore.get(after.routing.table.generation - 1, "")
            newest = max(newest, self._newest_at_restore.get(after.routing.table.generation, ""))
            for routed in after.routing.table.owners:
                found = self._cluster.server_of(routed.incarnation)
                if found is None or not found.alive or found.table == after.routing.table:
                    continue
                # a hung master that has yet to hear of its successor cannot make any of this durable
                if found.table is None or found.table.generation <= after.routing.table.generation:
                    self._broken(f"{found.name} serves another table than the one that is in force")
            if after.recoveries:
                self._cluster.reaches(RESTORED)
            if after.checkpoint < newest:
                self._broken(f"the job goes back to checkpoint {after.checkpoint or '(none)'} instead of {newest}")
        if after.stage is Stage.TRAIN and after.routing.ready:
            fresh = before.stage is not Stage.TRAIN or before.epoch != after.epoch or not before.routing.ready
            done = after.ledger.done
            if not fresh:
                done = () if done is before.ledger.done else ranges.difference(done, before.ledger.done)
            batches = {(after.epoch, number) for first, stop in done for number in range(first, stop)}
            if batches:
                self._on_servers(after.routing.table, batches, "the ledger counts as done", self._lacking)

    def _trace_step(self, master: "Master", before: JobState, after: JobState) -> None:
        if not self._cluster.world.traced:
            return
        if before.stage is not after.stage or before.epoch != after.epoch:
            master.trace(f"stage {after.stage}, epoch {after.epoch}")
        if before.routing is not after.routing:
            table = after.routing.table
            names = [server.incarnation for server in table.servers]
            master.trace(
                f"generation {table.generation} of {names} is {'ready' if after.routing.ready else 'not ready'}"
            )
        phases = {
            operation.id: (type(operation).__name__, getattr(operation, "phase", "")) for operation in before.operations
        }
        for operation in after.operations:
            now = (type(operation).__name__, getattr(operation, "phase", ""))
            if phases.pop(operation.id, None) != now:
                master.trace(f"operation {operation.id} {now[0]} {now[1]}")
        for number, phase in phases.items():
            master.trace(f"operation {number} {phase[0]} is over")
        for kind, trouble in after.troubles.items():
            if before.troubles.get(kind) != trouble:
                master.trace(f"trouble {kind}: {trouble.message}")

    def opened(self, holder: str) -> None:
        """A master has taken over."""
        self._writer = holder

    def store_lost(self) -> None:
        """Redis has lost data: any master may write."""
        self._writer = ""

    def wrote(self, holder: str) -> None:
        """A master has written the state."""
        if self._writer not in ("", holder):
            self._broken(f"{holder} writes the state, and {self._writer} has taken over")

    # Checkpoints

    def completed(self, manifest: Manifest) -> None:
        """A checkpoint is complete."""
        self._cluster.world.trace("storage", f"checkpoint {manifest.checkpoint} is complete")
        self._cluster.reaches(SAVED)
        self._consistent(manifest)

    def _consistent(self, manifest: Manifest) -> None:
        batches = batches_of(manifest.applied)
        all_expected = {unit: touching(batches, unit) - forgotten_by(manifest, unit) for unit in UNITS}
        holders: dict[Unit, str] = {}
        whole = True
        for path in manifest.files:
            stored = self._cluster.storage.files.get(path)
            if stored is None or stored.torn:
                whole = False
                continue  # loading it will reveal this
            if recorded(stored.content.applied) != batches:
                self._broken(f"{path} and the manifest differ in what is applied")
            for unit, rows in stored.content.rows.items():
                if unit in holders:
                    self._broken(f"{path} and {holders[unit]} both hold {unit}")
                holders[unit] = path
                expected = all_expected[unit]
                if rows != expected:
                    self._broken(f"{path} says that it holds {sorted(expected)}, and {unit} holds {sorted(rows)}")
        changed = {unit for unit, expected in all_expected.items() if expected}
        if whole and (missing := changed - holders.keys()):
            self._broken(f"checkpoint {manifest.checkpoint} lacks {sorted(missing)}")

    def newest_sound(self) -> str:
        files = self._cluster.storage.files
        sound = [
            checkpoint
            for checkpoint, manifest in self._cluster.folder.manifests().items()
            if all(path in files and not files[path].torn for path in manifest.files)
        ]
        return max(sound, default="")

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
        self._consistent(final)
        evaluated = [(result.epoch, result.samples) for result in job.evaluations]
        wanted = [(epoch, scenario.evaluation_batches) for epoch in range(1, scenario.epochs + 1)]
        if scenario.evaluation_batches and evaluated != wanted:
            self._broken(f"evaluated {evaluated} instead of {wanted}")
        if job.own_errors:
            self._broken(f"{job.own_errors} exits count as the job's own errors")

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


def _can_lose(state: JobState) -> bool:
    """Whether servers can be lost now, and rebuilt."""
    return state.rebuilding is None and bool(protected_servers(state))


def _table_of(server: "ParameterServer") -> RoutingTable:
    assert server.table is not None
    return server.table


def forgotten_by(manifest: Manifest, unit: Unit) -> set[Batch]:
    """Returns the batches that a checkpoint counts but records as forgotten on a unit."""
    kind, number = unit
    place = bucket_of(number) if kind == "key" else number
    batches: set[Batch] = set()
    for share in manifest.effect.image.forgotten:
        spans = share.buckets if kind == "key" else share.pieces
        if any(first <= place < stop for first, stop in spans):
            batches |= batches_of({part.epoch: part.ranges for part in share.epochs})
    return touching(batches, unit)


def batches_of(applied: Applied) -> set[Batch]:
    """Returns the batches in ranges by epoch."""
    return {
        (epoch, number) for epoch, spans in applied.items() for first, stop in spans for number in range(first, stop)
    }


def recorded(applied: AppliedBatches) -> set[Batch]:
    """Returns the batches in a server's record."""
    return {
        (epoch, number)
        for epoch in applied.epochs()
        for first, stop in applied.ranges(epoch)
        for number in range(first, stop)
    }
