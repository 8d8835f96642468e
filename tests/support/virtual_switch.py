"""A network of namespaces in one process, which delays, drops, limits and cuts the traffic between any two of them.

`python -I virtual_switch.py NAME=ADDRESS...` makes an unnamed namespace for each name, with a TUN device of that IPv4
address, prints `{name: [the namespace's file, address]}` as JSON, and forwards packets until its standard input ends.
Each line of input replaces all faults: a list of `[one, other, fault]`, where "*" is any name and the first match
counts. The answer is an empty line. The kernel removes the namespaces with the last process in them.

Needs root, `ip` and /dev/net/tun, but not netem in the kernel.
"""

import ctypes
import fcntl
import heapq
import ipaddress
import itertools
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU = 1500
_MOST_QUEUED_SECONDS = 0.5
"""A link of limited bandwidth drops packets that would wait longer."""


@dataclass
class Link:
    """The way from one namespace to another.

    `delay` in seconds, `loss` as a probability, `rate` in bytes a second (0: unlimited).
    """

    delay: float = 0.0
    loss: float = 0.0
    rate: float = 0.0
    cut: bool = False
    free_at: float = field(default=0.0, compare=False)

    def arrival(self, size: int, now: float) -> float | None:
        """Returns when a packet that is sent now arrives; None if it is lost."""
        if self.cut or (self.loss and random.random() < self.loss):
            return None
        if self.rate:
            if self.free_at > now + _MOST_QUEUED_SECONDS:
                return None
            self.free_at = max(self.free_at, now) + size / self.rate
            return self.free_at + self.delay
        return now + self.delay


class Switch:
    """Forwards packets between the namespaces."""

    def __init__(self) -> None:
        self._devices: dict[bytes, int] = {}
        self._names: dict[bytes, str] = {}
        self._namespaces: list[int] = []
        self._faults: list[tuple[str, str, dict[str, Any]]] = []
        self._links: dict[bytes, Link] = {}  # by source and destination
        self._late: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()

    def add(self, name: str, address: str) -> str:
        """Makes a namespace, and returns the path of its file."""
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TUN | _IFF_NO_PI))
        for command in (
            "link set lo up",
            f"address add {address}/24 dev eth0",
            f"link set eth0 mtu {_MTU} txqueuelen 4096 up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        key = ipaddress.IPv4Address(address).packed
        self._devices[key], self._names[key] = device, name
        self._namespaces.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        return f"/proc/{os.getpid()}/fd/{self._namespaces[-1]}"

    def serve(self) -> None:
        """Forwards packets until the end of standard input."""
        polled = select.epoll()
        polled.register(0, select.EPOLLIN)
        for device in self._devices.values():
            polled.register(device, select.EPOLLIN)
        while True:
            wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else -1.0
            for ready, _ in polled.poll(wait):
                if ready == 0:
                    line = sys.stdin.buffer.readline()
                    if not line:
                        return
                    self._faults, self._links = json.loads(line), {}
                    print(flush=True)  # noqa: T201 - the answer
                else:
                    self._take(ready)
            now = time.monotonic()
            while self._late and self._late[0][0] <= now:
                _, _, device, packet = heapq.heappop(self._late)
                _write(device, packet)

    def _take(self, device: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(device, 1 << 16)
            except BlockingIOError:
                return
            way = packet[12:20]
            receiver = self._devices.get(way[4:])
            if packet[0] >> 4 != 4 or receiver is None:
                continue
            link = self._links.get(way) or self._link(way)
            now = time.monotonic()
            arrival = link.arrival(len(packet), now)
            if arrival is None:
                continue
            if arrival <= now:
                _write(receiver, packet)
            else:
                heapq.heappush(self._late, (arrival, next(self._numbers), receiver, packet))

    def _link(self, way: bytes) -> Link:
        ends = {self._names.get(way[:4], ""), self._names[way[4:]]}
        found = next((fault for one, other, fault in self._faults if _covers(one, other, ends)), {})
        return self._links.setdefault(way, Link(**found))


def _covers(one: str, other: str, ends: set[str]) -> bool:
    if one == "*" and other == "*":
        return True
    if "*" in (one, other):
        return bool({one, other} & ends)
    return {one, other} == ends


def _write(device: int, packet: bytes) -> None:
    try:
        os.write(device, packet)
    except OSError:
        return  # the queue is full; packets may get lost in any network


def main(arguments: list[str]) -> None:
    """Serves the namespaces named on the command line."""
    switch = Switch()
    made = {}
    for argument in arguments:
        name, address = argument.split("=")
        made[name] = [switch.add(name, address), address]
    print(json.dumps(made), flush=True)  # noqa: T201 - the answer
    switch.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
