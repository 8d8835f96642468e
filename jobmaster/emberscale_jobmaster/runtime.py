"""The one place where the job's state changes: a lock around the machine. No effect precedes the durable state.

Each step installs its state under the lock. One thread writes the newest state to the store whenever the store is
behind; a single write serves all calls that wait. Effects go to the conductor once their state is written. While the
store is unavailable, calls are refused.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from emberscale_api.checkpoint import is_flash
from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJob, TrainingJobSpec
from emberscale_api.job.data import BadRecord
from emberscale_api.job.roles import MemberId
from emberscale_jobmaster import takeover
from emberscale_jobmaster.effects import (
    CheckpointTaken,
    Effect,
    Granted,
    LeasesVoid,
    LogEvent,
    Moved,
    Reloaded,
    StartedUp,
)
from emberscale_jobmaster.events import (
    BadRecordsFound,
    CallReceived,
    Event,
    GrantLost,
    Rescaled,
    TakenOver,
    TimePassed,
)
from emberscale_jobmaster.figures import checkpoint_interval, phase_of, sizes_of
from emberscale_jobmaster.machine import MasterState, step
from emberscale_jobmaster.observations import Observations
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.store import DeposedError, JobStore, StoreUnavailableError

_log = structlog.get_logger()
_RETRY_SECONDS = 0.25
_LONGEST_TICK_SECONDS = 0.25
_LONG_SAVE_SECONDS = 0.5
_CHECKPOINT_COSTS = 16
_START_UPS = 64

_T = TypeVar("_T")


class ClosingError(Exception):
    """The master is closing; its successor will answer."""


@dataclass(frozen=True)
class Handled:
    """The result of an event: the job afterwards, its spec, and the effects that answer the sender."""

    job: JobState
    spec: TrainingJobSpec
    answers: tuple[Granted | LeasesVoid, ...]


class JobRuntime:
    """The machine of one job. All public methods may be called from any thread."""

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
        self._state = MasterState(takeover.initial(wall()))
        self._version, self._durable = 1, 0
        self._store_failures, self._store_problem = 0, ""
        self._saving_since: float | None = None
        self._bad: set[tuple[str, int]] = set()
        self._outbox: deque[tuple[int, Effect]] = deque()
        self._start_ups: deque[tuple[float, StartedUp]] = deque(maxlen=_START_UPS)
        self._checkpoint_costs: deque[float] = deque(maxlen=_CHECKPOINT_COSTS)
        self.closing = False
        """Whether `close` was called or the master was deposed."""
        self._threads = [
            threading.Thread(target=self._write, name="store-writer"),
            threading.Thread(target=self._watch, name="deadline-watch"),
        ]

    def take_over(self, awaits_plan: bool = False, alone: bool = False, has_flash_store: bool = False) -> None:
        """Deposes the previous master, if there was one, and continues from its state; see TakenOver.

        Raises StoreUnavailableError and UnreadableStateError.
        """
        found = self.store.open()
        self._bad = self.store.bad_records()
        with self._changed:
            if found is not None:
                self._state = MasterState(found)
            event = TakenOver(
                now=self.now(),
                wall=self._wall(),
                awaits_plan=awaits_plan,
                alone=alone,
                has_flash_store=has_flash_store,
            )
            self._state, effects = step(self._state, event, self.spec)
            self.store.save(self._state.job)
            self._durable = self._version
            self._outbox.extend((self._version, effect) for effect in effects)
            if found is not None:
                phase = phase_of(self._state.job, self.spec)
                _log.info("state_taken_over", term=self.store.term, phase=str(phase))

    def start(self) -> None:
        """Begins to keep the state durable and to look at deadlines."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wakes everybody who waits, with ClosingError, and ends the threads."""
        with self._changed:
            self.closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.store.close()

    def now(self) -> float:
        """Returns the seconds on the clock of events."""
        return self._clock()

    def snapshot(self) -> tuple[JobState, Observations]:
        """Returns the job and the observations as of now; the job may be a moment ahead of what is durable."""
        with self._changed:
            return self._state.job, self._state.seen

    def view(self) -> tuple[JobState, Observations, TrainingJobSpec]:
        """As `snapshot`, with the spec that the job follows: an edit changes both together."""
        with self._changed:
            return self._state.job, self._state.seen, self.spec

    def handle(self, event: Event) -> Handled:
        """Takes one step, and returns its result once it is durable.

        Raises StoreUnavailableError, ClosingError, and what the step raises; then nothing has changed, unless the store
        failed only now.
        """
        with self._changed:
            self._refuse_if_unwritable()
            answers = self._step(event)
            job, spec, version = self._state.job, self.spec, self._version
            try:
                self._await_durable(version)
            except StoreUnavailableError:
                for answer in answers:
                    if isinstance(answer, Granted):  # the worker never learns of the grant
                        self._step(GrantLost(now=self.now(), token=answer.task.token))
                raise
        return Handled(job, spec, answers)

    def rescale(self, servers: int, workers: int, waits: str) -> None:
        """Continues with the numbers of processes of an edited manifest; 0: the manifest leaves the number open.

        `waits` says what keeps new parameter servers from starting. Raises as `handle` does, and ValidationError for
        numbers that a manifest may not have.
        """
        with self._changed:
            self._refuse_if_unwritable()  # the spec changes with a step, or not at all
            before = sizes_of(self._state.job, self.spec)
            self.spec = self.spec.resized(servers, workers)
            self.handle(Rescaled(now=self.now(), before=before, waits=waits, wall=self._wall()))

    def note(self, event: Event) -> None:
        """Takes one step without waiting for it to be durable, for events that need no answer."""
        with self._changed:
            if not self.closing:
                self._step(event)

    def hear(self, member: MemberId) -> None:
        """Notes that a member calls, even if its call is refused because the store is unavailable.

        Raises UnknownMemberError and SupersededMemberError.
        """
        with self._changed:
            self._state.job.members.check(member)
            if self._store_problem:
                self._step(CallReceived(now=self.now(), member=member))

    def next_effect(self) -> Effect:
        """Waits for the next effect to carry out. Raises ClosingError."""
        with self._changed:
            self._changed.wait_for(self._has_effect)
            self._refuse_if_closing()
            return self._outbox.popleft()[1]

    def wait_until(self, look: Callable[[JobState], _T | None], seconds: float | None) -> _T | None:
        """Calls `look` at every change, and returns what it finds; None after `seconds`. Raises ClosingError."""
        deadline = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while True:
                self._refuse_if_closing()
                if (found := look(self._state.job)) is not None:
                    self._await_durable(self._version)
                    return found
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def pause(self, seconds: float) -> None:
        """Waits. Raises ClosingError."""
        with self._changed:
            self._changed.wait_for(lambda: self.closing, seconds)
            self._refuse_if_closing()

    def note_bad_records(self, records: list[BadRecord]) -> None:
        """Counts malformed records, each (file, line) once. Raises as `handle` does."""
        with self._changed:
            fresh = {(record.file, record.line): record for record in records}
            if self._state.job.bad_records == len(self._bad):  # else a master ended before it counted what it noted
                fresh = {place: record for place, record in fresh.items() if place not in self._bad}
        if not fresh:
            return
        self.store.add_bad_records(fresh)
        with self._changed:
            self._refuse_if_unwritable()  # records become known with the step that counts them, or not at all
            self._bad |= fresh.keys()
            self.handle(BadRecordsFound(now=self.now(), distinct=len(self._bad), fresh=tuple(fresh.values())))

    @property
    def store_problem(self) -> str:
        """What keeps the job's state from being written, and so the job from going on; empty if nothing does."""
        return self._store_problem

    @property
    def checkpoint_cost(self) -> float:
        """Mean seconds of training that the latest checkpoints cost; 0 before the first."""
        costs = list(self._checkpoint_costs)
        return sum(costs) / len(costs) if costs else 0.0

    def take_start_ups(self) -> list[tuple[float, StartedUp]]:
        """Returns the start-ups since the last call, and when they were seen, in seconds since 1970."""
        return [self._start_ups.popleft() for _ in range(len(self._start_ups))]

    def _step(self, event: Event) -> tuple[Granted | LeasesVoid, ...]:
        before = self._state
        self._state, effects = step(before, event, self.spec)
        if self._state.job != before.job:
            self._version += 1
            _log_changes(before.job, self._state.job, self.spec)
        else:
            self._state = replace(self._state, job=before.job)  # equal; identical objects compare faster next time
        answers: list[Granted | LeasesVoid] = []
        for effect in effects:
            match effect:
                case Granted() | LeasesVoid():
                    answers.append(effect)
                case LogEvent() | StartedUp() | Moved() | Reloaded() | CheckpointTaken():
                    self._record(effect)
                case _:
                    self._outbox.append((self._version, effect))
        if effects or self._state.job is not before.job:
            self._changed.notify_all()
        return tuple(answers)

    def _record(self, effect: LogEvent | StartedUp | Moved | Reloaded | CheckpointTaken) -> None:
        """Logs an effect, or keeps its figures for those who ask later."""
        match effect:
            case LogEvent(event=name, fields=fields):
                _log.warning(name, **fields)
            case StartedUp():
                self._start_ups.append((self._wall(), effect))
            case Moved():
                _log.info(
                    "moved",
                    ps=effect.servers,
                    version=self._state.job.routing.table.version,
                    bytes=effect.bytes,
                    rounds=effect.rounds,
                    seconds=round(effect.seconds, 3),
                    held_seconds=round(effect.paused_seconds, 3),
                )
            case Reloaded(forgotten=lost):
                _log.warning(
                    "recovered_partially",
                    servers=list(lost.servers),
                    checkpoint=lost.checkpoint,
                    forgotten_samples=lost.samples,
                    share=round(lost.share, 4),
                    pls=round(self._state.job.pls, 6),
                    seconds=round(effect.seconds, 3),
                )
            case CheckpointTaken():
                if not is_flash(effect.checkpoint):
                    self._checkpoint_costs.append(effect.cost_seconds)
                _log.info(
                    "checkpoint_complete",
                    checkpoint=effect.checkpoint,
                    bytes=effect.bytes,
                    weight_bits=effect.weight_bits,
                    seconds=round(effect.seconds, 3),
                    held_seconds=round(effect.held_seconds, 4),
                    cost_seconds=round(effect.cost_seconds, 3),
                )

    def _has_effect(self) -> bool:
        return self.closing or (bool(self._outbox) and self._outbox[0][0] <= self._durable)

    def _refuse_if_closing(self) -> None:
        if self.closing:
            raise ClosingError("the master is stopping; call again")

    def _refuse_if_unwritable(self) -> None:
        self._refuse_if_closing()
        if self._store_problem:
            raise StoreUnavailableError(self.store.url, self._store_problem)

    def _await_durable(self, version: int) -> None:
        failures = self._store_failures
        while self._durable < version:
            self._refuse_if_closing()
            if self._store_failures > failures:
                raise StoreUnavailableError(self.store.url, self._store_problem)
            self._changed.wait()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.closing or self._durable < self._version)
                if self.closing:
                    return
                job, version = self._state.job, self._version
                self._saving_since = self._clock()
            try:
                self.store.save(job)
            except StoreUnavailableError as error:
                with self._changed:
                    self._saving_since = None
                    self._store_failures += 1
                    if not self._store_problem:
                        _log.error("state_not_writable", problem=str(error))
                    self._store_problem = str(error)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self.closing, _RETRY_SECONDS)
            except DeposedError as error:
                _log.error("deposed", problem=str(error))
                with self._changed:
                    self.closing = True
                    self._changed.notify_all()
                self._on_deposed()
            else:
                with self._changed:
                    self._saving_since = None
                    if self._store_problem:
                        _log.info("state_writable")
                    self._store_problem = ""
                    self._durable = version
                    self._changed.notify_all()

    def _watch(self) -> None:
        seconds = min(_LONGEST_TICK_SECONDS, self.spec.sharding.lease_timeout / 10)
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self.closing, seconds):
                    return
            self.look_at_deadlines()

    def look_at_deadlines(self) -> None:
        """Lets the job know the time, unless the time stands still."""
        with self._changed:
            if not self._members_wait():
                self.note(TimePassed(now=self.now()))

    def _members_wait(self) -> bool:
        """Whether a save takes so long that calls of members wait for it, so that live members seem silent.

        The master's time stands still then, as if it were paused itself. Once the store has failed, calls are refused
        at once, and `hear` notes them.
        """
        since = self._saving_since
        return since is not None and not self._store_problem and self._clock() > since + _LONG_SAVE_SECONDS


def _log_changes(before: JobState, job: JobState, spec: TrainingJobSpec) -> None:
    old, new = phase_of(before, spec), phase_of(job, spec)
    if old is not new:
        reason, message = (job.outcome.reason, job.outcome.message) if job.outcome else ("", "")
        _log.info("phase", phase=str(new), epoch=job.epoch, reason=reason, message=message)
    if job.routing.ready and not before.routing.ready:
        table = job.routing.table
        _log.info("routing_assigned", generation=table.generation, version=table.version)
    earlier, interval = checkpoint_interval(before, spec), checkpoint_interval(job, spec)
    if earlier != interval:
        _log.info("checkpoint_interval_changed", interval_seconds=round(interval, 3), earlier_seconds=round(earlier, 3))
    for kind, trouble in job.troubles.items():
        if before.troubles.get(kind) != trouble:
            _log.warning(
                "operation_retried",
                operation=kind,
                reason=trouble.reason,
                problem=trouble.message,
                attempts=trouble.attempts,
            )
    for kind in before.troubles.keys() - job.troubles.keys():
        if not job.over:
            _log.info("operation_recovered", operation=kind)
