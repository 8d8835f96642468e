"""A job's standing and its master's report: with the intent and the instances, the inputs of a decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from emberscale_api.frozen import replace
from emberscale_api.job.roles import MemberId, Role
from emberscale_api.job.running import Scale
from emberscale_api.job.status import RESTING, JobPhase
from emberscale_api.shape import RoleShape
from emberscale_operator.machine.restarts import History


@dataclass(frozen=True)
class JobStanding:
    """A job's phase, and the history that later decisions need. Times are in seconds, on the decision's clock.

    * `active_since`: when it became active, plus the time that it rested; None before that.
    * `rested_at`: when it came to rest; None while it does not.
    * `told`: its master brought it to rest, and informs its members.
    * `suspending_since`: when its suspension began; None unless it is Suspending.
    * `applied_ps`: the number of PS that its master asks for, which move rows before it changes; None while the job
      rests and may resume with any.
    * `store_ready`: its own Redis has been ready.
    * `grown`: bytes of memory that a role needs because it ran out of less.
    * `history`: the past lives of its instances.
    """

    phase: JobPhase = JobPhase.PENDING
    reason: str = ""
    message: str = ""
    active_since: float | None = None
    rested_at: float | None = None
    told: bool = True
    suspending_since: float | None = None
    applied_ps: int | None = None
    store_ready: bool = False
    grown: Mapping[Role, int] = field(default_factory=dict)
    history: History = field(default_factory=History)

    @property
    def rests(self) -> bool:
        """Whether no instance is wanted."""
        return self.phase in RESTING

    def at(self, phase: JobPhase, reason: str, message: str) -> "JobStanding":
        """Returns this standing in an active phase."""
        return replace(self, phase=phase, reason=reason, message=message, rested_at=None, suspending_since=None)

    def resting(self, phase: JobPhase, reason: str, message: str, now: float, told: bool) -> "JobStanding":
        """Returns this standing once the job has come to rest."""
        return replace(
            self, phase=phase, reason=reason, message=message, rested_at=now, told=told, suspending_since=None
        )


@dataclass(frozen=True)
class PhaseNews:
    """A phase and the reason for it."""

    phase: JobPhase
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class MasterReport:
    """The reports of the master.

    * `sizes`: the newest plan; None until one was received.
    * `plan_heard`: the plan is from the master that runs now.
    * `asked`: the numbers of the manifest that it was told last, as it reports them; None before its first report.
    * `told_at`: when it was told them, in seconds; None before that.
    * `end`: how the job came to rest, according to its plan; None while it has not.
    * `status`: the job's phase, according to its status; None until one was received.
    * `silent`: members that it has given up, because they are silent or to have them replaced.
    * `drained`: servers that have given all their rows away: their end is no failure.
    * `joined`: members that have registered with it, by its newest status; None until one was heard.
    * `answers`: it answered the last call.
    * `answers_since`: when its current unbroken series of answers began; None before the first.
    * `heard_at`: when it last answered, in seconds; None before it has.
    * `unanswered_since`: when it first left a call unanswered, if it has not answered one since.
    * `refuses`: it has the token of a Secret that is gone, and so have the members that run.
    * `suspended`: it has answered the request to suspend.
    * `told_to_end_at`: when it was told to end; None before that.
    * `cannot_be_told`: it refused to be told to end.
    """

    sizes: Mapping[Role, RoleShape] | None = None
    plan_heard: bool = False
    asked: Scale | None = None
    told_at: float | None = None
    end: PhaseNews | None = None
    status: PhaseNews | None = None
    silent: frozenset[MemberId] = frozenset()
    drained: frozenset[MemberId] = frozenset()
    joined: frozenset[MemberId] | None = None
    answers: bool = False
    answers_since: float | None = None
    heard_at: float | None = None
    unanswered_since: float | None = None
    refuses: bool = False
    suspended: bool = False
    told_to_end_at: float | None = None
    cannot_be_told: bool = False
