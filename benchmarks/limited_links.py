"""Processes of a job in network namespaces of their own, each behind a link of a given bandwidth.

A link is a pair of virtual Ethernet devices with a token bucket at both ends, so a process sends and receives at most
that much at a time, as on a machine of its own. All links end in one more namespace, which forwards between them.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

_NETWORK = Path(__file__).parents[1] / "tests" / "support" / "virtual_network.py"
_TOOLS = ("unshare", "nsenter", "ip", "tc")
_QUEUE = "burst 256kb latency 50ms"


def missing() -> str:
    """Returns which programs this machine lacks; empty if it has all."""
    return ", ".join(tool for tool in _TOOLS if shutil.which(tool) is None)


@contextmanager
def limited_links(folder: Path, members: Mapping[str, int], mbit: int) -> Iterator[list[str]]:
    """Yields the command that takes the place of `emberscale`, for a job with up to so many members of each role.

    The master and `emberscale` share a link. The namespaces end with the context, or with this process. Needs root.
    """
    names = ["master", *(f"{role}-{index}" for role, number in members.items() for index in range(number))]
    with ExitStack() as open_namespaces:
        middle = open_namespaces.enter_context(_namespace())
        _inside(middle, "echo 1 > /proc/sys/net/ipv4/ip_forward")
        places = {}
        for number, name in enumerate(names):
            own = open_namespaces.enter_context(_namespace())
            places[name] = (f"/proc/{own}/ns/net", f"10.78.{number}.2")
            _link(middle, own, number, mbit)
        file = folder / "network.json"
        file.write_text(json.dumps(places), encoding="utf-8")
        entered = [sys.executable, str(_NETWORK), str(file)]
        yield [*entered, "enter", "master", *entered]


@contextmanager
def _namespace() -> Iterator[int]:
    """Yields the id of a process in a new network namespace; the process ends with its input."""
    command = ["unshare", "--net", "sh", "-c", "ip link set lo up; echo ready; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("network namespaces need root")
        yield process.pid


def _link(middle: int, own: int, number: int, mbit: int) -> None:
    """Links a namespace with the one in the middle."""
    near = f"link{number}"
    limit = f"root tbf rate {mbit}mbit {_QUEUE}"
    _inside(
        middle,
        f"ip link add {near} type veth peer name eth0 netns {own}; ip address add 10.78.{number}.1/24 dev {near};"
        f"ip link set {near} up; tc qdisc add dev {near} {limit}",
    )
    _inside(
        own,
        f"ip address add 10.78.{number}.2/24 dev eth0; ip link set eth0 up; tc qdisc add dev eth0 {limit};"
        f"ip route add default via 10.78.{number}.1",
    )


def _inside(process: int, script: str) -> None:
    subprocess.run(["nsenter", "--net", "--target", str(process), "sh", "-ec", script], check=True)
