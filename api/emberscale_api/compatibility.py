"""Agreements between processes of neighbouring versions: the version of a link, and the Redis keys of a job's state."""

from dataclasses import dataclass
from importlib.metadata import version

VERSION = version("emberscale")
"""The version of this process."""
LINK_VERSION = 1
"""Counts the changes of the protocols between processes that a neighbouring version cannot ignore."""


def spoken_version() -> str:
    """Returns the version that a process sends on a link: `<link version>/<version>`."""
    return f"{LINK_VERSION}/{VERSION}"


def version_problem(spoken: str) -> str | None:
    """Explains why this process cannot work with a peer of this version; None if it can.

    Returns None for a peer without a version, such as a user's own tool.
    """
    link, _, release = spoken.partition("/")
    if not spoken or link == str(LINK_VERSION):
        return None
    return (
        f"this process is of version {VERSION} (link {LINK_VERSION}), and the other side of version {release} (link "
        f"{link}): give all processes of the job one image"
    )


DEPOSED_BY_DELETION = 0
"""The term of a deleted job. No master ever has it, so a master that still runs learns that it must exit."""


@dataclass(frozen=True)
class StateKeys:
    """Keys of one job.

    `term` counts masters, `holder` names the one that writes, `state` is the state, `blocks` the index of each data
    file, `bad` the malformed records.
    """

    term: str
    holder: str
    state: str
    blocks: str
    bad: str

    @classmethod
    def of(cls, job_uid: str) -> "StateKeys":
        """The keys of the job of this uid."""
        return cls(*(f"emberscale:{job_uid}:{part}" for part in ("term", "holder", "state", "blocks", "bad")))


@dataclass(frozen=True)
class FlashKeys:
    """Keys of one job's flash checkpoint in Redis: `manifest` makes it complete, all keys begin with `prefix`."""

    prefix: str

    @classmethod
    def of(cls, job_uid: str) -> "FlashKeys":
        """The keys of the job of this uid."""
        return cls(f"emberscale:{job_uid}:flash:")

    @property
    def manifest(self) -> str:
        """The key of the newest complete checkpoint's manifest."""
        return f"{self.prefix}manifest"

    def of_file(self, checkpoint: str, path: str) -> str:
        """The key of a file that the manifest of a checkpoint lists; later checkpoints share all that is no JSON."""
        return f"{self.prefix}{checkpoint}/{path}" if path.endswith(".json") else f"{self.prefix}{path}"

    def inventory(self, folder: str) -> str:
        """The key of a set: those of all files that Redis may hold of the server with this folder."""
        return f"{self.prefix}{folder}/inventory"
