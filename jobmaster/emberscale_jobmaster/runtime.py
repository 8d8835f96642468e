"""The one place where the job's state changes: a lock around the pure core, and no reply before the change is durable.

Every change is installed under the lock, and written to the store by one thread, which writes the newest state
whenever it is behind; however many calls wait, one write serves them all. While the store cannot be written, changes
are refused.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import structlog

from emberscale_api.job import FaultToleranceStrategy, TrainingJob, TrainingJobSpec
from emberscale_api.job.checkpoint import DEFAULT_INTERVAL
from emberscale_jobmaster import lifecycle, progress
from emberscale_jobmaster.membership import MemberId, Role
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.state import PREPARATION, BadRecord, JobState, Phase, phase_of
from emberscale_jobmaster.store import DeposedError, JobStore, StoreUnavailableError

_log = structlog.get_logger()
_RETRY_SECONDS = 0.25
_CHECKPOINT_COSTS = 16
_START_UPS = 64
_T = TypeVar("_T")


class ClosingError(Exception):
    """The master is going; another will answer."""


class JobRuntime:
    """State and observations of one job. All public methods may be called from any thread."""

    def __init__(
        self,
        job: TrainingJob,
        job_uid: str,
        store: JobStore,
        on_deposed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.job = job
        self.job_uid = job_uid
        self.spec = job.spec
        self.store = store
        self._on_deposed = on_deposed
        self._clock, self._wall = clock, wall
        self._changed = threading.Condition()
        self._state, self._observed = progress.initial(wall()), Observations()
        self._version, self._durable = 1, 0
        self._store_failures, self._store_problem = 0, ""
        self._bad: set[tuple[str, int]] = set()
        self._start_ups: deque[tuple[str, float, float, float]] = deque(maxlen=_START_UPS)
        self._advised_interval: float | None = None
        self._checkpoint_costs: deque[float] = deque(maxlen=_CHECKPOINT_COSTS)
        sharding = job.spec.sharding
        self._forgotten_seconds = min(sharding.lease_timeout, max(2.0, 5 * sharding.heartbeat_interval))
        self._last_tick = clock()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._write, name="store-writer"),
            threading.Thread(target=self._watch, name="deadline-watch"),
        ]

    def take_over(self) -> None:
        """Deposes the master before, if there was one, and goes on from its state.

        Raises StoreUnavailableError and UnreadableStateError.
        """
        found = self.store.open()
        self._bad = self.store.bad_records()
        if found is not None:
            self._state = progress.taken_over(found, self.spec, self._wall())
            _log.info("state taken over", term=self.store.term, phase=str(phase_of(self._state, self.spec)))
        self.store.save(self._state)
        self._durable = self._version
        self._observed = self._observed.watching(self._state.members, self._state.ledger, self.now())

    def start(self) -> None:
        """Begins to keep the state durable and to look at deadlines."""
        self._last_tick = self.now()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wakes everybody who waits, with ClosingError, and ends the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.store.close()

    @property
    def closing(self) -> bool:
        """Whether `close` was called or the master was deposed."""
        return self._closing

    def now(self) -> float:
        """Seconds on the clock of the observations."""
        return self._clock()

    def snapshot(self) -> tuple[JobState, Observations]:
        """The state and the observations as of now; the state may be a moment ahead of what is durable."""
        with self._changed:
            return self._state, self._observed

    def update(self, transition: Callable[[JobState], JobState]) -> JobState:
        """Changes the state, and returns it when it is durable.

        Raises StoreUnavailableError, ClosingError, and what the transition raises.
        """
        with self.changing() as change:
            change.state = transition(change.state)
        return change.state

    def apply(self, transition: Callable[[JobState], JobState]) -> None:
        """Changes the state without waiting for it to be durable; for what nobody is told."""
        with self._changed:
            self._install(Change(transition(self._state), self._observed))

    def hear(self, member: MemberId) -> None:
        """Notes that a member speaks, whether or not the store can be written.

        Raises UnknownMemberError and SupersededError.
        """
        with self._changed:
            self._state.members.check(member)
            self._observed = self._observed.heard(member, self.now())

    @contextmanager
    def changing(self) -> Iterator["Change"]:
        """Holds the lock while the body changes `change.state` and `change.observed`; on leaving, waits until durable.

        Nothing is changed when the body raises. Raises StoreUnavailableError and ClosingError.
        """
        with self._changed:
            self._refuse_if_unwritable()
            change = Change(self._state, self._observed)
            yield change
            version = self._install(change)
            change.state = self._state
            self._await_durable(version)

    def wait_until(self, look: Callable[[JobState], _T | None], seconds: float | None) -> _T | None:
        """What `look` finds in the state, looking again at every change; None after `seconds`. Raises ClosingError."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                if self._closing:
                    raise ClosingError("the master is stopping; call again")
                if (found := look(self._state)) is not None:
                    self._await_durable(self._version)
                    return found
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def pause(self, seconds: float) -> None:
        """Waits. Raises ClosingError."""
        with self._changed:
            if self._changed.wait_for(lambda: self._closing, seconds):
                raise ClosingError("the master is stopping; call again")

    def note_bad_records(self, records: list[BadRecord]) -> None:
        """Counts malformed records, each (file, line) once. Raises as `update` does."""
        with self._changed:
            fresh = {(record.file, record.line): record for record in records}
            fresh = {place: record for place, record in fresh.items() if place not in self._bad}
        if not fresh:
            return
        self.store.add_bad_records(fresh)
        with self.changing() as change:
            self._bad |= fresh.keys()
            change.state = lifecycle.bad_records_found(change.state, self.spec, len(self._bad), tuple(fresh.values()))

    def started_up(self, role: Role, since: float, paused_seconds: float = 0.0) -> None:
        """A process serves that was asked for at `since`, seconds since 1970; the job stood still for it."""
        wall = self._wall()
        self._start_ups.append((role.value, max(0.0, wall - since - paused_seconds), paused_seconds, wall))

    def checkpoint_taken(self, seconds: float) -> None:
        """A checkpoint cost so many seconds of training."""
        self._checkpoint_costs.append(seconds)

    @property
    def checkpoint_cost(self) -> float:
        """Mean seconds of training that the latest checkpoints cost; 0 before the first."""
        pauses = list(self._checkpoint_costs)
        return sum(pauses) / len(pauses) if pauses else 0.0

    @property
    def checkpoint_interval(self) -> float:
        """Seconds between checkpoints: the manifest's, else what was advised, else the default."""
        return self.spec.checkpoint.interval or self._advised_interval or DEFAULT_INTERVAL

    def advise_checkpoints(self, seconds: float) -> None:
        """The interval that is cheapest; the manifest's stands, and without `Auto` the default does."""
        if self.spec.fault_tolerance.strategy is not FaultToleranceStrategy.AUTO:
            return
        with self._changed:
            before = self.checkpoint_interval
            self._advised_interval = seconds
            self._changed.notify_all()
        if self.checkpoint_interval != before:
            _log.info("checkpoint interval", seconds=round(self.checkpoint_interval, 3), before=round(before, 3))

    def take_start_ups(self) -> list[tuple[str, float, float, float]]:
        """(role, seconds until it served, seconds of standstill, when) of starts since the last call."""
        taken = []
        while self._start_ups:
            taken.append(self._start_ups.popleft())
        return taken

    def tick(self) -> None:
        """Acts on deadlines that have passed."""
        with self._changed:
            now, timeout = self.now(), self.spec.sharding.lease_timeout
            pause = now - self._last_tick
            self._last_tick = now
            if self._state.over:
                return
            observed = self._observed
            if pause > timeout / 2:
                _log.warning("master was stalled, deadlines are moved", seconds=round(pause, 3))
                observed = observed.excused(pause)
            silent = observed.silent(self._state.members, now, timeout)
            # A worker does not mention what it prepares; its silence alone ends that.
            lapsed = (
                []
                if self._state.stage in PREPARATION
                else observed.lapsed(self._state.ledger, now, timeout, self._forgotten_seconds)
            )
            for member in silent:
                _log.warning("member is silent", member=member.slot, incarnation=member.incarnation, seconds=timeout)
            if lapsed:
                _log.warning("leases expired", tokens=lapsed)
            state = lifecycle.silent(self._state, self.spec, silent)
            state = lifecycle.leases_expired(state, lapsed)
            state = lifecycle.time_passed(state, self.spec, self._wall())
            self._install(Change(state, replace(observed, lapses=observed.lapses + len(lapsed))))

    def _install(self, change: "Change") -> int:
        before = self._state
        state = progress.advance(before, change.state, self.spec)
        phase = phase_of(before, self.spec)
        if phase is not phase_of(state, self.spec) and not before.over:  # each phase gets its time to the moment
            training = phase is Phase.TRAINING
            state = replace(state, clock=lifecycle.clock_at(state.clock, self._wall(), training))
        observed = change.observed
        if before.routing.ready and not state.routing.ready:
            observed = observed.rolled_back()
        self._observed = observed.watching(state.members, state.ledger, self.now())
        if state != before:
            self._state = state
            self._version += 1
            self._changed.notify_all()
            _log_changes(before, state, self.spec)
        return self._version

    def _refuse_if_unwritable(self) -> None:
        if self._closing:
            raise ClosingError("the master is stopping; call again")
        if self._store_problem:
            raise StoreUnavailableError(self.store.url, self._store_problem)

    def _await_durable(self, version: int) -> None:
        failures = self._store_failures
        while self._durable < version:
            if self._closing:
                raise ClosingError("the master is stopping; call again")
            if self._store_failures > failures:
                raise StoreUnavailableError(self.store.url, self._store_problem)
            self._changed.wait()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._durable < self._version)
                if self._closing:
                    return
                state, version = self._state, self._version
            try:
                self.store.save(state)
            except StoreUnavailableError as error:
                with self._changed:
                    self._store_failures += 1
                    if not self._store_problem:
                        _log.error("state cannot be written", problem=str(error))
                    self._store_problem = str(error)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._closing, _RETRY_SECONDS)
            except DeposedError as error:
                _log.error("deposed", problem=str(error))
                with self._changed:
                    self._closing = True
                    self._changed.notify_all()
                self._on_deposed()
            else:
                with self._changed:
                    if self._store_problem:
                        _log.info("state can be written again")
                    self._store_problem = ""
                    self._durable = version
                    self._changed.notify_all()

    def _watch(self) -> None:
        interval = min(1.0, self.spec.sharding.lease_timeout / 10)
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, interval):
                    return
            self.tick()


class Change:
    """What the body of `changing` sees and replaces."""

    def __init__(self, state: JobState, observed: Observations) -> None:
        self.state = state
        self.observed = observed


def _log_changes(before: JobState, state: JobState, spec: TrainingJobSpec) -> None:
    old, new = phase_of(before, spec), phase_of(state, spec)
    if old is not new:
        outcome = state.outcome
        _log.info(
            "phase",
            phase=str(new),
            epoch=state.epoch,
            **({"reason": outcome.reason, "message": outcome.message} if outcome else {}),
        )
    if state.routing.ready and not before.routing.ready:
        _log.info("parameter servers are assigned", routing_epoch=state.routing.table.epoch)
