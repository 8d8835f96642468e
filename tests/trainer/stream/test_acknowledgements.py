"""Who takes the acknowledgements of a row stream: whoever waits for one, or else a thread of the stream."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.stream import NO_RECORDS, Item, ItemKind, StreamLostError, StreamSender
from emberscale_trainer.stream import sender as sender_module
from emberscale_trainer.stream.opening import next_position
from emberscale_trainer.transport import Connection, accept_connection, listen
from eventually import eventually
from waiting import wait_at

SECONDS = 60.0
ITEM = Item(ItemKind.ROWS, 0, NO_RECORDS, np.arange(3))


class Peer:
    """A receiver that acknowledges when the test says so."""

    def __init__(self, held: ExitStack, tmp_path: Path) -> None:
        self._held = held
        self._received = 0
        self._listener, self.address = listen(f"unix://{tmp_path}/ps.sock")
        self._listener.settimeout(SECONDS)
        held.callback(self._listener.close)

    def accept(self, stands_at: int = 0) -> None:
        """Accepts the stream's next connection."""
        stream, _ = self._listener.accept()
        self.connection = accept_connection(stream, None)
        self._held.callback(self.connection.close)
        for answer in (Header(Status.OK), Header(Status.OK, batch=stands_at)):
            self.connection.receive()
            self.connection.send(answer)

    def receive(self) -> int:
        """Returns the number of the next item."""
        header, _ = self.connection.receive()
        assert header.kind == Kind.ITEM
        return header.batch

    def acknowledge(self, number: int) -> None:
        """Acknowledges an item once it is here."""
        while self._received < number:
            self._received = self.receive()
        self.connection.send(Header(Status.OK, batch=number))

    def refuse(self) -> None:
        self.connection.send(Header(Status.REFUSED, payload_bytes=3), [b"bad"])


class Watch:
    """Notes which threads take acknowledgements. `engaged`: one begins to, or to wait for another that does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.takers: list[str] = []
        self.engaged = threading.Event()
        take, wait = next_position, threading.Condition.wait

        def noted_take(connection: Connection, seconds: float | None) -> int:
            self.takers.append(threading.current_thread().name.partition("_")[0])
            self.engaged.set()
            return take(connection, seconds)

        def noted_wait(condition: threading.Condition, seconds: float | None = None) -> bool:
            if threading.current_thread().name.startswith("waiter"):
                self.engaged.set()
            return wait(condition, seconds)

        monkeypatch.setattr(sender_module, "next_position", noted_take)
        monkeypatch.setattr(threading.Condition, "wait", noted_wait)


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr(sender_module, "_ATTENDED_SECONDS", SECONDS)
    return Watch(monkeypatch)


@pytest.fixture
def peer(held: ExitStack, tmp_path: Path) -> Peer:
    return Peer(held, tmp_path)


@pytest.fixture
def waiters() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4, "waiter") as threads:
        yield threads


@pytest.fixture
def sender(peer: Peer, waiters: ThreadPoolExecutor, watch: Watch) -> Iterator[StreamSender]:
    """A connected stream, of which an item is acknowledged: a caller has waited for it."""
    sender = StreamSender(peer.address, "i", "secret", 7, 1, window_bytes=3 * ITEM.nbytes)
    reaching = waiters.submit(sender.reach, sender.put(ITEM, SECONDS, now=False), SECONDS)
    assert watch.engaged.wait(SECONDS)
    peer.accept()
    peer.acknowledge(1)
    reaching.result(SECONDS)
    watch.takers.clear()
    yield sender
    sender.close()


Reach = Callable[..., "Future[None]"]


@pytest.fixture
def reach(sender: StreamSender, waiters: ThreadPoolExecutor, watch: Watch) -> Reach:
    """Has a thread wait for an item; returns once it takes acknowledgements, or waits for another that does."""

    def begin(number: int, seconds: float = SECONDS) -> "Future[None]":
        watch.engaged.clear()
        reaching = waiters.submit(sender.reach, number, seconds)
        assert watch.engaged.wait(SECONDS)
        return reaching

    return begin


def queue(sender: StreamSender, count: int) -> None:
    for _ in range(count):
        sender.put(ITEM, SECONDS, now=False)


def acknowledged(sender: StreamSender, number: int) -> None:
    """Waits until an acknowledgement is taken, and takes none."""
    wait_at(sender._changed, lambda: sender.acknowledged_count >= number)


def test_whoever_waits_takes_what_comes(sender: StreamSender, peer: Peer, reach: Reach, watch: Watch) -> None:
    queue(sender, 2)
    reaching = reach(3)
    peer.acknowledge(2)
    acknowledged(sender, 2)
    assert not reaching.done()
    peer.acknowledge(3)
    reaching.result(SECONDS)
    assert set(watch.takers) == {"waiter"}


def test_who_needs_more_goes_on_when_another_has_what_it_needs(sender: StreamSender, peer: Peer, reach: Reach) -> None:
    queue(sender, 2)
    first, second = reach(2), reach(3)
    peer.acknowledge(2)
    first.result(SECONDS)
    assert not second.done()
    peer.acknowledge(3)
    second.result(SECONDS)


def test_who_needs_less_is_released_while_another_takes(sender: StreamSender, peer: Peer, reach: Reach) -> None:
    queue(sender, 2)
    second, first = reach(3), reach(2)
    peer.acknowledge(2)
    first.result(SECONDS)
    assert not second.done()
    peer.acknowledge(3)
    second.result(SECONDS)


def test_another_goes_on_when_the_time_of_the_one_that_takes_is_over(
    sender: StreamSender, peer: Peer, reach: Reach
) -> None:
    queue(sender, 1)
    hasty, patient = reach(2, 0.5), reach(2)
    with pytest.raises(TimeoutError, match="no acknowledgements within"):
        hasty.result(SECONDS)
    assert not patient.done()
    peer.acknowledge(2)
    patient.result(SECONDS)


def test_the_time_of_one_that_waits_for_another_is_over(sender: StreamSender, peer: Peer, reach: Reach) -> None:
    queue(sender, 1)
    patient, hasty = reach(2), reach(2, 0.1)
    with pytest.raises(TimeoutError, match="no acknowledgements within"):
        hasty.result(SECONDS)
    peer.acknowledge(2)
    patient.result(SECONDS)


def test_the_time_of_one_that_waits_for_the_streams_thread_is_over(
    sender: StreamSender, peer: Peer, reach: Reach, watch: Watch
) -> None:
    sender.put(ITEM, SECONDS)
    eventually(lambda: sender._is_taking, "the thread takes what comes")
    with pytest.raises(TimeoutError, match="no acknowledgements within"):
        reach(2, 0.1).result(SECONDS)
    peer.acknowledge(2)
    acknowledged(sender, 2)
    assert "waiter" not in watch.takers


def test_whoever_waits_for_room_takes_what_comes(sender: StreamSender, peer: Peer, watch: Watch) -> None:
    queue(sender, 3)
    sender.send_queued()
    peer.acknowledge(2)
    assert sender.put(ITEM, SECONDS, now=False) == 5
    assert watch.takers == [threading.current_thread().name]


@pytest.mark.parametrize(("is_refused", "problem"), [(False, "closed"), (True, "bad")], ids=["closed", "refused"])
def test_the_end_of_a_stream_releases_whoever_waits(
    sender: StreamSender, peer: Peer, reach: Reach, is_refused: bool, problem: str
) -> None:
    queue(sender, 2)
    reaching = [reach(2), reach(3)]
    if is_refused:
        peer.refuse()
    else:
        sender.close()
    for one in reaching:
        with pytest.raises(StreamLostError, match=problem):
            one.result(SECONDS)


def test_whoever_waits_goes_on_with_the_next_connection(sender: StreamSender, peer: Peer, reach: Reach) -> None:
    queue(sender, 2)
    reaching = [reach(2), reach(3)]
    assert peer.receive() == 2
    peer.connection.close()
    peer.accept(stands_at=1)
    peer.acknowledge(2)
    reaching[0].result(SECONDS)
    peer.acknowledge(3)
    reaching[1].result(SECONDS)


def test_the_stream_connects_again_though_nobody_waits(sender: StreamSender, peer: Peer) -> None:
    queue(sender, 1)
    peer.connection.close()
    sender.send_queued()
    peer.accept(stands_at=1)
    assert peer.receive() == 2


def test_a_refusal_that_nobody_took_counts_when_the_next_item_cannot_be_sent(sender: StreamSender, peer: Peer) -> None:
    """An item may have been taken in part, and must not be sent again."""
    queue(sender, 1)
    sender.send_queued()
    assert peer.receive() == 2
    peer.refuse()
    peer.connection.close()
    queue(sender, 1)
    with pytest.raises(StreamLostError, match="bad"):
        sender.reach(3, SECONDS)


@pytest.mark.parametrize("asks", ["put", "wake"])
def test_the_streams_thread_takes_the_acknowledgements_of_what_it_sends(
    sender: StreamSender, peer: Peer, watch: Watch, asks: str
) -> None:
    if asks == "put":
        sender.put(ITEM, SECONDS)
    else:
        queue(sender, 1)
        sender.wake()
    peer.acknowledge(2)
    acknowledged(sender, 2)
    assert watch.takers


def test_the_streams_thread_takes_what_nobody_has_waited_for_in_a_while(
    sender: StreamSender, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "_ATTENDED_SECONDS", 0.1)
    with sender._lock:
        sender._to_take.notify()  # it has yet to wait for as long as before
    queue(sender, 1)
    sender.send_queued()
    peer.acknowledge(2)
    acknowledged(sender, 2)
