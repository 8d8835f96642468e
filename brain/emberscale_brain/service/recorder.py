"""Writes changes to the database, many callers' in one transaction, and catches up after an outage."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice

import structlog

from emberscale_api.readable import duration_text
from emberscale_brain.history.changes import Change, PlanMade, ProfileReported
from emberscale_brain.history.database import ClaimLostError, DatabaseAwayError, DatabaseUnusableError
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId

_BATCH = 5000
_AT_ONCE = 20  # the share of the kept changes that is dropped at once: a search for each new change would be slow


_log = structlog.get_logger()

_REFUSED_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class _Recording:
    """One call of `record`. `repeated` are profiles recorded before; their reporter asks whether they are durable.

    `dropped` is the number of changes that had been dropped before.
    """

    changes: tuple[Change, ...]
    repeated: tuple[ProfileReported, ...]
    dropped: int
    durable: Future[bool]


class ChangeRecorder:
    """The only thread that writes to the database.

    While the database is unavailable, the recorder keeps up to `most_kept` changes in memory; beyond that it drops the
    oldest profiles first, then superseded plans. It tells callers at once that their changes are not durable yet, and
    retries every `retry_seconds`. When the database returns, the recorder upgrades its schema, writes the kept changes
    and calls `on_return`, which may find the database unavailable again. A database that takes more than `hang_seconds`
    by the `clock` for one write counts as unavailable until the write ends.

    If the database refuses a change, the recorder writes what `retell` says of its job, then the change again: in this
    way an emptied database learns of running jobs. `on_lost` receives the number of changes that were given up, and
    why: "Dropped" or "Refused". Once another brain has the database, the recorder writes nothing more, and
    `on_superseded` receives the reason.
    """

    def __init__(
        self,
        store: HistoryStore,
        retry_seconds: float = 5.0,
        most_kept: int = 200_000,
        on_return: Callable[[], None] = lambda: None,
        on_lost: Callable[[str, int], None] = lambda why, count: None,
        on_superseded: Callable[[str], object] = lambda why: None,
        retell: Callable[[JobId], Sequence[Change]] = lambda job: (),
        hang_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._retry_seconds = retry_seconds
        self._most_kept = most_kept
        self._on_return = on_return
        self._on_lost = on_lost
        self._on_superseded = on_superseded
        self._retell = retell
        self._hang_seconds = hang_seconds
        self._clock = clock
        self._condition = threading.Condition()
        self._told = False
        self._waiting: list[_Recording] = []
        self._kept: deque[Change] = deque()
        self._in_hand = 0  # the first of the kept changes, which are being written
        self._dropped = 0
        self._write_began: float | None = None
        self._refused: dict[tuple[JobId, int], None] = {}  # profiles, the oldest first
        self._away: str | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)

    def start(self, away: str | None = None) -> None:
        """Starts the thread; `away` says why the database was unavailable at the first attempt."""
        self._away = away
        self._thread.start()

    def stop(self) -> None:
        """Writes pending changes, if possible, and ends."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    @property
    def away(self) -> str | None:
        """Why the database is unavailable; None while it is available."""
        began = self._write_began
        if self._away is None and began is not None and self._clock() - began > self._hang_seconds:
            return f"the database has not answered a write for more than {duration_text(self._hang_seconds)}"
        return self._away

    @property
    def backlog(self) -> int:
        """The number of changes that are not in the database yet."""
        return len(self._kept)

    def record(self, changes: Sequence[Change], repeated: Sequence[ProfileReported] = ()) -> Future[bool]:
        """Records changes. The future tells whether they are in the database: False if it is away or refuses any.

        `repeated` were recorded before. Without changes, the caller asks whether everything recorded so far is written.
        """
        durable: Future[bool] = Future()
        with self._condition:
            if self.away is None:
                self._waiting.append(_Recording(tuple(changes), tuple(repeated), self._dropped, durable))
            else:  # callers do not wait for another attempt: the database was away a moment ago
                durable.set_result(False)
            self._keep(changes)
            self._told = True
            self._condition.notify()
        return durable

    def _work(self) -> None:
        stopping = False
        while not stopping:
            with self._condition:
                while not self._told and not self._stopping:
                    timeout = self._retry_seconds if self._away is not None else None
                    if not self._condition.wait(timeout):
                        break
                stopping = self._stopping
            self.write_waiting(stopping)

    def write_waiting(self, stopping: bool = False) -> None:
        """Tries once to write what is recorded, and tells the callers; after `start`, only the thread may."""
        with self._condition:
            entries, self._waiting, self._told = self._waiting, [], False
            due = len(self._kept)
        try:
            self._turn(entries, due, stopping)
        except Exception as error:  # noqa: BLE001  # without this thread nothing is written, and nobody notices
            self._away = f"the recorder failed: {type(error).__name__}: {error}"
            _log.exception("recorder_failed", changes=len(self._kept))
        for entry in entries:
            if not entry.durable.done():
                entry.durable.set_result(False)

    def _turn(self, entries: Sequence[_Recording], due: int, stopping: bool) -> None:
        if self._away is not None and not stopping:
            for entry in entries:
                entry.durable.set_result(False)
            entries = []
        refused: list[Change] = []
        written = self._write_kept(due, refused)
        not_there = set(map(id, refused))
        for entry in entries:
            never = any((report.job, report.sequence) in self._refused for report in entry.repeated)
            whole = entry.dropped == self._dropped and not_there.isdisjoint(map(id, entry.changes))
            entry.durable.set_result(written and whole and not never)

    def _keep(self, changes: Sequence[Change]) -> None:
        self._kept.extend(changes)
        excess = len(self._kept) - self._most_kept
        if excess <= 0:
            return
        excess += self._most_kept // _AT_ONCE
        latest = {change.job: change for change in self._kept if isinstance(change, PlanMade)}
        free = list(islice(self._kept, self._in_hand, None))
        profiles = [change for change in free if isinstance(change, ProfileReported)]
        plans = [change for change in free if isinstance(change, PlanMade) and latest[change.job] is not change]
        dropped = set(map(id, [*profiles, *plans][:excess]))
        in_hand = islice(self._kept, self._in_hand)
        self._kept = deque([*in_hand, *(change for change in free if id(change) not in dropped)])
        self._dropped += len(dropped)
        self._on_lost("Dropped", len(dropped))

    def _write_kept(self, due: int, refused: list[Change]) -> bool:
        """Writes the first `due` kept changes; returns whether the database has them, except the ones it refused."""
        returned = self._away is not None
        try:
            if returned:
                self._store.migrate()
                self._store.claim()
            while due > 0 and self._kept:
                due -= self._write_batch(refused)
            if returned:
                self._on_return()
        except (DatabaseAwayError, DatabaseUnusableError) as error:
            if self._away != str(error):
                _log.error("database_unavailable", problem=str(error), changes=len(self._kept))
            self._away = str(error)
            return False
        except ClaimLostError as error:
            self._away = str(error)
            self._on_superseded(str(error))
            return False
        if returned:
            self._away = None
            _log.info("database_available")
        return True

    def _write_batch(self, refused: list[Change]) -> int:
        """Writes the next kept changes, and returns their number."""
        with self._condition:
            batch = list(islice(self._kept, _BATCH))
            self._in_hand = len(batch)
        done = 0
        try:
            for count in self._write(batch, refused):
                done += count
        finally:
            with self._condition:
                self._in_hand = 0
                for _ in range(done):
                    self._kept.popleft()
        return done

    def _write(self, batch: Sequence[Change], refused: list[Change]) -> Iterator[int]:
        """Writes changes together or, if the database refuses that, one by one; yields how many more are done with."""
        if (error := self._refusal(batch)) is None:
            yield len(batch)
            return
        _log.info("writing_one_by_one", changes=len(batch), problem=str(error))
        for change in batch:
            self._write_one(change, refused)
            yield 1

    def _refusal(self, changes: Sequence[Change]) -> Exception | None:
        """Writes changes together; returns why the database refuses them, or None."""
        self._write_began = self._clock()
        try:
            self._store.write(changes)
        except (DatabaseAwayError, DatabaseUnusableError, ClaimLostError):
            raise
        except Exception as error:  # noqa: BLE001  # one change must not hold up all others
            return error
        finally:
            self._write_began = None
        return None

    def _write_one(self, change: Change, refused: list[Change]) -> None:
        """Writes a change alone and, if it is refused, again after everything else that is known of its job."""
        problem = self._refusal([change])
        if problem is not None and (told := self._retell(change.job)):
            problem = self._refusal([*told, change])
        if problem is None:
            return
        refused.append(change)
        if isinstance(change, ProfileReported):
            self._refused[change.job, change.sequence] = None
            while len(self._refused) > _REFUSED_REMEMBERED:
                del self._refused[next(iter(self._refused))]
        self._on_lost("Refused", 1)
        _log.error("database_refused", change=type(change).__name__, job_uid=change.job, problem=str(problem))
