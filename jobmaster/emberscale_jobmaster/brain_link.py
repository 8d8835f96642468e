"""The link to the brain: it sends profiles and receives plans. Nothing in the job waits for it.

One thread works at the manifest's profile interval. It retries while the brain is unavailable, submits the job again if
the brain has forgotten it, and offers a plan to the machine until the plan can be followed or a newer one comes.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import fsspec
import grpc
import structlog

from emberscale_api.environment import BRAIN_CA
from emberscale_api.frozen import replace
from emberscale_api.job import TrainingJob
from emberscale_api.readable import duration_text
from emberscale_api.rpc import brain_pb2 as pb
from emberscale_api.rpc.brain_pb2_grpc import BrainStub
from emberscale_api.rpc.codec import message_of
from emberscale_api.rpc.tls import handshake_problem
from emberscale_api.rpc.token import open_channel
from emberscale_jobmaster import brain_messages, scaling
from emberscale_jobmaster.events import Advised, Event, FailuresExpected, IntervalAdvised, PlanMissed
from emberscale_jobmaster.figures import phase_of, sizes_of
from emberscale_jobmaster.profiling import Moment, measure, moment
from emberscale_jobmaster.runtime import ClosingError, JobRuntime
from emberscale_jobmaster.scaling import Advice
from emberscale_jobmaster.state import JobState
from emberscale_jobmaster.store import DeposedError, StoreUnavailableError
from emberscale_jobmaster.tasks import InvalidReportError

_CALL_SECONDS = 5.0
_RETRY_SECONDS = 0.5
_FOLLOW_SECONDS = 1.0
_OUTCOME_SECONDS = 5.0
_SIZE_SECONDS = 10.0
"""The time that a submission waits for the size of the data; well below FIRST_PLAN_SECONDS."""
_MOST_UNSURE = 512
"""Profiles that are sent again until the brain's database has them; beyond this number the oldest are dropped."""

_log = structlog.get_logger()

_Reply = TypeVar("_Reply")


class BrainLink:
    """One job's link; `authority` speaks for a brain that serves TLS, `clock` gives seconds since 1970."""

    def __init__(
        self,
        runtime: JobRuntime,
        address: str,
        token: str,
        authority: bytes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runtime = runtime
        self._job: TrainingJob = runtime.job
        self._address = address
        self._authority = authority
        self._channel = open_channel(address, token, authority)
        self._stub = BrainStub(self._channel)
        self._clock = clock
        self._interval = self._job.spec.scaling.profile_interval
        self._submitted = False
        self._away = ""
        self._data_bytes = 0
        self._sized = threading.Event()
        self._advice: Advice | None = None
        self._last: Moment | None = None
        self._sequence = 0
        self._unsure: deque[pb.Profile] = deque(maxlen=_MOST_UNSURE)
        self._start_ups: deque[pb.StartUp] = deque(maxlen=_MOST_UNSURE)
        self._due = 0.0
        self._told_outcome = threading.Event()
        self._closed = False
        self._beginning = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="brain-link", daemon=True)
        self._sizer = threading.Thread(target=self._find_size, name="data-size", daemon=True)

    def start(self) -> None:
        """Begins. A new job without sizes waits for its first plan from here on."""
        self._begun = self._heard_at = time.monotonic()
        # an earlier master submitted a job that is over, and may have ended before it told the outcome
        self._submitted = self._runtime.snapshot()[0].over
        self._sizer.start()
        self._thread.start()

    def finish(self) -> None:
        """Waits briefly until the brain knows the outcome of a job that has ended."""
        state, _ = self._runtime.snapshot()
        if state.over:
            self._told_outcome.wait(_OUTCOME_SECONDS)

    def close(self) -> None:
        """Ends the connection, and the call under way; the thread ends with the runtime."""
        with self._beginning:
            self._closed = True
            self._channel.close()
        self._thread.join(_CALL_SECONDS)

    def _run(self) -> None:
        try:
            while True:
                state, _ = self._runtime.snapshot()
                if not state.over:
                    self._converse(state)
                if (ended := self._await_end()) is not None:
                    self._report_outcome(ended)
                    self._told_outcome.set()
                    return
        except (ClosingError, DeposedError):
            return

    def _await_end(self) -> JobState | None:
        """Waits for a moment; returns the job if its end is durable by then."""
        pause = _RETRY_SECONDS if self._away or not self._submitted else _FOLLOW_SECONDS
        try:
            return self._runtime.wait_until(lambda now: now if now.over else None, min(pause, self._interval))
        except StoreUnavailableError:
            return None  # the runtime says so, and saves again

    def _find_size(self) -> None:
        """Runs in a thread of its own: a call to storage may hang."""
        self._data_bytes = data_bytes(self._job)
        self._sized.set()

    def _may_submit(self) -> bool:
        """Waits a moment for the size of the data; in the end the job is submitted without it."""
        return time.monotonic() - self._begun >= _SIZE_SECONDS or self._sized.wait(_RETRY_SECONDS)

    def _converse(self, state: JobState) -> None:
        if self._submitted or self._may_submit():
            self._speak(state)
        self._follow()

    def _speak(self, state: JobState) -> None:
        try:
            if not self._submitted:
                self._submit(state)
            if time.monotonic() >= self._due:
                self._due = time.monotonic() + self._pause(state)
                self._report()
        except grpc.RpcError as error:
            self._note_away(error)
        else:
            if self._away:
                _log.info("brain_available", address=self._address)
            self._away = ""

    def _pause(self, state: JobState) -> float:
        """Returns the seconds until the next report; a job that waits for room asks more often for it."""
        return min(self._interval, scaling.FIRST_PLAN_SECONDS / 3) if state.scaling.waits_for_plan else self._interval

    def _ask(self, method: "grpc.UnaryUnaryMultiCallable[Any, _Reply]", request: Any) -> _Reply:
        """Makes a call. Raises grpc.RpcError, and ClosingError after `close`.

        gRPC ends the process where a call begins on a closed channel.
        """
        with self._beginning:
            if self._closed:
                raise ClosingError("the link is closed")
            call = method.future(request, timeout=_CALL_SECONDS)
        return call.result()

    def _submit(self, state: JobState) -> None:
        request = brain_messages.submission(self._job, self._runtime.job_uid, state, self._data_bytes, self._clock())
        reply: pb.SubmitJobReply = self._ask(self._stub.SubmitJob, request)
        self._submitted = True
        self._take(reply.plan)
        _log.info("job_submitted", address=self._address, reason=reply.plan.reason)

    def _report(self) -> None:
        """Reports what happened since the last report; then fetches the plan in force."""
        uid = self._runtime.job_uid
        state, seen, spec = self._runtime.view()
        before = self._last
        self._last = now = moment(state, seen, spec, self._runtime.now(), before)
        profile = measure(before, now, spec) if before is not None else None
        if profile is not None:
            wall = self._clock()
            profile = replace(profile, time=wall, checkpoint_cost=self._runtime.checkpoint_cost)
            self._sequence = max(self._sequence + 1, int(wall * 1000))  # ascends though the clock may be set back
            self._unsure.append(message_of(pb.Profile, profile, sequence=self._sequence))
        self._start_ups.extend(
            message_of(pb.StartUp, one, role=one.role.value, time=at) for at, one in self._runtime.take_start_ups()
        )
        request = pb.ReportProfileRequest(job_uid=uid, profiles=self._unsure, start_ups=self._start_ups)
        if request.profiles or request.start_ups:
            reply: pb.ReportProfileReply = self._ask(self._stub.ReportProfile, request)
            for refused in reply.refused:
                _log.warning("profile_refused", reason=refused.reason, problem=refused.message)
            for start_up in reply.refused_start_ups:
                _log.warning("start_up_refused", reason=start_up.reason, problem=start_up.message)
            reasons = {*(no.reason for no in reply.refused), *(no.reason for no in reply.refused_start_ups)}
            if "UnknownJob" in reasons:
                self._submitted = False
            else:
                self._start_ups.clear()  # they carry no sequence number, so a repeated one would count twice
                if reply.durable:
                    self._unsure.clear()
        self._take(self._ask(self._stub.GetPlan, pb.GetPlanRequest(job_uid=uid)))

    def _take(self, plan: pb.BrainPlan) -> None:
        advised = plan.fault_tolerance
        ways = {way.strategy: way.checkpoint_interval for way in advised.ways}
        strategy = self._runtime.spec.fault_tolerance.strategy
        interval = ways.get(strategy, advised.checkpoint_interval)  # the manifest takes precedence
        if math.isfinite(interval) and interval > 0:
            cheapest = brain_messages.strategy(advised)
            self._runtime.note(IntervalAdvised(now=self._runtime.now(), seconds=interval, strategy=cheapest))
        between = plan.fault_tolerance.between_failures
        if math.isfinite(between) and between > 0:
            self._runtime.note(FailuresExpected(now=self._runtime.now(), between_failures=between))
        try:
            given = brain_messages.advice(plan)
        except InvalidReportError as error:
            _log.warning("plan_refused", plan_version=plan.version, problem=str(error))
            return
        if given is not None and given.waits_for_room:  # the machine bounds the wait for room
            self._heard_at = time.monotonic()
        if given is not None and given != self._advice:
            _log.info("plan", plan_version=plan.version, action=plan.action, reason=plan.reason)
            self._advice = given

    def _follow(self) -> None:
        """Offers the plan in force to the machine until the machine follows all of it."""
        given = self._advice
        before, _ = self._runtime.snapshot()
        events: list[Event] = []
        if given is not None:
            events.append(Advised(now=self._runtime.now(), advice=given, wall=self._clock()))
        if time.monotonic() - self._heard_at >= scaling.FIRST_PLAN_SECONDS:
            events.append(PlanMissed(now=self._runtime.now(), why=self._why_no_plan()))
        try:
            for event in events:
                self._runtime.handle(event)
        except StoreUnavailableError as error:
            _log.warning("plan_waits_for_store", problem=str(error))
            return
        after, _ = self._runtime.snapshot()
        if after.scaling.message != before.scaling.message:
            _log.info("scaling", reason=after.scaling.reason, message=after.scaling.message)

    def _why_no_plan(self) -> str:
        return f"the brain at {self._address} gave no plan within {duration_text(scaling.FIRST_PLAN_SECONDS)}" + (
            f" ({self._away})" if self._away else ""
        )

    def _report_outcome(self, state: JobState) -> None:
        """Retries until the brain has received it, or this process ends."""
        _, seen = self._runtime.snapshot()
        request = pb.ReportOutcomeRequest(
            job_uid=self._runtime.job_uid,
            phase=phase_of(state, self._runtime.spec).value,
            rows=sum(seen.rows(state.routing.table.owners).values()),
        )
        sizes = sizes_of(state, self._runtime.spec)
        if sizes.ps.cpu_cores is not None and sizes.worker.cpu_cores is not None:
            request.final_shape.CopyFrom(brain_messages.shape(sizes))
        while self._submitted and not self._runtime.closing:
            try:
                self._ask(self._stub.ReportOutcome, request)
            except grpc.RpcError as error:
                if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT):
                    return
                self._note_away(error)
                self._runtime.pause(_RETRY_SECONDS)
            else:
                return

    def _note_away(self, error: grpc.RpcError) -> None:
        problem = f"{error.code().name}: {error.details()}"
        if error.code() is grpc.StatusCode.NOT_FOUND:
            self._submitted = False
        elif not self._away:
            problem = handshake_problem(self._address, self._authority, BRAIN_CA) or problem
            _log.warning("brain_unavailable", problem=problem)
        self._away = problem


def data_bytes(job: TrainingJob) -> int:
    """Returns the size of the training data in bytes, 0 if it cannot be determined from here."""
    total = 0
    for uri in job.spec.data.train:
        try:
            filesystem, path = fsspec.core.url_to_fs(uri)
            total += sum(filesystem.size(found) or 0 for found in filesystem.glob(path))
        except Exception as error:  # noqa: BLE001  # file systems raise errors of their own libraries
            _log.warning("data_size_unknown", uri=uri, problem=f"{type(error).__name__}: {error}")
    return total
