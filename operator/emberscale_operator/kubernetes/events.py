"""Kubernetes Events of jobs, which the operator writes for `kubectl describe`."""

import time
from collections import OrderedDict, deque
from datetime import UTC, datetime
from typing import Any

import structlog

from emberscale_api.job.training_job import API_VERSION, KIND
from emberscale_operator.kubernetes import names
from emberscale_operator.kubernetes.allowance import EVENTS_BURST, events_allowance
from emberscale_operator.kubernetes.client import PAUSE_FACTOR, ApiClient, ApiError, ApiInternalError, path_of
from emberscale_operator.kubernetes.job import Job

_LONGEST_MESSAGE = 1024
_MOST_DELAYED = 1000
_LONGEST_FLUSH_SECONDS = 5.0
_log = structlog.get_logger()


class EventRecorder:
    """The Events of one job: recorded at once, written by `flush`.

    Events are derived from differences between the job's pods and its status, and written before the status that ends
    the difference. If the operator dies in between, the next one repeats the Event. `key` names the occasion, and the
    object's name follows from it, so that a repeated Event exists only once. Delayed Events, the newest thousand of
    them, are lost with the operator. A job that has had very many gets one a second.
    """

    def __init__(self, client: ApiClient, identity: str) -> None:
        self._client = client
        self._identity = identity
        self._told: deque[dict[str, Any]] = deque(maxlen=_MOST_DELAYED)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._next_at = 0.0
        self._allowance = events_allowance()
        self._drops = False

    def normal(self, job: Job, reason: str, message: str, key: str) -> None:
        """Records an Event about something that went as planned."""
        self._tell(job, "Normal", reason, message, key)

    def warning(self, job: Job, reason: str, message: str, key: str) -> None:
        """Records an Event about something that may need action by a user."""
        self._tell(job, "Warning", reason, message, key)

    async def flush(self) -> None:
        """Writes the recorded Events. An Event that the API server refuses is logged, and delays nothing.

        Those that a failing webhook delays, or for which a slow API server leaves no time, are kept for later. Raises
        ApiUnavailableError, and keeps them, too.
        """
        ends = time.monotonic() + _LONGEST_FLUSH_SECONDS  # the job's next steps wait meanwhile
        while self._told and self._next_at <= time.monotonic() < ends:
            began = time.monotonic()
            try:
                await self._write(self._told[0])
            except ApiInternalError as error:
                ended = time.monotonic()
                self._next_at = ended + PAUSE_FACTOR * (ended - began)
                _log.warning("events_delayed", events=len(self._told), problem=str(error))
                return
            self._told.popleft()

    def _tell(self, job: Job, kind: str, reason: str, message: str, key: str) -> None:
        name = f"{job.key.name}.{names.digest(f'{job.uid}/{reason}/{key}')}"
        if name in self._known or not self._may_tell(job):
            return
        self._known[name] = None
        if len(self._known) > EVENTS_BURST:
            self._known.popitem(last=False)
        moment = datetime.now(UTC)
        event: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": job.key.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
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

    def _may_tell(self, job: Job) -> bool:
        """Counts one more Event, unless there have been too many; logs the first that is dropped."""
        allowed = self._allowance.take(time.monotonic())
        if not allowed and not self._drops:
            self._drops = True
            _log.warning("events_dropped", job=str(job.key))
        return allowed

    async def _write(self, event: dict[str, Any]) -> None:
        namespace = event["metadata"]["namespace"]
        try:
            await self._client.create(path_of("v1", "events", namespace), event)
        except ApiError as error:
            if error.status != 409:  # told by an earlier operator
                job = f"{namespace}/{event['involvedObject']['name']}"
                _log.warning("event_not_written", job=job, reason=event["reason"], problem=str(error))
