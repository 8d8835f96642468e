"""One connection to a parameter server, which a test drives frame by frame."""

import numpy as np
from numpy.typing import NDArray

from emberscale_api.wire import Flag, Header, Hello, Kind, Status, counts_bytes
from emberscale_trainer.transport import Buffer, open_connection


class WireClient:
    """A worker's connection, after HELLO."""

    def __init__(
        self, address: str, token: str = "secret", session: int = 1, generation: int = 1, incarnation: str = "i"
    ) -> None:
        self.connection = open_connection(address, None, 20)
        self._generation = generation
        hello = Hello(session, incarnation, token).pack()
        self.connection.send(Header(Kind.HELLO, payload_bytes=len(hello)), [hello])
        status, reason = self._answer()
        if status is not Status.OK:
            raise PermissionError(reason)

    def close(self) -> None:
        self.connection.close()

    def admit(self, batch: int, token: int = 1, shard: int = 0, tables: int = 3) -> Status:
        """Returns the status of the answer to a pull for training, without keys."""
        self._send(Kind.PULL, batch, token, shard, 1, [[]] * tables)
        return self._answer()[0]

    def complete(self, batch: int, token: int = 1, shard: int = 0) -> None:
        """Sends COMPLETE, which has no answer."""
        self._send(Kind.COMPLETE, batch, token, shard, 1, [])

    def pull(self, keys: list[list[int]], version: int = 1) -> tuple[Status, NDArray[np.float32]]:
        """Returns status and weights of the answer to a pull for evaluation, with keys by table."""
        self._send(Kind.PULL, 0, 0, 0, version, keys, flags=Flag.READ_ONLY)
        status, payload = self._answer()
        return status, np.frombuffer(payload, np.float32) if status is Status.OK else np.empty(0, np.float32)

    def push(
        self,
        batch: int,
        keys: list[list[int]],
        gradients: NDArray[np.float32],
        token: int = 1,
        shard: int = 0,
        version: int = 1,
    ) -> Status:
        """Returns the status of the answer to a push. Raises ValueError with the reason if it is REFUSED."""
        self._send(Kind.PUSH, batch, token, shard, version, keys, gradients)
        status, reason = self._answer()
        if status is Status.REFUSED:
            raise ValueError(reason.decode())
        return status

    def _send(
        self,
        kind: Kind,
        batch: int,
        token: int,
        shard: int,
        version: int,
        keys: list[list[int]],
        *values: NDArray[np.float32],
        flags: Flag = Flag.NONE,
    ) -> None:
        counts = np.array([len(table) for table in keys], np.uint32)
        named = np.array([key for table in keys for key in table], np.int64)
        padding = bytes(counts_bytes(len(counts)) - counts.nbytes)
        buffers: list[Buffer] = [counts, padding, named, *values]
        size = len(padding) + counts.nbytes + named.nbytes + sum(array.nbytes for array in values)
        header = Header(
            kind,
            flags=flags,
            generation=self._generation,
            version=version,
            tables=len(keys),
            batch=batch,
            shard=shard,
            token=token,
            payload_bytes=size,
        )
        self.connection.send(header, buffers)

    def _answer(self) -> tuple[Status, bytes]:
        header, payload = self.connection.receive()
        return Status(header.kind), payload.tobytes()
