"""Both ends of a row stream under connections that break at any point, by random interleavings."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from emberscale_trainer.stream.core import ReceiveOrder, SendWindow, StreamLostError
from examples import examples

MOST_BYTES = 10


class Link:
    """A connection: the messages under way in both directions, in order. If it breaks, they are lost."""

    def __init__(self, name: int) -> None:
        self.name = name
        self.items: list[tuple[int, str]] = []
        self.acknowledgements: list[int] = []


class Streams(RuleBasedStateMachine):
    """A sender and a receiver. Items of a connection that the sender gave up may still arrive late."""

    def __init__(self) -> None:
        super().__init__()
        self.sender: SendWindow[str] = SendWindow(MOST_BYTES)
        self.receiver = ReceiveOrder()
        self.put: list[str] = []
        self.sizes: list[int] = []
        self.delivered: list[str] = []
        self.link: Link | None = None
        self.given_up: list[Link] = []

    @rule(size=st.integers(1, 14))
    def put_an_item(self, size: int) -> None:
        payload = f"item {len(self.put)}"
        if self.sender.has_room(size):
            assert self.sender.put(payload, size) == len(self.put) + 1
            self.put.append(payload)
            self.sizes.append(size)
        else:
            with pytest.raises(ValueError, match="does not fit"):
                self.sender.put(payload, size)

    @rule(late=st.booleans())
    def connect(self, late: bool) -> None:
        if self.link is not None and late:
            self.given_up.append(self.link)
        self.link = Link(self.receiver.connect())
        self.sender.connected(self.receiver.delivered_count)

    @precondition(lambda self: self.link)
    @rule()
    def send(self) -> None:
        following = self.sender.next()
        if following is not None and self.link is not None:
            self.link.items.append(following)

    @precondition(lambda self: self.link and self.link.items)
    @rule(data=st.data())
    def send_twice(self, data: st.DataObject) -> None:
        if self.link is not None:
            self.link.items.append(data.draw(st.sampled_from(self.link.items)))

    @precondition(lambda self: self.link and self.link.items)
    @rule()
    def arrive(self) -> None:
        if self.link is not None:
            number, payload = self.link.items.pop(0)
            if self.receiver.is_new(self.link.name, number):
                self.delivered.append(payload)
                self.receiver.delivered()
            self.link.acknowledgements.append(self.receiver.delivered_count)

    @precondition(lambda self: any(link.items for link in self.given_up))
    @rule()
    def arrive_late(self) -> None:
        link = next(link for link in self.given_up if link.items)
        number, _ = link.items.pop(0)
        with pytest.raises(StreamLostError, match="replaced"):
            self.receiver.is_new(link.name, number)

    @precondition(lambda self: self.link and self.link.acknowledgements)
    @rule()
    def acknowledge(self) -> None:
        if self.link is not None:
            self.sender.acknowledged(self.link.acknowledgements.pop(0))

    @invariant()
    def everything_arrives_once_and_in_order(self) -> None:
        assert self.delivered == self.put[: len(self.delivered)]

    @invariant()
    def what_is_acknowledged_was_dealt_with(self) -> None:
        assert self.sender.acknowledged_count <= len(self.delivered)

    @invariant()
    def memory_is_bounded(self) -> None:
        assert sum(self.sizes[self.sender.acknowledged_count :]) <= max(MOST_BYTES, 14)

    def teardown(self) -> None:
        """Checks that all items arrive over one more connection, which does not break."""
        self.connect(late=False)
        for _ in self.put:
            self.send()
            if self.link is not None and self.link.items:
                self.arrive()
                self.acknowledge()
        assert self.delivered == self.put
        assert self.sender.acknowledged_count == len(self.put)
        assert self.sender.has_room(MOST_BYTES)


Streams.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40)
TestStreams = Streams.TestCase


def test_a_receiver_that_has_forgotten_the_stream_ends_it() -> None:
    sender: SendWindow[str] = SendWindow(100)
    sender.put("one", 1)
    sender.connected(0)
    sender.next()
    sender.acknowledged(1)
    with pytest.raises(StreamLostError):
        sender.connected(0)


def test_what_was_never_sent_cannot_be_acknowledged() -> None:
    sender: SendWindow[str] = SendWindow(100)
    sender.put("one", 1)
    sender.connected(0)
    with pytest.raises(StreamLostError):
        sender.acknowledged(1)


def test_a_missing_item_is_noticed() -> None:
    receiver = ReceiveOrder()
    with pytest.raises(StreamLostError, match="item 2 came after item 0"):
        receiver.is_new(receiver.connect(), 2)


def test_an_item_that_is_larger_than_the_window_travels_alone() -> None:
    sender: SendWindow[str] = SendWindow(10)
    sender.put("large", 50)
    assert not sender.has_room(1)
