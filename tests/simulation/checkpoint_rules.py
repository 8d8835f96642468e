"""The rules for checkpoints: a complete one holds all rows, with the same batches in each, but for forgotten ones."""

from typing import TYPE_CHECKING

from tests.simulation.faults import SAVED
from tests.simulation.folder import Manifest
from tests.simulation.units import UNITS, Batch, Unit, touching
from tests.simulation.world import SimulationError

from buckets import bucket_of
from emberscale_jobmaster.ranges import Applied
from emberscale_trainer.partition import AppliedBatches

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


class CheckpointRules:
    """Observes the checkpoints of a job."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster

    def completed(self, manifest: Manifest) -> None:
        """A checkpoint is complete."""
        self._cluster.world.trace("storage", f"checkpoint {manifest.checkpoint} is complete")
        self._cluster.reaches(SAVED)
        self.check(manifest)

    def check(self, manifest: Manifest) -> None:
        """Checks that all rows are in a checkpoint's files, and have the batches that it names."""
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
                raise SimulationError(f"{path} and the manifest differ in what is applied")
            for unit, rows in stored.content.rows.items():
                if unit in holders:
                    raise SimulationError(f"{path} and {holders[unit]} both hold {unit}")
                holders[unit] = path
                expected = all_expected[unit]
                if rows != expected:
                    raise SimulationError(
                        f"{path} says that it holds {sorted(expected)}, and {unit} holds {sorted(rows)}"
                    )
        changed = {unit for unit, expected in all_expected.items() if expected}
        if whole and (missing := changed - holders.keys()):
            raise SimulationError(f"checkpoint {manifest.checkpoint} lacks {sorted(missing)}")

    def newest_sound(self) -> str:
        """Returns the newest checkpoint without a torn or missing file; empty if there is none."""
        files = self._cluster.storage.files
        sound = [
            checkpoint
            for checkpoint, manifest in self._cluster.folder.manifests().items()
            if all(path in files and not files[path].torn for path in manifest.files)
        ]
        return max(sound, default="")


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
