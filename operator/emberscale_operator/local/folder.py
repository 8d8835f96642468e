"""Where a job keeps its files on this machine."""

import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "emberscale-"
_LONGEST_PARENT = 40


@dataclass(frozen=True)
class RunFolder:
    """The part of a run's folder that its processes use: `logs/`, and `state/`, which outlives them."""

    root: Path

    @property
    def logs(self) -> Path:
        """The folder of logs, one for each member: `<role>-<index>.log`."""
        return self.root / "logs"

    @property
    def state(self) -> Path:
        """What the job needs to continue: the store's files and the manifest."""
        return self.root / "state"

    @property
    def manifest(self) -> Path:
        """The manifest, defaults filled in, as the job's processes read it."""
        return self.state / "manifest.json"

    @property
    def token(self) -> Path:
        """The secret of the run under way."""
        return self.state / "token"

    @property
    def operator_token(self) -> Path:
        """The secret with which the run under way is steered."""
        return self.state / "operator-token"

    @property
    def master_address(self) -> Path:
        """Where the master of the run under way listens: `host:port`."""
        return self.state / "master-address"

    @property
    def kill_request(self) -> Path:
        """The request to kill a process of the run under way, until the run takes it."""
        return self.state / "kill"

    @property
    def drill(self) -> Path:
        """A file that is locked while a loss is rehearsed on the run."""
        return self.state / "drill"

    @property
    def sockets(self) -> Path:
        """A link to the folder with the job's Unix sockets, while there is one."""
        return self.state / "sockets"

    def make(self) -> None:
        """Makes the folders. Raises OSError."""
        self.logs.mkdir(parents=True, exist_ok=True)
        self.state.mkdir(parents=True, exist_ok=True)

    def write_tokens(self) -> str:
        """New random secrets, in files that only their owner can read; returns that of the operator."""
        write_private(self.token, secrets.token_hex(32))
        token = secrets.token_hex(32)
        write_private(self.operator_token, token)
        return token


def write_private(path: Path, text: str) -> None:
    """Writes a file that nobody else can read, not even for a moment."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def make_socket_folder(link: Path) -> Path:
    """A new folder for Unix sockets, private to this user, and a link to it; replaces what an earlier run left.

    It is not in the run's own folder because the kernel allows 107 bytes for the path of a socket.
    """
    remove_socket_folder(link)
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent if len(parent) <= _LONGEST_PARENT else "/tmp"))
    link.symlink_to(folder)
    return folder


def remove_socket_folder(link: Path) -> None:
    """Removes the link, and the folder that it names, if that is one of ours."""
    if not link.is_symlink():
        return
    folder = link.readlink()
    if folder.name.startswith(_PREFIX) and folder.is_dir() and folder.stat().st_uid == os.getuid():
        shutil.rmtree(folder)
    link.unlink()
