"""The checkpoint storage: files that may fail, hang, or be torn."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.world import Process, Task, World


@dataclass(frozen=True)
class Stored:
    """A file. `torn`: its bytes are not those written, which its checksum reveals."""

    content: Any
    torn: bool = False


class Storage:
    """Files by path, shared by all processes. Writing and reading take time, and fail with OSError."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.files: dict[str, Stored] = {}
        self._failing_until = 0.0
        self._hanging_until = 0.0
        self._tears = 0

    def fail_for(self, seconds: float) -> None:
        """Makes everything asked within this many seconds fail."""
        self._failing_until = max(self._failing_until, self._world.now + seconds)

    def hang_for(self, seconds: float) -> None:
        """Delays answers to everything asked within this many seconds until their end."""
        self._hanging_until = max(self._hanging_until, self._world.now + seconds)

    def tear_next(self) -> None:
        """Silently damages the next file that is written."""
        self._tears += 1

    def write(self, process: Process, path: str, content: Any) -> Task[None]:
        """Writes a file, which is torn if its writer dies meanwhile. Raises OSError."""
        self.files[path] = Stored(content, torn=True)
        yield from self._access(process)
        torn = self._tears > 0
        self._tears -= torn
        self.files[path] = Stored(content, torn)

    def read(self, process: Process, path: str) -> Task[Stored]:
        """Reads a file. Raises OSError, such as FileNotFoundError."""
        yield from self._access(process)
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def change(self, process: Process, change: Callable[[dict[str, Stored]], Any]) -> Task[Any]:
        """Reads or changes all files in one step. Raises OSError."""
        yield from self._access(process)
        return change(self.files)

    def _access(self, process: Process) -> Task[None]:
        yield process.sleep(self._world.random.uniform(0.002, 0.05))
        while self._world.now < self._hanging_until:
            yield process.sleep(self._hanging_until - self._world.now)
        if self._world.now < self._failing_until:
            raise OSError("the storage is out of reach")
