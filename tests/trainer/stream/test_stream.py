"""Row streams over real sockets, through a proxy that breaks connections."""

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from certificates import certificates
from emberscale_api.wire import Header, Kind, Status
from emberscale_trainer.server.dataplane import DataPlane
from emberscale_trainer.server.state import ServerState
from emberscale_trainer.stream import Item, ItemKind, StreamLostError, StreamReceivers, StreamSender
from emberscale_trainer.stream import opening as opening_module
from emberscale_trainer.stream import sender as sender_module
from emberscale_trainer.stream.receiver import Deliver
from emberscale_trainer.transport import (
    Buffer,
    Connection,
    ConnectionLostError,
    accept_connection,
    listen,
    open_connection,
)
from eventually import unwrap

SECONDS = 60.0
STRIDE = 24


def item(number: int, rows: int = 50) -> Item:
    """Makes the item of this number; content and kind vary with the number."""
    random = np.random.default_rng(number)
    return Item(
        kind=ItemKind(1 + number % 3),
        table=number % 5,
        records=random.integers(0, 256, (rows, STRIDE), np.uint8),
        keys=random.integers(-(2**62), 2**62, number % 7),
        epoch=number % 4,
        batch=number * 2**33,
    )


def same(one: Item, other: Item) -> bool:
    return (
        (one.kind, one.table, one.epoch, one.batch) == (other.kind, other.table, other.epoch, other.batch)
        and np.array_equal(one.records, other.records)
        and np.array_equal(one.keys, other.keys)
    )


def deliver(sender: StreamSender, sent: Item) -> None:
    """Puts an item and waits until the receiver has dealt with it. The stream may end in either step."""
    sender.put(sent, SECONDS)
    sender.flush(SECONDS)


class Received:
    """The items that a server has taken from streams of generation 1. `stopped`: one waits for the `gate`.

    `over`: why it takes no more streams.
    """

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.changed = threading.Condition()
        self.gate, self.stopped = threading.Event(), threading.Event()
        self.gate.set()
        self.over = ""

    def accept(self, stream: int, generation: int) -> Deliver:
        if generation != 1:
            raise StreamLostError("generation 1 is served")
        if self.over:
            raise StreamLostError(self.over)
        return self.deliver

    def until(self, count: int) -> None:
        """Waits until so many items have come."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.items) >= count, SECONDS)

    def deliver(self, arrived: Item) -> None:
        if not self.gate.is_set():
            self.stopped.set()
        assert self.gate.wait(SECONDS)
        if arrived.table == 99:
            raise ValueError("there is no table 99")
        records, keys = arrived.records.copy(), arrived.keys.copy()
        with self.changed:
            self.items.append(Item(arrived.kind, arrived.table, records, keys, arrived.epoch, arrived.batch))
            self.changed.notify_all()


@pytest.fixture
def held() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
def address(received: Received, held: ExitStack, tmp_path: Path) -> str:
    listener, address = listen(f"unix://{tmp_path}/ps.sock")
    held.callback(listener.close)
    DataPlane(listener, ServerState(), "secret", "i", streams=StreamReceivers(received.accept)).start()
    return address


Send = Callable[..., StreamSender]


@pytest.fixture
def send(held: ExitStack) -> Send:
    def begin(
        address: str,
        stream: int = 7,
        generation: int = 1,
        token: str = "secret",
        incarnation: str = "i",
        **options: int,
    ) -> StreamSender:
        sender = StreamSender(address, incarnation, token, stream, generation, **options)  # type: ignore[arg-type]  # window_bytes
        held.callback(sender.close)
        return sender

    return begin


def test_items_of_all_kinds_arrive_in_order(received: Received, address: str, send: Send) -> None:
    sender = send(address)
    for number in range(100):
        sender.put(item(number), SECONDS)
    sender.flush(SECONDS)
    assert len(received.items) == 100
    assert all(same(arrived, item(number)) for number, arrived in enumerate(received.items))


class BreakingMiddle:
    """A proxy that passes bytes on, and breaks each connection after a number of them."""

    def __init__(self, target: str, held: ExitStack, tmp_path: Path, limits: Iterator[int]) -> None:
        self.listener, self.address = listen(f"unix://{tmp_path}/middle.sock")
        self.broken = 0
        self._target, self._limits = target.removeprefix("unix://"), limits
        self._threads = held.enter_context(ThreadPoolExecutor(64))
        held.callback(self._stop)
        threading.Thread(target=self._accept, daemon=True).start()

    def _stop(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                inner, _ = self.listener.accept()
                outer = socket.socket(socket.AF_UNIX)
                outer.connect(self._target)
                limit = next(self._limits)
                for source, sink in ((inner, outer), (outer, inner)):
                    threading.Thread(target=self._relay, args=(source, sink, limit), daemon=True).start()

    def _relay(self, source: socket.socket, sink: socket.socket, limit: int) -> None:
        passed = 0
        with suppress(OSError):
            while passed < limit and (data := source.recv(min(4096, limit - passed))):
                sink.sendall(data)
                passed += len(data)
            self.broken += passed >= limit
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_outlives_its_connections_and_delivers_each_item_once(
    received: Received, address: str, send: Send, held: ExitStack, tmp_path: Path, seed: int
) -> None:
    random = np.random.default_rng(seed)
    limits = iter([int(random.integers(1, 60_000)) for _ in range(15)] + [1 << 40] * 1000)
    middle = BreakingMiddle(address, held, tmp_path, limits)
    sender = send(middle.address, window_bytes=8192)
    for number in range(300):
        sender.put(item(number), SECONDS)
    sender.flush(SECONDS)
    assert middle.broken >= 5
    assert len(received.items) == 300
    assert all(same(arrived, item(number)) for number, arrived in enumerate(received.items))


@pytest.mark.parametrize("breaks", [False, True])
def test_whoever_waits_for_items_sends_them(
    received: Received, address: str, send: Send, held: ExitStack, tmp_path: Path, breaks: bool
) -> None:
    limits = iter([20_000] * 10 * breaks + [1 << 40] * 1000)
    middle = BreakingMiddle(address, held, tmp_path, limits)
    sender, putting, numbers = send(middle.address), threading.Lock(), iter(range(400))

    def push() -> None:
        while True:
            with putting:
                number = next(numbers, None)
                if number is None:
                    return
                count = sender.put(item(number), SECONDS, now=False)
            sender.send_queued()
            sender.reach(count, SECONDS)

    with ThreadPoolExecutor(4) as threads:
        for pushing in [threads.submit(push) for _ in range(4)]:
            pushing.result(SECONDS)
    assert (middle.broken >= 5) is breaks
    assert len(received.items) == 400
    assert all(same(one, item(number)) for number, one in enumerate(received.items))


def test_an_item_that_nobody_waits_for_is_sent_with_the_next(received: Received, address: str, send: Send) -> None:
    sender = send(address)
    deliver(sender, item(0))
    sender.put(item(1), SECONDS, now=False)
    deliver(sender, item(2))
    assert [one.batch for one in received.items] == [item(number).batch for number in range(3)]


def test_an_item_that_nobody_waits_for_is_sent_when_asked_to(received: Received, address: str, send: Send) -> None:
    sender = send(address)
    deliver(sender, item(0))
    received.gate.clear()
    sender.put(item(1), SECONDS, now=False)
    assert sender.waiting_seconds == 0
    sender.wake()
    assert received.stopped.wait(SECONDS)
    assert sender.waiting_seconds > 0
    received.gate.set()
    sender.flush(SECONDS)
    assert sender.waiting_seconds == 0
    assert len(received.items) == 2


def test_whoever_waits_for_an_item_does_not_send_those_of_others_for_ever(
    received: Received, address: str, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, others, mine, send_frame = send(address), iter(range(1, 500)), [], Connection.send
    deliver(sender, item(0))

    def another_is_put_meanwhile(connection: Connection, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        send_frame(connection, header, buffers)
        if header.kind == Kind.ITEM and (number := next(others, None)) is not None:
            sender.put(item(number), SECONDS, now=False)
            mine.append(threading.current_thread() is threading.main_thread())

    monkeypatch.setattr(Connection, "send", another_is_put_meanwhile)
    sender.put(item(0), SECONDS, now=False)
    sender.send_queued()
    assert sum(mine) < 100
    received.until(501)


def test_an_item_that_there_was_no_memory_to_send_is_sent_again(
    received: Received, address: str, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, send_frame, failures = send(address), Connection.send, iter([True, True])
    deliver(sender, item(0))

    def without_memory(connection: Connection, header: Header, buffers: Sequence[Buffer] = ()) -> None:
        if header.kind == Kind.ITEM and next(failures, False):
            raise MemoryError("cannot allocate")
        send_frame(connection, header, buffers)

    monkeypatch.setattr(Connection, "send", without_memory)
    sender.put(item(1), SECONDS, now=False)
    sender.flush(SECONDS)
    assert [one.batch for one in received.items] == [item(number).batch for number in range(2)]


def test_an_acknowledgement_that_there_was_no_memory_to_receive_comes_with_the_next_connection(
    received: Received, address: str, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, refused = opening_module.next_position, threading.Event()

    def without_memory_once(connection: Connection, seconds: float | None) -> int:
        if not refused.is_set():
            refused.set()
            raise MemoryError
        return answer(connection, seconds)

    monkeypatch.setattr(sender_module, "next_position", without_memory_once)
    deliver(send(address), item(0))
    assert refused.is_set()
    assert len(received.items) == 1


def test_a_receiver_that_is_slow_holds_the_sender_and_not_the_memory(
    received: Received, address: str, send: Send
) -> None:
    received.gate.clear()
    sender = send(address, window_bytes=3 * item(0).nbytes)
    for number in (0, 0, 0):
        sender.put(item(number), SECONDS)
    with pytest.raises(TimeoutError, match="no room"):
        sender.put(item(0), 0.1)
    with pytest.raises(TimeoutError, match="no acknowledgements"):
        sender.flush(0.1)
    received.gate.set()
    sender.put(item(0), SECONDS)
    sender.flush(SECONDS)
    assert len(received.items) == 4


def test_a_server_that_is_not_there_yet_is_waited_for(
    received: Received, send: Send, held: ExitStack, tmp_path: Path
) -> None:
    sender = send(f"unix://{tmp_path}/later.sock")
    sender.put(item(0), SECONDS)
    listener, _ = listen(f"unix://{tmp_path}/later.sock")
    held.callback(listener.close)
    DataPlane(listener, ServerState(), "secret", "i", streams=StreamReceivers(received.accept)).start()
    sender.flush(SECONDS)
    assert len(received.items) == 1


def test_a_server_that_takes_a_connection_and_answers_nothing_is_tried_again(
    received: Received, send: Send, held: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel accepts connections for a stopped process."""
    monkeypatch.setattr(opening_module, "_CONNECT_SECONDS", 0.2)
    listener, address = listen(f"unix://{tmp_path}/stopped.sock")
    held.callback(listener.close)
    sender = send(address)
    sender.put(item(0), SECONDS)
    silent, _ = listener.accept()
    held.callback(silent.close)
    DataPlane(listener, ServerState(), "secret", "i", streams=StreamReceivers(received.accept)).start()
    sender.flush(20.0)
    assert len(received.items) == 1


def test_a_stream_for_which_there_is_no_thread_is_tried_again(
    received: Received, address: str, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def no_thread_once(thread: threading.Thread) -> None:
        if "_take_acknowledgements" in thread.name and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", no_thread_once)
    deliver(send(address), item(0))
    assert refused.is_set()
    assert len(received.items) == 1


class Refusal:
    """Refuses connections while it is set, and counts the attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.attempts = 0
        self.attempted = threading.Condition()
        self.refuses = True
        self.opened: list[Connection] = []
        self._open = open_connection
        monkeypatch.setattr(opening_module, "open_connection", self.open)
        monkeypatch.setattr(sender_module, "_FIRST_PAUSE", 0.001)
        monkeypatch.setattr(sender_module, "_LONGEST_PAUSE", 0.002)

    def open(self, address: str, context: ssl.SSLContext | None, seconds: float) -> Connection:
        with self.attempted:
            self.attempts += 1
            self.attempted.notify_all()
        if self.refuses:
            raise ConnectionLostError("connection refused")
        self.opened.append(self._open(address, context, seconds))
        return self.opened[-1]

    def until(self, attempts: int) -> None:
        """Waits for so many attempts; all before the last have then been logged."""
        with self.attempted:
            assert self.attempted.wait_for(lambda: self.attempts >= attempts, SECONDS)


def told(logs: list[MutableMapping[str, Any]]) -> list[int]:
    """The numbers of attempts that are logged."""
    return [entry["attempts"] for entry in logs if entry["event"] == "stream_broke"]


def test_a_server_that_refuses_all_connections_is_logged_ever_less(
    address: str, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal(monkeypatch)
    with capture_logs() as logs:
        sender = send(address)
        refusal.until(129)
        sender.close()
    assert told(logs)[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert len(told(logs)) <= refusal.attempts.bit_length()


def test_a_stream_that_breaks_again_after_it_got_on_is_logged_at_once(
    received: Received, address: str, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal(monkeypatch)
    with capture_logs() as logs:
        sender = send(address)
        refusal.until(5)
        refusal.refuses = False
        deliver(sender, item(0))
        before, attempts = len(told(logs)), refusal.attempts
        refusal.refuses = True
        refusal.opened[-1].hang_up()
        refusal.until(attempts + 2)
        sender.close()
    assert told(logs)[before] == 1


def test_the_log_of_a_refused_stream_blames_no_worker(address: str, send: Send) -> None:
    with capture_logs() as logs, pytest.raises(StreamLostError, match="generation 1 is served"):
        deliver(send(address, generation=2), item(0))
    [told] = [entry for entry in logs if "refused" in entry["event"]]
    assert (told["event"], told["problem"]) == ("stream_refused", "generation 1 is served")
    assert "member" not in told


@pytest.mark.parametrize("answers", [0, 1], ids=["HELLO", "OPEN"])
def test_a_stream_that_waits_for_an_answer_ends_when_it_is_closed(
    answers: int, send: Send, held: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening_module, "_CONNECT_SECONDS", SECONDS)
    listener, address = listen(f"unix://{tmp_path}/stopped.sock")
    held.callback(listener.close)
    sender = send(address)
    stream, _ = listener.accept()
    connection = accept_connection(stream, None)
    held.callback(connection.close)
    stream.settimeout(10.0)
    for _ in range(answers):
        connection.receive()
        connection.send(Header(Status.OK))
    connection.receive()
    sender.close()
    with pytest.raises(ConnectionLostError, match="closed the connection"):
        connection.receive()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"generation": 2}, "generation 1 is served"),
        ({"token": "guess"}, "token"),
        ({"incarnation": "before"}, "status 2"),
    ],
    ids=["generation", "token", "incarnation"],
)
def test_a_stream_that_is_not_wanted_ends(address: str, send: Send, options: dict[str, object], reason: str) -> None:
    sender = send(address, **options)
    with pytest.raises(StreamLostError, match=reason):
        deliver(sender, item(0))
    with pytest.raises(StreamLostError):
        sender.put(item(0), SECONDS)


def test_a_stream_that_is_no_longer_wanted_learns_what_was_processed_before_that(
    received: Received, address: str, send: Send
) -> None:
    """Its last acknowledgement was lost with the connection."""
    sender = send(address)
    received.gate.clear()
    sender.put(item(0), SECONDS)
    assert received.stopped.wait(SECONDS)
    received.over = "the group is over"
    unwrap(sender._connection).hang_up()
    received.gate.set()
    sender.flush(SECONDS)
    with pytest.raises(StreamLostError, match="the group is over"):
        deliver(sender, item(1))
    assert len(received.items) == 1


def test_an_item_that_the_receiver_refuses_ends_the_stream(received: Received, address: str, send: Send) -> None:
    sender = send(address)
    good, bad = item(1), item(2)
    sender.put(good, SECONDS)
    sender.put(Item(bad.kind, 99, bad.records), SECONDS)
    with pytest.raises(StreamLostError, match="no table 99"):
        sender.flush(SECONDS)
    assert len(received.items) == 1


def test_a_server_expects_no_stream_unless_it_is_told_to(send: Send, held: ExitStack, tmp_path: Path) -> None:
    listener, address = listen(f"unix://{tmp_path}/ps.sock")
    held.callback(listener.close)
    DataPlane(listener, ServerState(), "secret", "i").start()
    sender = send(address)
    with pytest.raises(StreamLostError, match="not expected"):
        deliver(sender, item(0))


def test_a_stream_travels_over_tls(received: Received, held: ExitStack, tmp_path: Path) -> None:
    ours = certificates(tmp_path / "ours")
    listener, address = listen("tcp://127.0.0.1:0")
    held.callback(listener.close)
    streams = StreamReceivers(received.accept)
    DataPlane(listener, ServerState(), "secret", "i", ours.server_context, streams).start()
    sender = StreamSender(address, "i", "secret", 7, 1, ours.client_context)
    held.callback(sender.close)
    for number in range(20):
        sender.put(item(number, rows=2000), SECONDS)
    sender.flush(SECONDS)
    assert all(same(arrived, item(number, rows=2000)) for number, arrived in enumerate(received.items))


@pytest.mark.parametrize("size", [0, 31, 33, 40])
def test_bytes_that_are_no_item_are_refused(size: int) -> None:
    payload = np.ones(size, dtype=np.uint8)
    with pytest.raises(ValueError, match=r"item|ItemKind"):
        Item.parse(payload)
