"""The conductor's channels to parameter servers: which it keeps, and which it closes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.jobmaster.small_job import TOKEN, job
from tests.jobmaster.test_runtime import KeepingStore

from emberscale_api.job.roles import MemberId, Role
from emberscale_api.routing import PsAddress
from emberscale_jobmaster import parameter_servers
from emberscale_jobmaster.conductor import Conductor
from emberscale_jobmaster.effects import CallServer, Effect, ResumeCall, SwitchCall
from emberscale_jobmaster.events import Exited, Registered
from emberscale_jobmaster.membership import Process
from emberscale_jobmaster.runtime import ClosingError, JobRuntime


class UnansweredCall:
    def add_done_callback(self, _: Callable[[Any], None]) -> None:
        pass


class FakeMethod:
    def future(self, _: Any, timeout: float) -> UnansweredCall:
        return UnansweredCall()


class FakeChannel:
    """A channel over which no answer comes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = False

    def unary_unary(self, *_: Any, **__: Any) -> FakeMethod:
        return FakeMethod()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> list[FakeChannel]:
    """All channels that the conductor has opened."""
    opened: list[FakeChannel] = []

    def open_channel(address: str, token: str, authority: bytes | None) -> FakeChannel:
        opened.append(FakeChannel(address))
        return opened[-1]

    monkeypatch.setattr(parameter_servers, "open_channel", open_channel)
    return opened


@pytest.fixture
def runtime() -> Iterator[JobRuntime]:
    runtime = JobRuntime(job(), "uid", KeepingStore(), on_deposed=lambda: None)
    runtime.take_over()
    runtime.start()
    yield runtime
    runtime.close()


def join(runtime: JobRuntime, index: int, incarnation: str) -> PsAddress:
    """A parameter server registers; each incarnation has an address of its own."""
    address = PsAddress(index, incarnation, f"tcp://{incarnation}:1", f"{incarnation}:2")
    process = Process(incarnation, address.data, address.control, "")
    runtime.handle(Registered(now=runtime.now(), member=MemberId(Role.PS, index, incarnation), process=process))
    return address


def carry_out(runtime: JobRuntime, effects: Iterator[Effect], monkeypatch: pytest.MonkeyPatch) -> None:
    """The conductor carries out these effects, and the master closes."""

    def next_effect() -> Effect:
        for effect in effects:
            return effect
        raise ClosingError

    monkeypatch.setattr(runtime, "next_effect", next_effect)
    Conductor(runtime, TOKEN).run()


def switch(server: PsAddress) -> CallServer:
    return CallServer(1, 1, server, SwitchCall(1, 1, 1, {}), 1.0)


def test_no_channel_stays_to_a_server_that_was_replaced(
    runtime: JobRuntime, channels: list[FakeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def replacing() -> Iterator[Effect]:
        stays = join(runtime, 0, "stays")
        for number in range(20):
            successor = join(runtime, 1, f"successor-{number}")
            yield switch(stays)
            yield switch(successor)
        opened.extend(channel.address for channel in channels if not channel.closed)

    carry_out(runtime, replacing(), monkeypatch)
    assert opened == ["stays:2", "successor-19:2"]
    assert len(channels) == 21
    assert all(channel.closed for channel in channels)


def test_a_channel_stays_until_the_end_of_a_server_is_known(
    runtime: JobRuntime, channels: list[FakeChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has given its rows away may still be told to give up a move."""
    opened: list[list[str]] = []

    def leaving() -> Iterator[Effect]:
        stays, leaves = join(runtime, 0, "stays"), join(runtime, 1, "leaves")
        yield CallServer(1, 1, leaves, ResumeCall(1, 1), 1.0)
        yield switch(stays)
        opened.append([channel.address for channel in channels if not channel.closed])
        member = MemberId(Role.PS, 1, "leaves")
        runtime.handle(Exited(now=runtime.now(), member=member, exit_code=0, reason="Completed"))
        yield switch(stays)
        opened.append([channel.address for channel in channels if not channel.closed])

    carry_out(runtime, leaving(), monkeypatch)
    assert opened == [["leaves:2", "stays:2"], ["stays:2"]]
