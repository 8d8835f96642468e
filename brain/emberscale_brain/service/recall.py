"""What a brain that no longer runs had planned, from its database."""

from emberscale_api.rpc import brain_pb2 as pb
from emberscale_brain.history.store import HistoryStore
from emberscale_brain.model.features import ModelConstants
from emberscale_brain.planner.types import JobId
from emberscale_brain.service.messages import explanation_to, plan_to
from emberscale_brain.service.settings import CapacitySettings

_PLANS = 11
_PROFILES = 256


def recall(database: str, uid: str) -> pb.PlanExplanation | None:
    """A job's last plan with its reasons; None where it never had one.

    Raises DatabaseAwayError, and DatabaseUnusableError for an address that cannot be one or a newer schema.
    """
    store = HistoryStore.open(database)
    try:
        store.migrate()
        job = JobId(uid)
        plans = store.plans(job, _PLANS)
        if not plans:
            return None
        metadata = store.metadata(job)
        constants = None if metadata is None else ModelConstants.of(metadata, CapacitySettings().bandwidth())
        last, *earlier = plans
        return explanation_to(
            plan_to(last),
            last,
            earlier,
            profiles=store.profiles(job, _PROFILES),
            constants=constants,
        )
    finally:
        store.close()
