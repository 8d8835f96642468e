"""The checkpoints of one parameter server: it writes a snapshot of its rows, and loads what servers have written."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.simulation.calls import CallError
from tests.simulation.mover import DamagedError
from tests.simulation.units import Batch, Unit
from tests.simulation.world import Task

from emberscale_trainer.partition import AppliedBatches

if TYPE_CHECKING:
    from tests.simulation.parameter_server import ParameterServer


@dataclass(frozen=True)
class ServerFile:
    """One server's file of a checkpoint."""

    rows: dict[Unit, frozenset[Batch]]
    applied: AppliedBatches


@dataclass
class SaveProgress:
    """The progress of a snapshot's writing."""

    generation: int
    barrier: int
    written: int = 0
    problem: str = ""
    done: bool = False
    abandoned: bool = False
    path: str = ""


@dataclass
class LoadProgress:
    """The progress of the loading of a checkpoint."""

    bytes: int = 0
    problem: str = ""
    error: Exception | None = None
    applied: AppliedBatches = field(default_factory=AppliedBatches)


class SimulatedSaves:
    """The snapshot that a server writes, if any, and its reading of checkpoints."""

    def __init__(self, server: "ParameterServer") -> None:
        self._server = server
        self._saving: SaveProgress | None = None

    def begin(self, generation: int, barrier: int, checkpoint: str) -> None:
        """Writes the rows as they are, in the background."""
        server = self._server
        content = ServerFile({unit: frozenset(done) for unit, done in server.rows.items()}, server.core.applied.copy())
        self.stop()
        self._saving = SaveProgress(generation, barrier, path=f"{checkpoint}/ps-{server.index}")
        server.spawn(self._save(self._saving, content))

    def stop(self) -> None:
        """Abandons the writing of the previous snapshot, for another snapshot or another history."""
        if self._saving is not None:
            self._saving.abandoned = True
        self._saving = None

    def _save(self, saving: SaveProgress, content: ServerFile) -> Task[None]:
        while not saving.abandoned:
            try:
                yield from self._server.cluster.storage.write(self._server, saving.path, content)
            except OSError as error:
                saving.problem = str(error)
                yield self._server.sleep(1.0)
            else:
                saving.done, saving.written, saving.problem = True, 1, ""
                self._server.notify()
                return

    def resumed(self, generation: int, barrier: int) -> None:
        """Abandons the writing of a snapshot of this barrier, which is released, or of an earlier one."""
        saving = self._saving
        if saving is not None and saving.generation == generation and saving.barrier <= barrier:
            saving.abandoned = True

    def saved(self, generation: int, barrier: int, wait: float) -> Task[SaveProgress]:
        """Returns the progress of a snapshot's writing."""
        deadline = self._server.world.now + wait
        while True:
            saving = self._saving
            if saving is None or (saving.generation, saving.barrier) != (generation, barrier):
                raise CallError("FAILED_PRECONDITION", "that snapshot is not under way here")
            if saving.abandoned and not saving.done:
                raise CallError("ABORTED", "that snapshot was given up")
            if saving.done or self._server.world.now >= deadline:
                return saving
            yield self._server.changed(deadline)

    def load(
        self, checkpoint: str, own: set[Unit], loading: LoadProgress | None = None
    ) -> Task[tuple[dict[Unit, set[Batch]], list[AppliedBatches]]]:
        """Returns a checkpoint's content for some units, and its records of batches. Raises DamagedError."""
        loading = LoadProgress() if loading is None else loading
        rows: dict[Unit, set[Batch]] = {}
        records: list[AppliedBatches] = []
        yield self._server.sleep(self._server.world.random.uniform(0.05, 0.5))
        for path in self._server.cluster.folder.files_of(checkpoint) if checkpoint else ():
            content = yield from self._read(path, loading)
            loading.bytes += 1
            records.append(content.applied)
            for unit, batches in content.rows.items():
                if unit in own:
                    rows.setdefault(unit, set()).update(batches)
        return rows, records

    def _read(self, path: str, loading: LoadProgress) -> Task[ServerFile]:
        while True:
            try:
                stored = yield from self._server.cluster.storage.read(self._server, path)
            except FileNotFoundError as error:
                raise DamagedError(f"{path} is missing") from error
            except OSError as error:
                loading.problem = str(error)
                yield self._server.sleep(1.0)
                continue
            if stored.torn:
                raise DamagedError(f"{path} fails its checksum")
            loading.problem = ""
            return stored.content  # type: ignore[no-any-return]  # the storage holds anything
