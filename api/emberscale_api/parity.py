"""What parameter servers and the master tell each other of parity."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParityTrouble:
    """What keeps rows of a parameter server from being protected.

    * `version`: of the routing table whose servers it is about. `message`: for people, about the server.
    * `seconds`: for how long the servers have parted, or one that holds parity has acknowledged nothing.
    * `broken`: they have parted for good; pushes wait until they get another table.
    """

    version: int
    message: str
    seconds: float = 0.0
    broken: bool = False
