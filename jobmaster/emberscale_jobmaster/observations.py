"""The master's recent observations: last calls of members, speeds, memory, progressive metrics.

None of it is durable. A new master starts without observations, and every deadline starts again.

There are three clocks, all in seconds. Figures for people use `now`, which the caller supplies. `watched` measures
silence; it stands still while the master itself is paused and can hear no one. `free` measures progress; it also stands
still while training cannot move: in a barrier, and until the servers are assigned.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

from emberscale_api.frozen import replace
from emberscale_api.job.roles import MemberId, Role, slot_name
from emberscale_api.job.rounds import RoundsDecision
from emberscale_api.job.running import AdmissionCounts, Traffic, total_admission
from emberscale_api.routing import ParityTrouble, PsAddress
from emberscale_jobmaster.ledger import Ledger
from emberscale_jobmaster.membership import Membership
from emberscale_jobmaster.reports import ServerReport, Vitals, WorkReport
from emberscale_jobmaster.slowness import Pace, Slowness, factors, judged
from emberscale_jobmaster.statistics import ProgressiveWindow, RateMeter

LONGEST_GAP_SECONDS = 2.0
"""The most that one step adds to the clocks. The master steps more often, so a longer gap is its own pause."""
STUCK_SECONDS = 60.0
"""The shortest time without progress after which a worker's leases are stuck."""
SILENT_STUCK_SECONDS = 600.0
"""The same in evaluation, where workers report no progress before a lease is done."""
STUCK_GAPS = 5.0
"""The same as a multiple of the median worker's gap between two moves of its leases."""
FIRST_BATCH_SECONDS = 180.0
"""The same before an incarnation's first move, as it first builds its model and compiles its kernels. The second, third
incarnation of a slot gets two, three times as long, so that one succeeds even if the first batch takes that long."""

OWN_WORK = ("read", "plan", "compute")
"""The stages of a worker without waits for others."""
SERVICE = ("pull", "push")
"""The stages of a server without waits for others."""


@dataclass(frozen=True)
class Sighting:
    """The latest report from the holder of a slot, and the slot's totals.

    * `spoke_at`, `beat_at`: when it last called, and when its last heartbeat came; on the clock `watched`.
    * `moved_at`: when its leases last moved, or it had none; on the clock `free`.
    * `gap`: the longest recent time between two moves, in seconds; None before the first move.
    * `troubled`: the routing table under which a parameter server's rows are not protected, and since when it says so;
      on the clock `watched`.
    """

    incarnation: str
    spoke_at: float
    moved_at: float
    gap: float | None = None
    beat_at: float | None = None
    sequence: int = 0
    vitals: Vitals = field(default_factory=Vitals)
    meter: RateMeter = field(default_factory=RateMeter)
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    stage_seconds_before: Mapping[str, float] = field(default_factory=dict)
    """The work of earlier incarnations of a worker."""
    traffic: Traffic = field(default_factory=Traffic)
    traffic_before: Traffic = field(default_factory=Traffic)
    rounds: RoundsDecision | None = None
    server: ServerReport | None = None
    troubled: tuple[int, float] | None = None
    repeated_before: int = 0
    """Repeated batches that earlier incarnations counted."""
    admission_before: Mapping[str, AdmissionCounts] = field(default_factory=dict)
    """What earlier incarnations counted."""
    trained: int = 0
    """All samples that a worker has reported, up to `trained_at`."""
    trained_at: float | None = None
    pace: Pace = field(default_factory=Pace)
    """A worker's own seconds per sample, without waits; a server's seconds per batch under its lock."""
    leases: int = 0
    leased_batches: int = 0
    """All batches that were leased to a worker."""

    def admission(self) -> Mapping[str, AdmissionCounts]:
        """Returns the counts of all incarnations of a parameter server."""
        served = {} if self.server is None else self.server.admission
        return total_admission(self.admission_before, served)


@dataclass(frozen=True)
class Rest:
    """A worker that delays the others gets no lease before `until`, and then one on trial.

    * `pause`: the length of the current rest, in seconds.
    * `replaced_at`: when the worker was replaced for being slow; None: never.
    """

    until: float = 0.0
    pause: float = 0.0
    replaced_at: float | None = None


@dataclass(frozen=True)
class Relief:
    """The changes to the share of a parameter server of this incarnation.

    * `since`: when it became slow. `changed_at`: when its share changed, or another move ended.
    * `pause`: how long it keeps a share before it gets a larger one on trial.
    * `factor`: how many times slower than its peers it was with an equal share.
    """

    incarnation: str
    since: float
    changed_at: float
    pause: float
    factor: float


@dataclass(frozen=True)
class Observations:
    """Immutable. The clocks are described at the top of this module."""

    watched: float = 0.0
    free: float = 0.0
    sightings: Mapping[str, Sighting] = field(default_factory=dict)
    leases: Mapping[int, float] = field(default_factory=dict)
    """When each live lease was last mentioned by its holder, or granted; on the clock `watched`."""
    positions: Mapping[int, int] = field(default_factory=dict)
    """The progress that the holder of each live lease reports."""
    lapses: int = 0
    """Leases that their holder stopped mentioning."""
    meter: RateMeter = field(default_factory=RateMeter)
    window: ProgressiveWindow = field(default_factory=ProgressiveWindow)
    slow: Mapping[str, Slowness] = field(default_factory=dict)
    """Slots of members that may be slower than their peers."""
    rests: Mapping[str, Rest] = field(default_factory=dict)
    """Slots of workers that delay the others."""
    reliefs: Mapping[str, Relief] = field(default_factory=dict)
    unheard: frozenset[str] = frozenset()
    """Slots of parameter servers that have yet to speak to this master."""

    def counted(self, elapsed: float, can_move: bool) -> "Observations":
        """Advances the clocks by `elapsed` seconds; `can_move` says whether training could progress meanwhile."""
        seconds = min(max(0.0, elapsed), LONGEST_GAP_SECONDS)
        return replace(self, watched=self.watched + seconds, free=self.free + (seconds if can_move else 0.0))

    def heard(self, member: MemberId) -> "Observations":
        """Notes that a member spoke."""
        known = self.sightings.get(member.slot)
        if known is None:
            sighting = Sighting(member.incarnation, self.watched, self.free)
        elif known.incarnation == member.incarnation:
            sighting = replace(known, spoke_at=self.watched)
        else:
            repeated = known.repeated_before + (known.server.repeated_batches if known.server else 0)
            sighting = Sighting(
                member.incarnation,
                self.watched,
                self.free,
                vitals=Vitals(peak_memory_bytes=known.vitals.peak_memory_bytes),
                stage_seconds=known.stage_seconds,
                stage_seconds_before=known.stage_seconds,
                traffic=known.traffic,
                traffic_before=known.traffic,
                repeated_before=repeated,
                admission_before=known.admission(),
                trained=known.trained,
                leases=known.leases,
                leased_batches=known.leased_batches,
            )
        heard = replace(self, unheard=self.unheard - {member.slot}) if member.slot in self.unheard else self
        return heard._with(member, sighting)

    def beat(self, member: MemberId, vitals: Vitals, leases: Mapping[int, int]) -> "Observations":
        """Takes a heartbeat: the member's resources, and the position of each lease that it holds.

        The peak of memory is of all incarnations.
        """
        known = self.sightings[member.slot]
        peak = max(known.vitals.peak_memory_bytes, vitals.peak_memory_bytes)
        if any(position > self.positions.get(token, position) for token, position in leases.items()):
            known = self._moved(known)
        if peak > vitals.peak_memory_bytes:
            vitals = replace(vitals, peak_memory_bytes=peak)
        beat = replace(known, beat_at=self.watched, vitals=vitals)
        return replace(
            self,
            sightings={**self.sightings, member.slot: beat},
            leases={**self.leases, **dict.fromkeys(leases, self.watched)},
            positions={**self.positions, **leases},
        )

    def finished(self, member: MemberId) -> "Observations":
        """Notes that a member has finished a task."""
        known = self.sightings[member.slot]
        return self._with(member, self._moved(known))

    def is_news(self, member: MemberId, sequence: int) -> bool:
        """Whether a worker's report of this number was not heard before."""
        return sequence > self.sightings[member.slot].sequence

    def granted(self, member: MemberId, batches: int) -> "Observations":
        """Notes that a worker got a lease of this number of batches."""
        known = self.sightings[member.slot]
        return self._with(
            member, replace(known, leases=known.leases + 1, leased_batches=known.leased_batches + batches)
        )

    def worked(
        self, member: MemberId, sequence: int, report: WorkReport, now: float, training: bool = True
    ) -> "Observations":
        """Takes a worker's report of its work; a repeated report counts once.

        Measures the worker's pace while the job is `training`.
        """
        if not self.is_news(member, sequence):
            return self
        known = self.sightings[member.slot]
        before = known.stage_seconds_before
        stages = {
            stage: before.get(stage, 0.0) + report.stage_seconds.get(stage, 0.0)
            for stage in before.keys() | report.stage_seconds.keys()
        }
        told = replace(
            known,
            sequence=sequence,
            stage_seconds=stages,
            traffic=known.traffic_before.plus(report.traffic),
            rounds=report.rounds,
            meter=known.meter.add(report.samples, now),
            trained=known.trained + report.samples,
            trained_at=now,
        )
        if training and known.sequence:
            spent = sum(stages.get(stage, 0.0) - known.stage_seconds.get(stage, 0.0) for stage in OWN_WORK)
            told = replace(told, pace=known.pace.add(max(0.0, spent), report.samples, now))
        seen = self._with(member, told)
        if not report.samples:
            return seen
        return replace(
            seen,
            meter=self.meter.add(report.samples, now),
            window=self.window.add(report.samples, report.loss_sum, report.positives, report.negatives, now),
        )

    def served(
        self, member: MemberId, report: ServerReport, now: float = 0.0, training: bool = False
    ) -> "Observations":
        """Takes a parameter server's report of its rows. Measures its pace while the job is `training`."""
        known = self.sightings[member.slot]
        told = replace(known, server=report, stage_seconds=report.stage_seconds)
        before = known.server
        if training and before is not None and report.applied_batches >= before.applied_batches:
            old, new = before.stage_seconds, report.stage_seconds
            spent = sum(new.get(stage, 0.0) - old.get(stage, 0.0) for stage in SERVICE)
            applied = report.applied_batches - before.applied_batches
            told = replace(told, pace=known.pace.add(max(0.0, spent), applied, now))
        return self._with(member, told)

    def troubled(self, member: MemberId, trouble: ParityTrouble | None) -> "Observations":
        """Takes a parameter server's report of what keeps its rows from being protected; None: nothing does."""
        known = self.sightings[member.slot]
        since = None if trouble is None else (trouble.version, self.watched)
        if since is not None and known.troubled is not None and known.troubled[0] == since[0]:
            since = known.troubled
        return self._with(member, replace(known, troubled=since))

    def troubled_seconds(self, member: MemberId) -> float:
        """Returns for how long a parameter server has reported such trouble."""
        since = self.sightings[member.slot].troubled
        return 0.0 if since is None else self.watched - since[1]

    def slower(self, members: Membership) -> dict[str, float]:
        """Returns each live member's time for the same work, relative to the median of its peers, by slot."""
        found: dict[str, float] = {}
        for role in (Role.PS, Role.WORKER):
            paces = {
                name: sighting.pace.seconds
                for name, member in members.live(role).items()
                if (sighting := self.sightings.get(name)) is not None and sighting.incarnation == member.incarnation
            }
            found |= factors(paces)
        return found

    def compared(self, members: Membership, now: float) -> "Observations":
        """Updates which members are slower than their peers."""
        slow = judged(self.slow, self.slower(members), now)
        return self if slow == self.slow else replace(self, slow=slow)

    def slowness(self, slot: str) -> Slowness | None:
        """Returns how slow a member is; None unless that lasts."""
        found = self.slow.get(slot)
        return found if found is not None and found.lasting else None

    def rolled_back(self) -> "Observations":
        """Resets the progressive figures, because the training that they measured is undone."""
        return replace(self, meter=RateMeter(), window=ProgressiveWindow())

    def speed(self, slot: str) -> float | None:
        """Returns the samples per second of a worker's own work; None while unknown."""
        sighting = self.sightings.get(slot)
        pace = sighting.pace.seconds if sighting is not None else None
        return 1 / pace if pace else None

    def silent(self, members: Membership, timeout: float) -> list[MemberId]:
        """Returns the live members that have not spoken for `timeout` seconds."""
        return [
            member
            for name, member in members.live().items()
            if name in self.sightings and self.watched - self.sightings[name].spoke_at > timeout
        ]

    def lapsed(self, ledger: Ledger, timeout: float, forgotten: float) -> list[int]:
        """Returns the live leases whose holder has not mentioned them for `timeout` seconds.

        A holder whose heartbeats do not mention a lease for `forgotten` seconds never received it, or dropped it.
        """
        return [
            token
            for token, lease in ledger.leases.items()
            if self.watched - self.leases.get(token, self.watched) > timeout
            or self._last_beat(lease.holder) - self.leases.get(token, self.watched) > forgotten
        ]

    def stuck(self, members: Membership, ledger: Ledger, least: float = STUCK_SECONDS) -> list[MemberId]:
        """Returns the members that speak and hold leases, none of which has moved for much longer than batches take.

        The bound follows the gaps between moves that are measured, and is never below `least`.
        """
        holders = sorted({lease.holder for lease in ledger.leases.values()}, key=lambda holder: holder.slot)
        found = [(holder, seen) for holder in holders if (seen := self.sightings.get(holder.slot)) is not None]
        gaps = [seen.gap for _, seen in found if seen.gap is not None]
        bound = max(least, STUCK_GAPS * statistics.median(gaps)) if gaps else least
        stuck = []
        for holder, seen in found:
            incarnations = members.slot(holder.role, holder.index).registrations
            patience = bound if seen.gap is not None else max(bound, FIRST_BATCH_SECONDS * incarnations)
            if seen.incarnation == holder.incarnation and self.free - seen.moved_at > patience:
                stuck.append(holder)
        return stuck

    def taking_over(self, members: Membership) -> "Observations":
        """Notes that a new master has yet to hear from any parameter server."""
        return replace(self, unheard=frozenset(name for name, slot in members.slots.items() if slot.role is Role.PS))

    def has_heard_servers(self, members: Membership) -> bool:
        """Whether every parameter server has said what it serves; one that is silent is given up in time."""
        if not self.unheard:
            return True
        waited_for = (members.slots[name] for name in self.unheard)
        return all(slot.live_process is None for slot in waited_for)

    def watching(self, members: Membership, ledger: Ledger) -> "Observations":
        """Starts the deadlines of members and leases that have none, and forgets leases that have ended."""
        seen = self._watching_members(members)
        live = ledger.leases.keys()
        if live != self.leases.keys():  # most heartbeats only move leases
            leases = {token: self.leases.get(token, self.watched) for token in live}
            seen = replace(seen, sightings=self._begun(seen.sightings, ledger), leases=leases)
        if not self.positions.keys() <= live:
            positions = {token: position for token, position in self.positions.items() if token in live}
            seen = replace(seen, positions=positions)
        return seen

    def _watching_members(self, members: Membership) -> "Observations":
        fresh = {
            name: Sighting(process.incarnation, self.watched, self.free)
            for name in members.slots.keys() - self.sightings.keys()
            if (process := members.slots[name].process) is not None
        }
        return replace(self, sightings={**self.sightings, **fresh}) if fresh else self

    def _begun(self, sightings: Mapping[str, Sighting], ledger: Ledger) -> Mapping[str, Sighting]:
        """Returns the sightings, in which the leases of members that had none begin to move now."""
        fresh = {ledger.leases[token].holder.slot for token in ledger.leases.keys() - self.leases.keys()}
        if not fresh:
            return sightings
        busy = {lease.holder.slot for token, lease in ledger.leases.items() if token in self.leases}
        moved = {name: replace(sightings[name], moved_at=self.free) for name in fresh - busy if name in sightings}
        return {**sightings, **moved}

    def traffic(self) -> Traffic:
        """Returns the traffic of all workers."""
        return reduce(Traffic.plus, (seen.traffic for seen in self.sightings.values()), Traffic())

    def repeated_batches(self) -> int:
        """Returns how many pushes parameter servers ignored because they had applied them before."""
        return sum(
            seen.repeated_before + (seen.server.repeated_batches if seen.server else 0)
            for seen in self.sightings.values()
        )

    def rows(self, owners: Iterable[PsAddress]) -> dict[str, int]:
        """Returns the rows per table of the servers that own some; one that gave its rows away may still have them."""
        total: Counter[str] = Counter()
        for owner in owners:
            seen = self.sightings.get(slot_name(Role.PS, owner.index))
            if seen is not None and seen.server is not None:
                total.update(seen.server.rows)
        return dict(total)

    def admission(self) -> Mapping[str, AdmissionCounts]:
        """Returns the counts of all parameter servers, roll-backs included, by table with admission or eviction."""
        return reduce(total_admission, (seen.admission() for seen in self.sightings.values()), {})

    def _moved(self, known: Sighting) -> Sighting:
        """Notes that a member's leases move now; the longest gap decays slowly."""
        gap = max(self.free - known.moved_at, 0.9 * (known.gap or 0.0))
        return replace(known, moved_at=self.free, gap=gap)

    def _last_beat(self, member: MemberId) -> float:
        sighting = self.sightings.get(member.slot)
        if sighting is None or sighting.incarnation != member.incarnation or sighting.beat_at is None:
            return -math.inf
        return sighting.beat_at

    def _with(self, member: MemberId, sighting: Sighting) -> "Observations":
        return replace(self, sightings={**self.sightings, member.slot: sighting})
