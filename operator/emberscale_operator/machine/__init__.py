"""The job machine: pure, and whole.

`decide` (in `decision`) takes the job's intent (`intent`), its previous standing (`standing`), its master's report and
the observed instances (`instances`). It returns the new standing and the actions to take (`actions`). `restarts` counts
what has ended, and delays the next start; `convergence` turns demands into creations and deletions. `kubernetes/` and
`local/` carry the actions out; nothing else makes decisions about a job.
"""

from emberscale_api.job.running import Scale
from emberscale_operator.machine.actions import (
    Action,
    Create,
    Delete,
    DeleteJob,
    Forget,
    Kill,
    ReportExit,
    Resize,
    ShutDown,
    Suspend,
    WaitUntil,
)
from emberscale_operator.machine.decision import Decision, decide
from emberscale_operator.machine.instances import (
    ExitReason,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    Resources,
)
from emberscale_operator.machine.intent import Demand, JobIntent, Policy, demands_of, leave_seconds
from emberscale_operator.machine.restarts import History, Lives
from emberscale_operator.machine.standing import JobStanding, MasterReport, PhaseNews

__all__ = [
    "Action",
    "Create",
    "Decision",
    "Delete",
    "DeleteJob",
    "Demand",
    "ExitReason",
    "Forget",
    "History",
    "Instance",
    "InstanceExit",
    "InstanceId",
    "InstanceState",
    "JobIntent",
    "JobStanding",
    "Kill",
    "Lives",
    "MasterReport",
    "PhaseNews",
    "Policy",
    "ReportExit",
    "Resize",
    "Resources",
    "Scale",
    "ShutDown",
    "Suspend",
    "WaitUntil",
    "decide",
    "demands_of",
    "leave_seconds",
]
