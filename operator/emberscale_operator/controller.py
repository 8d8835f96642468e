"""One job's loop: observe, decide, report, act. Level-triggered, and safe to end between any two calls.

The job machine decides everything. A backend observes the instances, makes each decision durable before it is carried
out, and carries it out. The master's link exchanges everything with the master.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from emberscale_api.errors import UnavailableError
from emberscale_api.frozen import replace
from emberscale_api.job.running import JobPlan, JobStatus
from emberscale_operator.machine import (
    Action,
    Decision,
    Instance,
    InstanceId,
    JobIntent,
    JobStanding,
    MasterReport,
    ReportExit,
    Scale,
    ShutDown,
    Suspend,
    WaitUntil,
    decide,
)
from emberscale_operator.master_link import MasterAddress, MasterLink

_UNHEARD_SECONDS = 1.0


@dataclass(frozen=True)
class Observed:
    """The wanted job and its instances. `master` is the newest running master, if any."""

    job: JobIntent
    instances: tuple[Instance, ...]
    master: InstanceId | None = None


@dataclass(frozen=True)
class Pause:
    """Nothing to decide for this number of seconds; the job's standing can be recalled if it is `known`."""

    seconds: float
    known: bool = False


@dataclass(frozen=True)
class News:
    """The news of one step, for a backend to report.

    * `before`: the job's previous standing.
    * `decision`: the decision of this step.
    * `plan_before`: the plan at the step before; None until one was heard.
    * `plan`: the newest plan.
    * `status`: the newest status of the master that runs, or ran last; None until it was heard.
    * `answers`: the master answers.
    """

    before: JobStanding
    decision: Decision
    plan_before: JobPlan | None
    plan: JobPlan | None
    status: JobStatus | None
    answers: bool


class BackendUnavailableError(UnavailableError):
    """The backend cannot do its part now. The step is taken again after `retry_seconds`."""

    def __init__(self, message: str, retry_seconds: float) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class Backend(Protocol):
    """The platform of a job's instances. Methods raise BackendUnavailableError."""

    async def observe(self, now: float) -> Observed | Pause | None:
        """Returns what is there; None once the job is gone."""

    async def recall(self) -> tuple[JobStanding, JobPlan | None]:
        """Returns what a controller before this one reported; called once, and not before it observed the job."""

    async def address_of(self, master: InstanceId) -> MasterAddress:
        """Returns where a master that was observed is reached."""

    async def report(self, news: News, now: float) -> float:
        """Makes the decision durable, and tells people; returns the seconds until the next look."""

    async def act(self, actions: Sequence[Action], now: float) -> float | None:
        """Carries out what concerns instances and the job; returns the seconds until there may be more to do."""


OpenLink = Callable[[MasterAddress, Callable[[], None]], MasterLink]


class JobController:
    """Drives one job on a backend. `step` and `run` are called by one task only.

    `clock` is in seconds; `open_link` begins the conversation with a master, and is given what wakes the controller.
    """

    def __init__(self, backend: Backend, clock: Callable[[], float], open_link: OpenLink) -> None:
        self._backend = backend
        self._clock = clock
        self._open_link = open_link
        self._woken = asyncio.Event()
        self.standing: JobStanding | None = None
        """The job's standing as of the last decision; None before the first."""
        self._plan: JobPlan | None = None
        self._status: JobStatus | None = None
        self._link: MasterLink | None = None
        self._link_to: InstanceId | None = None
        self._reports: dict[InstanceId, asyncio.Task[bool]] = {}
        self.busy_since: float | None = None
        """When the step that is under way began, by the monotonic clock; None between steps."""

    def wake(self) -> None:
        """Makes the controller look at the job soon."""
        self._woken.set()

    async def run(self) -> None:
        """Takes steps until the job is gone."""
        try:
            while True:
                self._woken.clear()
                self.busy_since = time.monotonic()
                try:
                    delay = await self.step(self._clock())
                except BackendUnavailableError as error:
                    delay = error.retry_seconds
                self.busy_since = None
                if delay is None:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):  # before Python 3.12, wait_for may lose a cancellation
                        await self._woken.wait()
        finally:
            await self._hang_up()

    async def step(self, now: float) -> float | None:
        """Takes one step; returns the seconds until the next may be due, None once the job is gone."""
        observed = await self._backend.observe(now)
        if observed is None:
            return None
        if isinstance(observed, Pause):
            if observed.known:
                await self._recall()
            return observed.seconds
        before, plan_before = self._with_reported(await self._recall()), self._plan
        await self._converse(observed.master, before)
        decision = decide(observed.job, before, self._master(), observed.instances, now)
        news = News(
            before, decision, plan_before, self._plan, self._status, self._link is not None and self._link.answers
        )
        delay = await self._backend.report(news, now)
        self.standing = decision.standing
        if before.rests and not decision.standing.rests:
            await self._hang_up()  # what the master said is outdated
            self._plan = self._status = None
        sooner = await self._act(decision.actions, observed.instances, now)
        return min(delay, sooner) if sooner is not None else delay

    async def _recall(self) -> JobStanding:
        """Returns the job's standing, at first the one that a controller before this one reported."""
        if self.standing is None:
            self.standing, self._plan = await self._backend.recall()
        return self.standing

    def _master(self) -> MasterReport:
        if self._link is not None and self._link.plan is not None:
            return self._link.report()
        # until this master has told its plan, the last one stands
        report = self._link.report() if self._link is not None else MasterReport()
        return replace(report, sizes=self._plan.shapes) if self._plan is not None else report

    async def _converse(self, master: InstanceId | None, standing: JobStanding) -> None:
        """Keeps up the conversation with the newest master, and takes its reports."""
        if master is not None and master != self._link_to:
            await self._hang_up()
            self._link = self._open_link(await self._backend.address_of(master), self.wake)
            self._link_to = master
        elif master is None and standing.rests:
            await self._hang_up()
        if self._link is not None:
            self._plan = self._link.plan or self._plan
            self._status = self._link.status or self._status

    async def _hang_up(self) -> None:
        reports = list(self._reports.values())
        for report in reports:
            report.cancel()
        await asyncio.gather(*reports, return_exceptions=True)
        self._reports.clear()
        if self._link is not None:
            await self._link.close()
            self._link, self._link_to = None, None

    def _with_reported(self, standing: JobStanding) -> JobStanding:
        """Notes which exits the master has accepted; the others are reported again."""
        done = [instance for instance, report in self._reports.items() if report.done()]
        reported = [instance for instance in done if self._reports.pop(instance).result()]
        history = standing.history
        for instance in reported:
            history = history.with_reported(instance)
        return replace(standing, history=history) if reported else standing

    async def _act(self, actions: Sequence[Action], instances: Sequence[Instance], now: float) -> float | None:
        names = {instance.id: instance.name for instance in instances}
        delays: list[float] = []
        rest: list[Action] = []
        for action in actions:
            match action:
                case ReportExit(instance, ended):
                    if self._link is not None and self._link.answers and instance not in self._reports:
                        report = asyncio.create_task(self._link.report_exit(instance, names[instance], ended))
                        report.add_done_callback(lambda _: self.wake())
                        self._reports[instance] = report
                    delays.append(_UNHEARD_SECONDS)
                case Suspend():
                    if self._link is not None:
                        self._link.suspend()
                case Scale():
                    if self._link is not None:
                        self._link.scale(action)
                case ShutDown():
                    if self._link is not None:
                        await self._link.shut_down()
                        self._status = self._link.status or self._status
                    delays.append(0.0)
                case WaitUntil(until):
                    delays.append(max(0.1, until - now))
                case _:
                    rest.append(action)
        later = await self._backend.act(rest, now)
        return min(delays if later is None else [*delays, later], default=None)
