"""The protocol between the fork server and its client: JSON lines over a socket.

Importing torch and the kernels takes seconds. The server imports them once; a process forked from it starts at once.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class ForkRequest:
    """Asks for a process. `role` is `ps` or `worker`; its output goes to the end of `log`; `cores` None: all cores."""

    ticket: int
    role: str
    environment: Mapping[str, str]
    log: str
    cores: tuple[int, ...] | None


@dataclass(frozen=True)
class Forked:
    """The process of the request `ticket` runs."""

    ticket: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """The process of the request `ticket` has ended; `code` is negative for a signal."""

    ticket: int
    code: int


Message = ForkRequest | Forked | Ended

_KINDS: Mapping[str, type[Message]] = {kind.__name__: kind for kind in (ForkRequest, Forked, Ended)}


def encode(message: Message) -> bytes:
    """Returns the message as one line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Parses a line of `encode`. Raises ValueError for anything else."""
    fields = json.loads(line)
    try:
        kind = _KINDS[fields.pop("kind")]
        if fields.get("cores") is not None:
            fields["cores"] = tuple(fields["cores"])
        return kind(**fields)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a message of the fork server: {line[:100]!r}") from error


class LineBuffer:
    """Splits the data of a stream into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> list[bytes]:
        """Returns the lines that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
