"""Where a job keeps its files on this machine."""

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

_PREFIX = "emberscale-"
_LONGEST_PARENT = 40


class RunFolder:
    """The part of a run's folder that its processes use: `logs/`, and `state/`, which outlives them.

    * `logs`: a folder with a log for each member, `<role>-<index>.log`.
    * `state`: a folder with what the job needs to continue, such as the store's files.
    * `manifest`: with defaults filled in, as the job's processes read it.
    * `token`: the secret of the run under way; `operator_token`: the one with which that run is steered.
    * `master_address`: where the master listens, `host:port`; not there while the job saves its state to end.
    * `kill_request`: the request to kill a process of the run under way, until the run takes it.
    * `drill`: a file that is locked while a loss is rehearsed on the run.
    * `sockets`: a link to the folder with the job's Unix sockets, while there is one.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = root / "logs"
        self.state = root / "state"
        self.manifest = self.state / "manifest.json"
        self.token = self.state / "token"
        self.operator_token = self.state / "operator-token"
        self.master_address = self.state / "master-address"
        self.kill_request = self.state / "kill"
        self.drill = self.state / "drill"
        self.sockets = self.state / "sockets"

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


def try_lock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    """Locks an open file or folder until it is closed; returns whether no other process has it locked."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
