"""What a run under way sees of other commands: edits of its manifest, which every new master reads, and kills."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from emberscale_api.job import TrainingJob, TrainingJobSpec
from emberscale_operator.local.folder import RunFolder, write_private
from emberscale_operator.machine import Instance, InstanceState

_log = structlog.get_logger()


class WatchedManifest:
    """The current spec in a manifest file; an unreadable file changes nothing."""

    def __init__(self, path: Path, spec: TrainingJobSpec) -> None:
        self._path = path
        self._spec = spec
        self._seen: tuple[int, int] | None = None  # it may have been edited since it was written
        self._told: tuple[int, int] | None = None

    def read(self) -> TrainingJobSpec:
        """Returns the newest spec."""
        mark = self._mark()
        if mark is not None and mark != self._seen:
            try:
                self._spec = TrainingJob.from_json(self._path.read_text(encoding="utf-8")).spec
            except OSError as error:  # it is read again at the next look
                if mark != self._told:
                    self._told = mark
                    _log.warning("edited_manifest_unreadable", file=str(self._path), problem=str(error))
                return self._spec
            except ValueError as error:
                _log.warning("edited_manifest_invalid", file=str(self._path), problem=str(error))
            self._seen = mark
        return self._spec

    def _mark(self) -> tuple[int, int] | None:
        """Returns a mark that changes with every edit."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns


@dataclass(frozen=True)
class KillRequest:
    """A request to kill one process: a member such as `ps-1`, and the name of its incarnation."""

    member: str
    incarnation: str

    def ask(self, folder: RunFolder) -> None:
        """Leaves the request where the run looks for it, in place of an earlier one; the file goes once it is taken.

        Raises OSError.
        """
        beside = folder.kill_request.with_suffix(".new")
        write_private(beside, f"{self.member} {self.incarnation}")
        beside.replace(folder.kill_request)

    @classmethod
    def take(cls, folder: RunFolder, instances: Sequence[Instance]) -> Instance | None:
        """Returns the process to kill, and removes the request; None if there is none.

        A request for a process that is not running stays until the requester takes it back: nothing was killed.
        """
        try:
            member, _, incarnation = folder.kill_request.read_text(encoding="utf-8").partition(" ")
        except FileNotFoundError:
            return None
        request = cls(member, incarnation)
        named = next((one for one in instances if request._names(one)), None)
        return named if named is not None and request.take_back(folder) else None

    def take_back(self, folder: RunFolder) -> bool:
        """Removes the request; returns whether it was still there. Whoever removes it decides about the process."""
        try:
            folder.kill_request.unlink()
        except FileNotFoundError:
            return False
        return True

    def _names(self, instance: Instance) -> bool:
        """Whether it names this live process, and not another process of the same member."""
        lives = instance.state is not InstanceState.EXITED
        return lives and (instance.id.member, instance.name) == (self.member, self.incarnation)
