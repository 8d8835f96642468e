"""A person's wish that a member of a run under way dies: `emberscale drill` writes it, and the run carries it out."""

import contextlib
from dataclasses import dataclass
from typing import Self

from emberscale_operator.local.folder import RunFolder, write_private
from emberscale_operator.machine import Instance


@dataclass(frozen=True)
class KillRequest:
    """One process: a member such as `ps-1`, and the name of its incarnation."""

    member: str
    incarnation: str

    def ask(self, folder: RunFolder) -> None:
        """Leaves the request where the run looks for it; the file is gone once it was taken. Raises OSError."""
        beside = folder.kill_request.with_suffix(".new")
        write_private(beside, f"{self.member} {self.incarnation}")
        beside.replace(folder.kill_request)

    @classmethod
    def take(cls, folder: RunFolder) -> Self | None:
        """Returns the request in a run's folder, and removes it; None if there is none."""
        try:
            member, _, incarnation = folder.kill_request.read_text(encoding="utf-8").partition(" ")
        except FileNotFoundError:
            return None
        with contextlib.suppress(FileNotFoundError):
            folder.kill_request.unlink()
        return cls(member, incarnation)

    def names(self, instance: Instance) -> bool:
        """Whether it asks for this one, and not for another process of the same member."""
        return (instance.id.member, instance.name) == (self.member, self.incarnation)
