"""Writes changes to the database, many callers' in one transaction, and catches up after an outage."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import structlog

from emberscale_brain.history.changes import Change, PlanMade, ProfileReported
from emberscale_brain.history.database import ClaimLostError, DatabaseAwayError, DatabaseUnusableError
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.planner.types import JobId

_BATCH = 5000
_AT_ONCE = 20  # the share of the kept changes that is dropped at once: a search for each new change would be slow


_REFUSED_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class _Entry:
    """One call of `record`. `repeated` are profiles recorded before; their reporter asks whether they are durable."""

    changes: tuple[Change, ...]
    repeated: tuple[ProfileReported, ...]
    durable: Future[bool]


class ChangeRecorder:
    """The only thread that writes to the database.

    While the database is unavailable, the recorder keeps up to `most_kept` changes in memory; beyond that it drops the
    oldest profiles first, then superseded plans. It tells callers at once that their changes are not durable yet, and
    retries every `retry_seconds`. When the database returns, the recorder upgrades its schema, writes the kept changes
    and calls `on_return`, which may find the database unavailable again.

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
    ) -> None:
        self._store = store
        self._retry_seconds = retry_seconds
        self._most_kept = most_kept
        self._on_return = on_return
        self._on_lost = on_lost
        self._on_superseded = on_superseded
        self._retell = retell
        self._log = structlog.get_logger()
        self._condition = threading.Condition()
        self._waiting: deque[_Entry] = deque()
        self._kept: deque[Change] = deque()
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
            self._waiting.append(_Entry(tuple(changes), tuple(repeated), durable))
            self._condition.notify()
        return durable

    def _work(self) -> None:
        stopping = False
        while not stopping:
            with self._condition:
                while not self._waiting and not self._stopping:
                    timeout = self._retry_seconds if self._away is not None else None
                    if not self._condition.wait(timeout):
                        break
                entries, self._waiting = list(self._waiting), deque()
                stopping = self._stopping
            try:
                self._turn(entries, stopping)
            except Exception as error:  # noqa: BLE001  # without this thread nothing is written, and nobody notices
                self._away = f"the recorder failed: {type(error).__name__}: {error}"
                self._log.exception("recorder_failed", kept=len(self._kept))
            for entry in entries:
                if not entry.durable.done():
                    entry.durable.set_result(False)

    def _turn(self, entries: Sequence[_Entry], stopping: bool) -> None:
        for entry in entries:
            self._keep(entry.changes)
        if self._away is not None and not stopping:
            # callers do not wait for another attempt: the database was away a moment ago
            for entry in entries:
                entry.durable.set_result(False)
            entries = []
        refused: list[Change] = []
        written = self._write_kept(refused)
        not_there = set(map(id, refused))
        for entry in entries:
            never = any((report.job, report.sequence) in self._refused for report in entry.repeated)
            entry.durable.set_result(written and not never and not_there.isdisjoint(map(id, entry.changes)))

    def _keep(self, changes: Sequence[Change]) -> None:
        self._kept.extend(changes)
        excess = len(self._kept) - self._most_kept
        if excess <= 0:
            return
        excess += self._most_kept // _AT_ONCE
        latest = {change.job: change for change in self._kept if isinstance(change, PlanMade)}
        profiles = [change for change in self._kept if isinstance(change, ProfileReported)]
        plans = [change for change in self._kept if isinstance(change, PlanMade) and latest[change.job] is not change]
        dropped = set(map(id, [*profiles, *plans][:excess]))
        self._kept = deque(change for change in self._kept if id(change) not in dropped)
        self._on_lost("Dropped", len(dropped))

    def _write_kept(self, refused: list[Change]) -> bool:
        """Writes the kept changes; returns whether the database has all of them, except the ones it refused."""
        returned = self._away is not None
        try:
            if returned:
                self._store.migrate()
                self._store.claim()
            while self._kept:
                batch = [self._kept[index] for index in range(min(_BATCH, len(self._kept)))]
                self._write(batch, refused)
                for _ in batch:
                    self._kept.popleft()
            if returned:
                self._on_return()
        except (DatabaseAwayError, DatabaseUnusableError) as error:
            if self._away != str(error):
                self._log.error("database_unavailable", problem=str(error), kept=len(self._kept))
            self._away = str(error)
            return False
        except ClaimLostError as error:
            self._away = str(error)
            self._on_superseded(str(error))
            return False
        if returned:
            self._away = None
            self._log.info("database_available")
        return True

    def _write(self, batch: Sequence[Change], refused: list[Change]) -> None:
        if (error := self._refusal(batch)) is not None:
            self._log.info("writing_one_by_one", changes=len(batch), problem=str(error))
            for change in batch:
                self._write_one(change, refused)

    def _refusal(self, changes: Sequence[Change]) -> Exception | None:
        """Writes changes together; returns why the database refuses them, or None."""
        try:
            self._store.write(changes)
        except (DatabaseAwayError, DatabaseUnusableError, ClaimLostError):
            raise
        except Exception as error:  # noqa: BLE001  # one change must not hold up all others
            return error
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
        self._log.error("database_refused", change=type(change).__name__, job=change.job, problem=str(problem))
