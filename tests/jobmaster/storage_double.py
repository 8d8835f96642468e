"""The checkpoints of a driven job: which batches each has, and how storage answers the master."""

from dataclasses import dataclass, field

from emberscale_api.checkpoint import CheckpointFile, CheckpointManifest, is_flash, is_priority, number_of, rows_suffix
from emberscale_api.job import TrainingJob
from emberscale_api.origin import InitialCheckpoints, UnusableOriginError
from emberscale_jobmaster import ranges
from emberscale_jobmaster.effects import FindCheckpoint, PruneCheckpoints, SnapshotCall, WriteManifest
from emberscale_jobmaster.events import CheckpointFound, Event, ManifestWritten, PruningDone, StorageFailed
from emberscale_jobmaster.initial import initial_source
from emberscale_jobmaster.operations import Restored, Source
from emberscale_jobmaster.ranges import Applied

INITIAL = "/another/checkpoints"
"""The folder of the checkpoints of another job."""

Holding = dict[int, set[int]]
"""The applied batches by epoch."""


def as_ranges(holding: Holding) -> Applied:
    """Returns the batches as the master's calls and events have them."""
    return {
        epoch: ranges.normalised((batch, batch + 1) for batch in batches)
        for epoch, batches in holding.items()
        if batches
    }


def as_holding(applied: Applied) -> Holding:
    """Returns the batches one by one."""
    return {epoch: {batch for start, stop in pairs for batch in range(start, stop)} for epoch, pairs in applied.items()}


@dataclass
class StorageDouble:
    """Checkpoints in memory. `behaviour` is "works", "hangs", "fails" or "lacks credentials".

    Each server has 10 bytes of rows, of which `changed_bytes` change between two checkpoints. `initial` are another
    job's checkpoints from which this one starts, by id.

    * `checkpoints`: the batches in each checkpoint, by id, and whether it has a manifest; `written`: the manifests.
    * `damaged`: why a checkpoint cannot be used, by id.
    * `lacks_redis`: searches find no flash checkpoint, because Redis does not answer.
    * `built_on`: the checkpoint on which each was to build; `stored`: the endings of the names of its row files;
      `limits`: the bytes per second that a server could write, 0 without a limit.
    * `found`: the searches for a checkpoint that were answered.
    * `swept`: the servers, by index, whose files were removed from Redis, each time.
    """

    initial: dict[str, CheckpointManifest] | None = None
    changed_bytes: int = 2
    behaviour: str = "works"
    checkpoints: dict[str, tuple[Holding, bool]] = field(default_factory=dict)
    written: dict[str, WriteManifest] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    lacks_redis: bool = False
    built_on: dict[str, str] = field(default_factory=dict)
    stored: dict[str, str] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    found: list[FindCheckpoint] = field(default_factory=list)
    swept: list[tuple[int, ...]] = field(default_factory=list)

    # For the master

    def answer(
        self, effect: FindCheckpoint | WriteManifest | PruneCheckpoints, now: float, manifest: TrainingJob
    ) -> Event:
        """Carries out what the master of the job with this manifest asks for, unless storage does not work."""
        if self.behaviour != "works":
            return StorageFailed(
                now=now,
                operation=effect.operation,
                serial=effect.serial,
                problem="EIO",
                lacks_credentials=self.behaviour == "lacks credentials",
            )
        match effect:
            case FindCheckpoint():
                return self._find(effect, now, manifest)
            case WriteManifest(operation=operation, serial=serial):
                self.checkpoints[effect.checkpoint] = (as_holding(effect.applied), True)
                self.written[effect.checkpoint] = effect
                return ManifestWritten(now=now, operation=operation, serial=serial)
            case PruneCheckpoints(operation=operation, serial=serial):
                own = sorted(one for one in self.checkpoints if one.isdigit())
                old = [one for one in self.checkpoints if is_priority(one) and number_of(one) < int(own[-1])]
                for identifier in (*own[: -effect.keep], *old):
                    del self.checkpoints[identifier]
                return PruningDone(now=now, operation=operation, serial=serial)

    def delete(self, checkpoint: str, gone: tuple[int, ...]) -> None:
        """Removes a checkpoint; one with a manifest stays. Removes what servers that are gone have left in Redis."""
        if is_flash(checkpoint):
            self.swept.append(gone)
        if not self.checkpoints.get(checkpoint, ({}, False))[1]:
            self.checkpoints.pop(checkpoint, None)

    def _find(self, effect: FindCheckpoint, now: float, manifest: TrainingJob) -> Event:
        refused = {*effect.refused, *self.damaged}
        whole = [name for name, (_, complete) in self.checkpoints.items() if complete and not is_priority(name)]
        sound = [name for name in whole if name not in refused and not (self.lacks_redis and is_flash(name))]
        source, unusable = None, ""
        self.found.append(effect)
        if sound:
            newest_sound = max(sound, key=number_of)
            applied = as_ranges(self.checkpoints[newest_sound][0])
            held = self.written.get(newest_sound)
            data = (("/data/day_0", 1000),) if held is None else held.training_files
            origin = None if held is None else held.image.origin
            forgotten = () if held is None else held.image.forgotten
            source = Source(newest_sound, Restored(applied, data=data, forgotten=forgotten, origin=origin))
        elif self.initial is not None and effect.initial is not None:
            failed = {uri.rpartition("/")[2]: why for uri, why in effect.initial.refused.items()}
            there = InitialCheckpoints(INITIAL, sorted(self.initial), self.initial.__getitem__, failed)
            try:
                chosen, _ = there.choose(manifest, effect.initial.pinned)
                source = initial_source(chosen, there.uri_of(chosen.id), manifest)
            except UnusableOriginError as error:
                unusable = str(error)
        newest = max(map(number_of, self.checkpoints), default=0)
        return CheckpointFound(
            now=now,
            operation=effect.operation,
            serial=effect.serial,
            source=source,
            damaged=self.damaged,
            newest=newest,
            unusable=unusable,
        )

    # For parameter servers

    def begin(self, call: SnapshotCall) -> None:
        """Notes how a server is told to write a checkpoint."""
        self.built_on[call.checkpoint], self.stored[call.checkpoint] = call.since, rows_suffix(call.weight_bits)
        self.limits[call.checkpoint] = call.bytes_per_second

    def save(self, checkpoint: str, applied: Holding, server: int) -> tuple[CheckpointFile, ...]:
        """Keeps the rows of a server, which have these batches, and returns the files that they are in."""
        self.checkpoints.setdefault(checkpoint, (applied, False))
        stem, since = f"ps-{server}/table", self.built_on[checkpoint]
        path = stem + self.stored[checkpoint]
        if not since or is_priority(checkpoint):
            return (CheckpointFile(path=path, bytes=10, crc32=1),)
        base = CheckpointFile(path=stem + self.stored[since], bytes=10, crc32=1, checkpoint=since)
        return (base, CheckpointFile(path=path, bytes=self.changed_bytes, crc32=1))

    def load(self, checkpoint: str) -> Holding:
        """Returns the batches in a checkpoint of this job, by id, or of another job, by URI."""
        if "/" not in checkpoint:
            return {epoch: set(batches) for epoch, batches in self.checkpoints[checkpoint][0].items()}
        assert self.initial is not None
        applied = self.initial[checkpoint.rpartition("/")[2]].applied
        return as_holding({each.epoch: each.ranges for each in applied})
