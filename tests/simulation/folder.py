"""The folder of checkpoints on the simulated storage: manifests, and the files that they list."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.storage import Stored
from tests.simulation.world import Process, Task

from emberscale_jobmaster.effects import WriteManifest
from emberscale_jobmaster.operations import Restored, Source
from emberscale_jobmaster.ranges import Applied

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster


@dataclass(frozen=True)
class Manifest:
    """A manifest, whose existence makes its checkpoint complete."""

    checkpoint: str
    applied: Applied
    files: tuple[str, ...]
    effect: WriteManifest


class Folder:
    """Like `CheckpointFolder`, without bytes."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._storage = cluster.storage

    def manifests(self) -> dict[str, Manifest]:
        """Returns the manifests of complete checkpoints by id, ascending."""
        return {
            path.partition("/")[0]: stored.content
            for path, stored in sorted(self._storage.files.items())
            if path.endswith("/manifest")
        }

    def files_of(self, checkpoint: str) -> tuple[str, ...]:
        """Returns the files of a complete checkpoint, or the path of its manifest once that is removed."""
        manifest = self.manifests().get(checkpoint)
        return (f"{checkpoint}/manifest",) if manifest is None else manifest.files

    def find(self, process: Process, refused: tuple[str, ...]) -> Task[tuple[Source | None, dict[str, str], int]]:
        """Finds the newest complete checkpoint whose files exist. Raises OSError."""

        def look(files: dict[str, Stored]) -> tuple[Source | None, dict[str, str], int]:
            damaged: dict[str, str] = {}
            newest = max((int(path.partition("/")[0]) for path in files), default=0)
            for checkpoint, manifest in reversed(self.manifests().items()):
                if checkpoint in refused:
                    continue
                missing = [path for path in manifest.files if path not in files]
                if missing:
                    damaged[checkpoint] = f"{missing[0]} is missing"
                    continue
                image = manifest.effect.image
                restored = Restored(
                    applied=manifest.applied,
                    forgotten=image.forgotten,
                    evaluations=image.evaluations,
                    data=(*manifest.effect.training_files, *manifest.effect.evaluation_files),
                    training_seconds=image.training_seconds,
                )
                return Source(checkpoint, restored), damaged, newest
            return None, damaged, newest

        found: tuple[Source | None, dict[str, str], int] = yield from self._storage.change(process, look)
        return found

    def write(self, process: Process, effect: WriteManifest) -> Task[None]:
        """Makes a checkpoint complete. Raises OSError, also if none of its files exist."""
        manifest = Manifest(effect.checkpoint, effect.applied, tuple(file.path for file in effect.files), effect)

        def change(files: dict[str, Stored]) -> None:
            if not any(path.startswith(f"{effect.checkpoint}/") for path in files):
                raise FileNotFoundError(effect.checkpoint)
            files[f"{effect.checkpoint}/manifest"] = Stored(manifest)

        yield from self._storage.change(process, change)
        self._cluster.model.checkpoints.completed(manifest)

    def discard(self, process: Process, checkpoint: str) -> Task[None]:
        """Removes a checkpoint without a manifest. Raises OSError."""

        def change(files: dict[str, Stored]) -> None:
            if f"{checkpoint}/manifest" not in files:
                _remove(files, checkpoint)

        yield from self._storage.change(process, change)

    def prune(self, process: Process, keep: int, damaged: tuple[str, ...]) -> Task[None]:
        """Removes what is older than the newest checkpoint, except for the `keep` newest. Raises OSError."""

        def change(files: dict[str, Stored]) -> None:
            kept = [one for one in self.manifests() if one not in damaged][-keep:]
            for one in {path.partition("/")[0] for path in files}:
                if kept and one < kept[-1] and one not in kept:
                    _remove(files, one)

        yield from self._storage.change(process, change)


def _remove(files: dict[str, Any], checkpoint: str) -> None:
    for path in [path for path in files if path.startswith(f"{checkpoint}/")]:
        del files[path]
