"""A real PostgreSQL server for tests, only on a Unix socket and never as root."""

import os
import shutil
import subprocess
from pathlib import Path

from eventually import eventually


def postgres_binaries() -> Path | None:
    """Returns the folder with `initdb` and `postgres`, preferring Debian's newest; None if there is none."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    for folder in [*debian, *map(Path, os.environ.get("PATH", "").split(os.pathsep))]:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    return None


class PostgresServer:
    """A PostgreSQL cluster in its own folder, which `remove` deletes. It can be stopped and started repeatedly.

    PostgreSQL refuses to run as root, so under root it runs as `nobody`.
    """

    def __init__(self, binaries: Path, home: Path) -> None:
        self.home = home
        self._binaries = binaries
        self._server: subprocess.Popen[bytes] | None = None
        home.mkdir(mode=0o755)
        self._user = "nobody" if os.getuid() == 0 else None
        if self._user is not None:
            shutil.chown(home, self._user)
        subprocess.run(
            [str(binaries / "initdb"), "-D", str(home / "data"), "-U", "brain", "--auth=trust", "--no-sync"],
            check=True,
            capture_output=True,
            cwd=home,
            user=self._user,
        )

    def url(self, database: str = "postgres") -> str:
        """Returns the address of one of its databases."""
        return f"postgresql://brain@/{database}?host={self.home}"

    def start(self) -> None:
        """Starts it; returns once it accepts connections."""
        options = ["-c", "listen_addresses=", "-c", "fsync=off"]
        with (self.home / "log").open("ab") as log:
            self._server = server = subprocess.Popen(
                [str(self._binaries / "postgres"), "-D", str(self.home / "data"), "-k", str(self.home), *options],
                stdout=log,
                stderr=log,
                cwd=self.home,
                user=self._user,
            )
        ready = [str(self._binaries / "pg_isready"), "-h", str(self.home), "-U", "brain", "-t", "1", "-q"]
        eventually(lambda: server.poll() is not None or subprocess.run(ready, check=False).returncode == 0)
        if server.poll() is not None:
            raise RuntimeError(f"postgres ended: {(self.home / 'log').read_text()}")

    def stop(self) -> None:
        """Stops it at once, as a crash would."""
        if self._server is not None:
            self._server.send_signal(3)  # SIGQUIT: immediate shutdown
            self._server.wait(timeout=20)
            self._server = None

    def remove(self) -> None:
        """Stops it and deletes everything."""
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)
