"""Events: what the operator did with a job and why, for `kubectl describe`."""

from collections import deque
from datetime import UTC, datetime
from typing import Any

import structlog

from emberscale_operator.kubernetes import names
from emberscale_operator.kubernetes.client import ApiClient, ApiError, core
from emberscale_operator.kubernetes.job import Job

_LONGEST_MESSAGE = 1024
_log = structlog.get_logger()


class EventRecorder:
    """The Events of one job: told at once, written by `flush`.

    They are told from what differs between the job's pods and its status, and written before the status that ends the
    difference: an operator that dies in between leaves it to the next, which tells the same again. `key` names the
    occasion, and the object's name follows from it, so that what is told twice is there once.
    """

    def __init__(self, client: ApiClient, identity: str) -> None:
        self._client = client
        self._identity = identity
        self._told: deque[dict[str, Any]] = deque()
        self._known: set[str] = set()

    def normal(self, job: Job, reason: str, message: str, key: str) -> None:
        """Something went as it should."""
        self._tell(job, "Normal", reason, message, key)

    def warning(self, job: Job, reason: str, message: str, key: str) -> None:
        """Something that a person may want to act on."""
        self._tell(job, "Warning", reason, message, key)

    async def flush(self) -> None:
        """Writes what was told. One that the API server refuses is logged, and holds nothing up.

        Raises ApiUnavailableError; what is not written by then is kept.
        """
        while self._told:
            await self._write(self._told[0])
            self._told.popleft()

    def _tell(self, job: Job, kind: str, reason: str, message: str, key: str) -> None:
        name = f"{job.key.name}.{names.digest(f'{job.uid}/{reason}/{key}')}"
        if name in self._known:
            return
        self._known.add(name)
        moment = datetime.now(UTC)
        event: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": job.key.namespace},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "namespace": job.key.namespace,
                "name": job.key.name,
                "uid": job.uid,
            },
            "type": kind,
            "reason": reason,
            "action": reason,
            "message": message[:_LONGEST_MESSAGE],
            "source": {"component": names.COMPONENT},
            "reportingComponent": names.COMPONENT,
            "reportingInstance": self._identity[:128],
            "eventTime": moment.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "firstTimestamp": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lastTimestamp": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "count": 1,
        }
        self._told.append(event)

    async def _write(self, event: dict[str, Any]) -> None:
        namespace = event["metadata"]["namespace"]
        try:
            await self._client.create(core(namespace, "events"), event)
        except ApiError as error:
            if error.status != 409:  # told by an operator before this one
                job = f"{namespace}/{event['involvedObject']['name']}"
                _log.warning("event not written", job=job, reason=event["reason"], problem=str(error))
