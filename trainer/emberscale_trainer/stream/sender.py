"""The sending end of a row stream: a thread that connects, sends, and resumes after the last received item."""

import math
import random
import ssl
import threading
import time
from collections.abc import Callable

import structlog

from emberscale_api.errors import problem_of
from emberscale_api.readable import duration_text
from emberscale_api.wire import Header, Kind, WireError
from emberscale_trainer.stream.core import SendWindow, StreamLostError
from emberscale_trainer.stream.item import Item
from emberscale_trainer.stream.opening import Receiver, next_position
from emberscale_trainer.transport import Connection, ConnectionLostError

_log = structlog.get_logger()

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_WINDOW_BYTES = 32 << 20
_ATTENDED_SECONDS = 1.0
"""How long the stream's thread leaves acknowledgements to callers after one of them has waited for some."""
_MOST_SENT = 32
"""Items that whoever waits for one of them sends at once: without a limit, it would send those of others for ever."""


class StreamSender:
    """One stream to one server. `put` may be called from one thread at a time.

    The stream outlives its connections; it ends with `close`, or when the receiver refuses it or has forgotten it.
    """

    def __init__(
        self,
        address: str,
        incarnation: str,
        token: str,
        stream: int,
        generation: int,
        context: ssl.SSLContext | None = None,
        window_bytes: int = _WINDOW_BYTES,
    ) -> None:
        """`incarnation` is the receiver's. `stream` names the stream among all of the job: a random number of 64 bits.

        Connects in a thread.
        """
        self._address = address
        self._receiver = Receiver(address, incarnation, token, stream, generation, context)
        self._lock = lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._to_send = threading.Condition(lock)  # of its own, so that acknowledgements do not wake who sends
        self._to_take = threading.Condition(lock)  # likewise for the thread that takes those that nobody waits for
        self._window: SendWindow[Item] = SendWindow(window_bytes)
        self._sending = threading.Lock()  # held while an item is taken from the window and sent: they keep order
        self._connection: Connection | None = None  # once the receiver has said where it stands
        self._current: Connection | None = None
        self._is_taking = False  # a thread takes an acknowledgement from the connection: one at a time
        self._attended_at = -math.inf  # when a caller last waited for acknowledgements: it takes them itself
        self._problem: Exception | None = None
        self._moved_at = self._away_since = time.monotonic()
        self._closed = False
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def put(self, item: Item, wait_seconds: float, *, now: bool = True) -> int:
        """Queues an item; its arrays must not change until it is acknowledged. Returns its number.

        Waits for room. With `now=False`, the item stays queued until the caller calls `reach` or `send_queued`, which
        send it without waking a thread. Raises TimeoutError, and StreamLostError once the stream has ended.
        """
        with self._lock:
            self._wait(lambda: self._window.has_room(item.nbytes), wait_seconds, "room for an item")
            if self._window.acknowledged_count == self._window.put_count:
                self._moved_at = time.monotonic()
            number = self._window.put(item, item.nbytes)
            if now:
                self._leave_to_threads()
            return number

    def flush(self, wait_seconds: float) -> None:
        """Waits until the receiver has processed all items that were put. Raises as `put` does."""
        self.reach(self._window.put_count, wait_seconds)

    @property
    def acknowledged_count(self) -> int:
        """The number of items, from the first, that the receiver has processed."""
        return self._window.acknowledged_count

    @property
    def problem(self) -> str:
        """Why the stream has ended by itself; empty if it has not."""
        return "" if self._problem is None else str(self._problem)

    @property
    def waiting_seconds(self) -> float:
        """Seconds since the receiver last acknowledged an item while it owes one, or since the stream ended; else 0.

        It does not owe items that are queued while it is connected: their sender may be held up by another stream.
        """
        with self._lock:
            window = self._window
            is_behind = window.acknowledged_count < window.put_count
            waits = self._problem is not None or (is_behind and (window.is_sent or self._connection is None))
            return time.monotonic() - self._moved_at if waits and not self._closed else 0.0

    @property
    def away_seconds(self) -> float:
        """Seconds for which the receiver has not been connected; 0 while it is."""
        with self._lock:
            return time.monotonic() - self._away_since if self._connection is None and not self._closed else 0.0

    def reach(self, number: int, wait_seconds: float) -> None:
        """Waits until the receiver has processed all items up to this one. Raises as `put` does."""
        self.send_queued()
        with self._lock:
            self._wait(lambda: self._window.acknowledged_count >= number, wait_seconds, "acknowledgements")

    def send_queued(self) -> None:
        """Sends queued items in this thread, unless another one does; the stream's thread sends the rest."""
        left = _MOST_SENT
        while self._is_queued() and self._sending.acquire(blocking=False):  # again, or what came at the end is left
            connection = self._connection
            try:
                while left and connection is not None and self._is_queued() and self._send_next(connection):
                    left -= 1
            except (ConnectionLostError, MemoryError):  # the item is sent again
                if connection is not None:
                    self._give_up(connection)
                return
            finally:
                self._sending.release()
            if not left:
                self.wake()
                return

    def wake(self) -> None:
        """Has the stream's thread send what is queued, in case the caller of `put` is held up by another stream."""
        with self._lock:
            if self._window.has_next:
                self._leave_to_threads()

    def _leave_to_threads(self) -> None:
        self._attended_at = -math.inf
        self._to_send.notify()
        self._to_take.notify()

    def _is_queued(self) -> bool:
        return self._window.has_next and self._connection is not None and not self._closed

    def close(self) -> None:
        """Ends the stream; unacknowledged items may or may not have arrived."""
        with self._lock:
            self._closed = True
            if self._current is not None:
                self._current.hang_up()
            self._notify_all()

    def _wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Waits, and takes the acknowledgements that come meanwhile, unless another thread does."""
        deadline = time.monotonic() + seconds
        while not condition():
            self._raise_if_ended()
            self._attended_at = now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"no {what} within {duration_text(seconds)} on the stream to {self._address}")
            if self._connection is None or self._is_taking:
                self._changed.wait(deadline - now)
            else:
                self._take_acknowledgement(self._connection, deadline - now)
        self._raise_if_ended()

    def _raise_if_ended(self) -> None:
        if self._problem is not None:
            raise StreamLostError(str(self._problem)) from self._problem
        if self._closed:
            raise StreamLostError("the stream is closed")

    def _run(self) -> None:
        """Connects again and again, and logs the first failure and those whose number has doubled, until it gets on."""
        pause, attempts = _FIRST_PAUSE, 0
        while not self._closed and self._problem is None:
            before, problem = self._window.acknowledged_count, ""
            try:
                self._serve()
            except (ConnectionLostError, OSError, MemoryError) as error:
                problem = problem_of(error)
            except (StreamLostError, WireError, ValueError) as error:
                with self._lock:
                    self._end(error)
                return
            gets_on = self._window.acknowledged_count > before
            pause = _FIRST_PAUSE if gets_on else min(2 * pause, _LONGEST_PAUSE)
            attempts = (0 if gets_on else attempts) + bool(problem)
            if problem and attempts.bit_count() == 1:  # a server may be out of reach for as long as the job runs
                _log.info("stream_broke", address=self._address, problem=problem, attempts=attempts)
            with self._lock:
                self._changed.wait_for(lambda: self._closed, pause * random.uniform(0.5, 1.0))

    def _serve(self) -> None:
        """Serves one connection until it ends, and raises the cause."""
        connection = self._receiver.connect()
        try:
            with self._lock:
                self._current = connection
                if self._closed:
                    return
            stands_at = self._receiver.open(connection)
            taking = threading.Thread(target=self._take_acknowledgements, args=(connection,), daemon=True)
            try:
                taking.start()
            except RuntimeError as error:  # no more threads
                raise ConnectionLostError(str(error)) from error
            try:
                self._send_all(connection, stands_at)
            finally:
                self._give_up(connection)
                taking.join()
        finally:
            with self._lock:
                self._current = None
            with self._sending:
                connection.close()

    def _send_all(self, connection: Connection, stands_at: int) -> None:
        """Sends what the receiver has not processed, and what is put later, until the connection ends."""
        with self._lock:
            before = self._window.acknowledged_count
            self._window.connected(stands_at)
            self._note_moved(before)
            self._connection = connection
            self._changed.notify_all()
        while True:
            with self._sending:
                while self._send_next(connection):
                    pass
            with self._lock:
                while not self._window.has_next and not self._closed and self._connection is connection:
                    self._to_send.wait()
                if self._closed or self._connection is not connection:
                    return

    def _send_next(self, connection: Connection) -> bool:
        """Sends the next item, if there is one; the caller is alone in it. Raises ConnectionLostError."""
        with self._lock:
            if self._closed or self._connection is not connection:
                return False
            following = self._window.next()
        if following is None:
            return False
        number, item = following
        connection.send(Header(Kind.ITEM, batch=number, payload_bytes=item.nbytes), item.buffers())
        return True

    def _take_acknowledgements(self, connection: Connection) -> None:
        """Takes those that nobody waits for, and all that are left of a connection that was given up, until its end."""
        with self._lock:
            goes_on = True
            while goes_on:
                is_attended = time.monotonic() - self._attended_at < _ATTENDED_SECONDS
                if self._is_taking or (is_attended and self._connection is connection):
                    self._to_take.wait(_ATTENDED_SECONDS)
                else:
                    goes_on = self._take_acknowledgement(connection, None)

    def _take_acknowledgement(self, connection: Connection, seconds: float | None) -> bool:
        """Takes one acknowledgement, if it comes within this time; returns whether others may follow.

        The caller holds the lock, which is free meanwhile.
        """
        self._is_taking, before = True, self._window.acknowledged_count
        try:
            self._lock.release()
            try:
                number = next_position(connection, seconds)
            finally:
                self._lock.acquire()
            self._window.acknowledged(number)
            self._note_moved(before)
        except (ConnectionLostError, WireError, MemoryError):
            self._disconnect(connection)
            return False
        except (StreamLostError, ValueError) as error:
            self._end(error)
            self._disconnect(connection)
            return False
        finally:
            self._is_taking = False
            self._changed.notify_all()  # others may go on, or take the next
            if self._connection is not connection:
                self._to_take.notify()
        return True

    def _give_up(self, connection: Connection) -> None:
        """Has the stream's threads end a connection, and connect again, once they have taken what has come."""
        with self._lock:
            self._disconnect(connection)

    def _disconnect(self, connection: Connection) -> None:
        connection.hang_up()
        if self._connection is connection:
            self._connection, self._away_since = None, time.monotonic()
        self._notify_all()

    def _note_moved(self, before: int) -> None:
        if self._window.acknowledged_count > before:
            self._moved_at = time.monotonic()

    def _end(self, problem: Exception) -> None:
        """The first problem counts. The caller holds the lock."""
        if self._problem is None:
            self._problem, self._moved_at = problem, time.monotonic()
        self._notify_all()

    def _notify_all(self) -> None:
        self._changed.notify_all()
        self._to_send.notify_all()
        self._to_take.notify_all()
