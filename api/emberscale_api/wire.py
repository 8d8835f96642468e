"""The data plane: frames between a worker and a parameter server, over TCP or a Unix socket.

A frame is a fixed little-endian header and a payload of raw numpy buffers; requests on one connection are answered in
order. A pull's payload is `counts: uint32[tables]`, padded to a multiple of 8 bytes, then `keys: int64[sum(counts)]`,
table by table. Its answer is the rows' weights, `float32`, in the order of the keys, then the server's slice of the
dense vector if it was asked for. A push's payload is a pull's, followed by the gradients in the layout of a pull's
answer.

The staleness of gradients is bounded by server 0 alone. A worker that wants to pull a batch for training first asks it
with ADMIT, which is answered when the bound allows the pull; then it pulls from all servers at once. It pushes to
server 0 first, which answers when the bound allows the push, then to the others; when all have answered it tells server
0 with COMPLETE, which is not answered. ADMIT and COMPLETE have no payload.

A worker keeps two connections to each server, one for pulls and one for pushes, so that a pull which is held back never
stands in the way of the push that it waits for.

The first frame on a connection is HELLO; its payload is the job's token. A frame that is malformed ends the connection.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

MAGIC = 0x4D424D45
VERSION = 1
MAX_PAYLOAD_BYTES = 1 << 30
MAX_TABLES = 1 << 16


class Kind(IntEnum):
    """What a request asks for."""

    HELLO = 1
    PULL = 2
    PUSH = 3
    ADMIT = 4
    COMPLETE = 5


class Status(IntEnum):
    """What an answer says."""

    OK = 0
    REPEATED = 1
    """The batch is applied already; nothing was done."""
    REFRESH = 2
    """The routing epoch is not this server's: fetch the routing table and the lease again."""
    FENCED = 3
    """A newer lease of this shard exists: drop it."""
    REFUSED = 4
    """The request makes no sense here; the payload is a UTF-8 reason."""


class Flag(IntFlag):
    """Options of a request."""

    NONE = 0
    DENSE = 1
    """The payload or the answer carries the server's dense slice too."""
    READ_ONLY = 2
    """PULL: the batch is not trained on, so the staleness bound does not admit it first."""


_HEADER = struct.Struct("<IBBHQQIIQQII")
HEADER_BYTES = _HEADER.size


def counts_bytes(tables: int) -> int:
    """Bytes that `counts` takes in a payload, its padding included."""
    return (tables * 4 + 7) & ~7


class WireError(Exception):
    """The other side speaks something else."""


@dataclass(frozen=True, slots=True)
class Header:
    """The fixed part of a frame.

    `kind` is a Kind in requests and a Status in answers. `epoch`, `batch`, `shard` and `token` name the batch as the
    ledger does; `routing_epoch` is that of the routing table that the sender used.
    """

    kind: int
    flags: int = 0
    routing_epoch: int = 0
    batch: int = 0
    epoch: int = 0
    tables: int = 0
    shard: int = 0
    token: int = 0
    payload_bytes: int = 0
    worker: int = 0

    def pack(self) -> bytes:
        """The header as `HEADER_BYTES` bytes."""
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.flags,
            self.routing_epoch,
            self.batch,
            self.epoch,
            self.tables,
            self.shard,
            self.token,
            self.payload_bytes,
            self.worker,
        )

    @classmethod
    def unpack(cls, buffer: bytes | bytearray | memoryview) -> "Header":
        """The header in the first `HEADER_BYTES` bytes. Raises WireError for another protocol or an absurd size."""
        (magic, version, kind, flags, routing_epoch, batch, epoch, tables, shard, token, payload, worker) = (
            _HEADER.unpack_from(buffer)
        )
        if magic != MAGIC:
            raise WireError("not a frame of Emberscale")
        if version != VERSION:
            raise WireError(
                f"this process speaks version {VERSION} of the data plane, and the other side version {version}: give "
                "parameter servers and workers one image"
            )
        if payload > MAX_PAYLOAD_BYTES or tables > MAX_TABLES:
            raise WireError(f"frame of {payload} bytes for {tables} tables is beyond the limits")
        return cls(kind, flags, routing_epoch, batch, epoch, tables, shard, token, payload, worker)
