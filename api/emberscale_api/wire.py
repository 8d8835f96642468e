"""The data plane: frames between a worker and a parameter server, over TCP or a Unix socket.

A frame is a fixed little-endian header and a payload of raw numpy buffers. Requests on one connection are answered in
order. The first frame on a connection is HELLO; its payload is a `Hello`. A server of another incarnation than the one
that is meant answers REFRESH; a malformed frame is answered with REFUSED. Both end the connection.

The dense parameters travel like rows: they are one more table, the last, whose keys are the numbers of dense pieces
(`routing.DENSE_PIECES`) and whose dimension is `routing.piece_length(parameters)`. A pull's payload is
`counts: uint32[tables]`, padded to a multiple of 8 bytes, then `keys: int64[sum(counts)]`, table by table. Its answer
is the weights of the rows, `float32`, in the order of the keys. A push's payload is a pull's, followed by the gradients
in the layout of a pull's answer.

With ROUND, a request is for several consecutive batches, which the worker trains one after another on rows of its own.
The answer to its pull has each row's optimizer state behind its weights, and its push has the changes of both, in that
layout. The batches of a push are applied together.

Every request carries the `generation` and `version` of the routing table that planned it. A pull is answered by a
server of the same generation that owns everything asked for. A push is applied only under the server's own version: a
server applies a batch once, so the push must contain everything that the batch changes there.

Server 0 alone bounds the staleness of gradients. A worker first pulls a training batch from server 0, which answers
when the bound allows the pull, then from all others at once. It pushes to server 0 first, which answers when the bound
allows the push, then to the others; when all have answered it tells server 0 with COMPLETE, which has no payload and is
not answered. A pull with READ_ONLY, for evaluation, needs no admission. If server 0 is lost, nobody knows the pulls
that it admitted, and its successor answers their pushes with REFRESH.

A worker keeps two connections to each server, one for pulls and one for pushes, so that a pull which is held back never
blocks the push that it waits for. Both send the same `session` in HELLO: the outstanding pulls of a worker belong to
its session, and end with it.

Servers send each other rows over the same sockets. After HELLO, OPEN makes a connection one of a row stream: ITEMs
follow in the order of their numbers, and their answers, each in `batch`, acknowledge them. When a connection breaks,
OPEN on another one is answered with the number to go on after.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import NamedTuple

from emberscale_api.errors import InvalidError

MAGIC = 0x4D424D45
VERSION = 6
MAX_PAYLOAD_BYTES = 1 << 30
MAX_HELLO_BYTES = 1 << 12
"""The most bytes of HELLO's payload and of its answer, so that no untrusted peer makes a process reserve memory."""

MAX_TABLES = 1 << 16

MAX_ROUND = 1 << 10
"""The most batches of a round."""

_HELLO = struct.Struct("<QB")


class Kind(IntEnum):
    """The kind of a request."""

    HELLO = 1
    PULL = 2
    PUSH = 3
    COMPLETE = 4
    OPEN = 5
    """Begins a connection of the row stream `shard`; answered with OK and the number of processed items."""
    ITEM = 6
    """Item number `batch` of a row stream; answered with OK and the number up to which all items are processed."""


class Status(IntEnum):
    """The status of an answer."""

    OK = 0
    REPEATED = 1
    """The batch is applied already; nothing was done."""
    REFRESH = 2
    """The `generation` is not the server's, the session has ended, or server 0 does not know the pull of a push.

    Nothing was done, and everything under way is void: fetch the routing table, begin a session, and pull again what is
    not committed. Leases of another generation are void, too.
    """
    FENCED = 3
    """The lease has ended, or a newer one of its shard exists: drop it."""
    REFUSED = 4
    """The request makes no sense here; the payload is a UTF-8 reason."""
    MOVED = 5
    """The owners have changed (`version`): fetch the routing table, plan the request again, and send it."""
    LATER = 6
    """The bound on staleness does not admit the pull of a round yet: push the round before first."""
    PARTIAL = 7
    """Some batches of the round are applied, and others are not; nothing was done: train and push them one by one."""


class Flag(IntFlag):
    """Options of a request."""

    NONE = 0
    READ_ONLY = 1
    """PULL: the batch is not trained on, so the staleness bound does not hold it back."""
    ROUND = 2
    """The request is for a round: `batches` that the worker trains on rows of its own. Rows are weights and state."""


_READ_ONLY, _ROUND = Flag.READ_ONLY.value, Flag.ROUND.value  # a test of an enum takes seven times as long
_HEADER = struct.Struct("<IBBHQIIIQQQIII")
HEADER_BYTES = _HEADER.size


def counts_bytes(tables: int) -> int:
    """Returns the bytes of `counts` in a payload, including padding."""
    return (tables * 4 + 7) & ~7


class WireError(InvalidError):
    """The peer does not speak this protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    """The content of the first frame on a connection.

    `session` is the 64-bit session that the connection belongs to. `incarnation` is that of the intended server:
    another process may have taken over the address. `token` is the job's.
    """

    session: int
    incarnation: str
    token: str

    def pack(self) -> bytes:
        """Returns the payload of HELLO."""
        meant = self.incarnation.encode()
        return _HELLO.pack(self.session, len(meant)) + meant + self.token.encode()

    @classmethod
    def unpack(cls, payload: bytes) -> "Hello":
        """Parses the payload of HELLO. Raises WireError."""
        if len(payload) < _HELLO.size:
            raise WireError("HELLO ends before the session")
        session, length = _HELLO.unpack_from(payload)
        stop = _HELLO.size + length
        try:
            return cls(session, payload[_HELLO.size : stop].decode(), payload[stop:].decode())
        except UnicodeDecodeError as error:
            raise WireError("HELLO is not text") from error


class Header(NamedTuple):
    """The fixed part of a frame.

    `kind` is a Kind in requests and a Status in answers. `generation` and `version` are those of the routing table that
    the sender used. `epoch`, `batch`, `shard` and `token` name the batch and the lease as the ledger does; a round has
    `batches` batches from `batch` on. In the answer to a pull, `batches` is the most that the next round may have. The
    fields are in the order of the frame.
    """

    kind: int
    flags: int = 0
    generation: int = 0
    version: int = 0
    epoch: int = 0
    tables: int = 0
    batch: int = 0
    shard: int = 0
    token: int = 0
    payload_bytes: int = 0
    worker: int = 0
    batches: int = 1

    @property
    def is_read_only(self) -> bool:
        """Whether it has `Flag.READ_ONLY`."""
        return self.flags & _READ_ONLY != 0

    @property
    def is_round(self) -> bool:
        """Whether it has `Flag.ROUND`."""
        return self.flags & _ROUND != 0

    @property
    def numbers(self) -> range:
        """The numbers of the batches that the request is for."""
        return range(self.batch, self.batch + self.batches)

    def pack(self) -> bytes:
        """Returns the header as `HEADER_BYTES` bytes."""
        return _HEADER.pack(MAGIC, VERSION, *self)

    @classmethod
    def unpack(cls, buffer: bytes | bytearray | memoryview) -> "Header":
        """Parses the first `HEADER_BYTES` bytes. Raises WireError for another protocol or an absurd size."""
        fields = _HEADER.unpack_from(buffer)
        magic, wire_version = fields[:2]
        if magic != MAGIC:
            raise WireError("not a frame of Emberscale")
        if wire_version != VERSION:
            raise WireError(
                f"this process speaks version {VERSION} of the data plane, and the other side version {wire_version}: "
                "give parameter servers and workers one image"
            )
        header = cls._make(fields[2:])
        if header.payload_bytes > MAX_PAYLOAD_BYTES or header.tables > MAX_TABLES:
            raise WireError(f"frame of {header.payload_bytes} bytes for {header.tables} tables is beyond the limits")
        if not 1 <= header.batches <= MAX_ROUND:
            raise WireError(f"a round has 1 to {MAX_ROUND} batches, not {header.batches}")
        return header
