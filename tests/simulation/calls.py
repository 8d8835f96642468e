"""What is sent to a parameter server, and what it answers."""

from dataclasses import dataclass

from tests.simulation.units import Unit

from emberscale_api.wire import Header, Status


class CallError(Exception):
    """A call was answered with a gRPC status code."""

    def __init__(self, code: str, problem: str) -> None:
        super().__init__(f"{code}: {problem}")
        self.code = code


@dataclass(frozen=True)
class Request:
    """A frame of the data plane: the header, and the units of the request."""

    header: Header
    units: tuple[Unit, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The answer to a request; for a pull, also how many batches the next round may have."""

    status: Status
    round_limit: int = 1
