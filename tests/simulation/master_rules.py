"""The rules for masters: one at a time writes the state, no step goes back, and no token stands for two leases."""

from typing import TYPE_CHECKING

from tests.simulation.faults import DEGRADED, PROTECTED, REBUILD, RELOAD, RESTORED
from tests.simulation.world import SimulationError

from emberscale_api.job.roles import MemberId
from emberscale_jobmaster import ranges
from emberscale_jobmaster.losses import protected_servers
from emberscale_jobmaster.state import JobState, Stage
from emberscale_jobmaster.tasks import Task as MasterTask

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.master import Master


class MasterRules:
    """Observes the masters of a job.

    `can_lose`: whether servers can be lost now, and rebuilt.
    """

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self.can_lose = False
        self._newest_at_restore: dict[int, str] = {}
        self._granted: dict[int, tuple[MemberId, MasterTask]] = {}
        self._writer = ""

    def granted(self, member: MemberId, task: MasterTask) -> None:
        """A worker gets a lease. If two masters gave the same token, work on one task would count for the other."""
        before = self._granted.setdefault(task.token, (member, task))
        if before != (member, task):
            raise SimulationError(f"{task} is granted to {member.slot}, and the token was given before for {before}")

    def stepped(self, master: "Master", before: JobState, after: JobState) -> None:
        """A master's state has changed."""
        self._trace_step(master, before, after)
        self._reach_moments(before, after)
        self._check_recoveries(master, before, after)
        if before.restore is None and after.restore is not None:
            newest = self._cluster.model.checkpoints.newest_sound()
            self._newest_at_restore[after.routing.table.generation] = newest
        if after.routing.ready and not before.routing.ready:
            self._check_assigned(after)
        if after.stage is Stage.TRAIN and after.routing.ready:
            fresh = before.stage is not Stage.TRAIN or before.epoch != after.epoch or not before.routing.ready
            done = after.ledger.done
            if not fresh:
                done = () if done is before.ledger.done else ranges.difference(done, before.ledger.done)
            batches = {(after.epoch, number) for first, stop in done for number in range(first, stop)}
            if batches:
                self._cluster.model.ledger_counts(after.routing.table, batches)

    def _reach_moments(self, before: JobState, after: JobState) -> None:
        """Strikes with the faults that await this step."""
        reaches, move, reload = self._cluster.reaches, after.move, after.reload
        if move is not None and (before.move is None or before.move.phase is not move.phase):
            reaches(f"{REBUILD}{move.phase}" if move.lost else move.phase)
        self.can_lose = _can_lose(after)
        if self.can_lose and not _can_lose(before):
            reaches(PROTECTED)
        if after.rebuilding is not None and before.rebuilding is None:
            reaches(DEGRADED)
        if reload is not None and (before.reload is None or before.reload.phase is not reload.phase):
            reaches(f"{RELOAD}{reload.phase}")

    def _check_recoveries(self, master: "Master", before: JobState, after: JobState) -> None:
        generation = after.routing.table.generation
        if len(after.forgotten) > len(before.forgotten):
            allowed = self._cluster.spec.fault_tolerance.allowed_pls
            if after.pls > allowed and not self._cluster.scenario.parity:
                raise SimulationError(f"the portion of lost samples is {after.pls}, and {allowed} is allowed")
            if generation != before.routing.table.generation:
                raise SimulationError("a partial recovery changes the generation")
        if generation < before.routing.table.generation:
            raise SimulationError(f"{master.name} goes back to generation {generation}")
        missing_since = self._cluster.model.missing_since
        if after.recoveries > before.recoveries and before.misses_rows and self._cluster.is_calm(missing_since):
            raise SimulationError("the job rolls back while rows are rebuilt on demand, and nothing else has happened")

    def _check_assigned(self, job: JobState) -> None:
        """Checks, once all servers are assigned, that they serve the table and go back no further than they must."""
        table = job.routing.table
        for routed in table.owners:
            found = self._cluster.server_of(routed.incarnation)
            if found is None or not found.alive or found.table == table:
                continue
            # a hung master that has yet to hear of its successor cannot make any of this durable
            if found.table is None or found.table.generation <= table.generation:
                raise SimulationError(f"{found.name} serves another table than the one that is in force")
        if job.recoveries:
            self._cluster.reaches(RESTORED)
        newest = max(self._newest_at_restore.get(one, "") for one in (table.generation - 1, table.generation))
        if job.checkpoint < newest:
            raise SimulationError(f"the job goes back to checkpoint {job.checkpoint or '(none)'} instead of {newest}")

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
            raise SimulationError(f"{holder} writes the state, and {self._writer} has taken over")


def _can_lose(state: JobState) -> bool:
    """Whether servers can be lost now, and rebuilt."""
    return state.rebuilding is None and bool(protected_servers(state))
