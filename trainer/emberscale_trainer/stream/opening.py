"""What a sender says to open a connection of a row stream, and the receiver's answers."""

import ssl
from dataclasses import dataclass

from emberscale_api.wire import MAX_HELLO_BYTES, Header, Hello, Kind, Status
from emberscale_trainer.stream.core import StreamLostError
from emberscale_trainer.transport import Connection, open_connection

_CONNECT_SECONDS = 5.0
"""For each step until the receiver has answered HELLO: the kernel takes connections for one that is stopped, too."""


@dataclass(frozen=True)
class Receiver:
    """The receiving end of a stream, as `StreamSender` has it."""

    address: str
    incarnation: str
    token: str
    stream: int
    generation: int
    context: ssl.SSLContext | None

    def connect(self) -> Connection:
        """Returns a connection that is to be opened. Raises OSError."""
        return open_connection(self.address, self.context, _CONNECT_SECONDS)

    def open(self, connection: Connection) -> int:
        """Says HELLO and names the stream; returns the receiver's position. Raises as `next_position` does.

        The answer may take a while: the receiver may still be handling an item of an earlier connection.
        """
        hello = Hello(self.stream, self.incarnation, self.token).pack()
        connection.send(Header(Kind.HELLO, payload_bytes=len(hello)), [hello])
        answer, reason = connection.receive_first(MAX_HELLO_BYTES, _CONNECT_SECONDS)
        if answer.kind != Status.OK:
            raise _refusal(answer, reason)
        connection.trust()
        connection.send(Header(Kind.OPEN, generation=self.generation, shard=self.stream))
        return next_position(connection)


def next_position(connection: Connection, seconds: float | None = None) -> int:
    """Returns the position that the receiver answers next, or 0 if no answer comes within this time.

    Raises StreamLostError with the reason of a refusal, and what `Connection.receive` does.
    """
    if not connection.await_frame(seconds):
        return 0
    answer, reason = connection.receive()
    if answer.kind != Status.OK:
        raise _refusal(answer, reason.tobytes())
    return answer.batch


def _refusal(answer: Header, reason: bytes) -> StreamLostError:
    problem = reason.decode(errors="replace") or f"status {answer.kind}"
    return StreamLostError(f"the receiver refuses the stream: {problem}")
