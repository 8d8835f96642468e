"""Rows that leave a server which is short of memory: few are under way at a time."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from emberscale_api.shape import memory_reserve
from emberscale_trainer.server import sending
from emberscale_trainer.server.moves import Transfer
from emberscale_trainer.server.sending import RowSending
from emberscale_trainer.stream import Item, ItemKind
from emberscale_trainer.transport import listen
from moves import EVERYTHING, TOKEN, table_of

SMALLEST_RESERVE = memory_reserve(1)


class SendingToOne(RowSending):
    """A move to one receiver."""

    def send(self, item: Item) -> None:
        self._put(1, item)


@pytest.fixture
def to_a_silent_receiver(tmp_path: Path) -> Iterator[SendingToOne]:
    """A receiver that is connected to and takes nothing."""
    listener, _ = listen(f"unix://{tmp_path / 'silent'}")
    table = table_of(2, [f"unix://{tmp_path / name}" for name in ("own", "silent")])
    rows = SendingToOne("move", Transfer(2, table, 0, EVERYTHING), [1], TOKEN, None)
    yield rows
    rows.close("the test is over")
    listener.close()


def test_rows_on_their_way_to_a_slow_receiver_take_a_fraction_of_the_reserve(
    to_a_silent_receiver: SendingToOne, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "STALLED_SECONDS", 0.1)
    item, put = Item(ItemKind.ROWS, 0, np.zeros((1 << 14, 64), np.uint8)), 0
    with suppress(TimeoutError):
        while put < SMALLEST_RESERVE:
            to_a_silent_receiver.send(item)
            put += item.nbytes
    assert SMALLEST_RESERVE // 8 < put <= SMALLEST_RESERVE // 4
