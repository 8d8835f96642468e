"""Reads ahead in a thread: what comes next is ready while the caller uses what came before."""

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class _Read(Generic[_Item]):
    """An item, or the error that ended the source: None if it was exhausted."""

    item: _Item | None
    error: BaseException | None
    ended: bool


def ahead(source: Iterator[_Item], count: int) -> Generator[_Item, None, None]:
    """Yields the items of `source`, of which up to `count` are read ahead. Raises what the source raises, in its place.

    The source runs in a thread of its own. Where the generator is closed before its end, the thread ends soon, once
    the source has yielded or raised.
    """
    ready: queue.Queue[_Read[_Item]] = queue.Queue(count)
    closed = threading.Event()

    def put(read: _Read[_Item]) -> bool:
        while not closed.is_set():
            try:
                ready.put(read, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            for item in source:
                if not put(_Read(item, None, ended=False)):
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that reads
            put(_Read(None, error, ended=True))
        else:
            put(_Read(None, None, ended=True))

    threading.Thread(target=run, name="read-ahead", daemon=True).start()
    try:
        while not (read := ready.get()).ended:
            yield read.item  # type: ignore[misc]  # only the end has no item
        if read.error is not None:
            raise read.error
    finally:
        closed.set()
