"""The reconciler: a pure function from what is wanted and what is observed to what is to be done."""

from emberscale_operator.machine.instances import (
    ExitReason,
    Instance,
    InstanceExit,
    InstanceId,
    InstanceState,
    Resources,
    Role,
)
from emberscale_operator.machine.memory import grown_memory
from emberscale_operator.machine.reconciler import (
    Action,
    Create,
    Delete,
    Demand,
    Desired,
    Fail,
    Policy,
    ReportExit,
    Resize,
    Wait,
    reconcile,
)
from emberscale_operator.machine.restarts import Backoff, History, advance

__all__ = [
    "Action",
    "Backoff",
    "Create",
    "Delete",
    "Demand",
    "Desired",
    "ExitReason",
    "Fail",
    "History",
    "Instance",
    "InstanceExit",
    "InstanceId",
    "InstanceState",
    "Policy",
    "ReportExit",
    "Resize",
    "Resources",
    "Role",
    "Wait",
    "advance",
    "grown_memory",
    "reconcile",
]
