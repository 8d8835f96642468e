"""Kubernetes Events: the operator writes some for `kubectl describe`, and reads Warnings about pods.

Only a pod's Events show what keeps the pod from being prepared, such as a volume that cannot be mounted.
"""

import time
from collections import deque
from datetime import UTC, datetime
from typing import Any

import structlog

from emberscale_api.job.status import fitting_reason
from emberscale_operator.kubernetes import names
from emberscale_operator.kubernetes.client import (
    PAUSE_FACTOR,
    ApiClient,
    ApiError,
    ApiInternalError,
    ApiUnavailableError,
    path_of,
)
from emberscale_operator.kubernetes.job import Job
from emberscale_operator.kubernetes.pod_state import Waiting

_LONGEST_MESSAGE = 1024
_MOST_DELAYED = 1000
_log = structlog.get_logger()


class EventRecorder:
    """The Events of one job: told at once, written by `flush`.

    Events are derived from differences between the job's pods and its status, and written before the status that ends
    the difference. If the operator dies in between, the next one repeats the Event. `key` names the occasion, and the
    object's name follows from it, so that a repeated Event exists only once. Events that a failing webhook delays, the
    newest thousand of them, are lost with the operator.
    """

    def __init__(self, client: ApiClient, identity: str) -> None:
        self._client = client
        self._identity = identity
        self._told: deque[dict[str, Any]] = deque(maxlen=_MOST_DELAYED)
        self._known: set[str] = set()
        self._next_at = 0.0

    def normal(self, job: Job, reason: str, message: str, key: str) -> None:
        """Tells of something that went as planned."""
        self._tell(job, "Normal", reason, message, key)

    def warning(self, job: Job, reason: str, message: str, key: str) -> None:
        """Tells of something that may need action by a user."""
        self._tell(job, "Warning", reason, message, key)

    async def flush(self) -> None:
        """Writes the Events that were told. An Event that the API server refuses is logged, and delays nothing.

        Nor does a webhook that fails: the Events are kept for later. Raises ApiUnavailableError, and keeps them, too.
        """
        while self._told and time.monotonic() >= self._next_at:
            began = time.monotonic()
            try:
                await self._write(self._told[0])
            except ApiInternalError as error:
                ended = time.monotonic()
                self._next_at = ended + PAUSE_FACTOR * (ended - began)
                _log.warning("events_delayed", waiting=len(self._told), problem=str(error))
                return
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
            await self._client.create(path_of("v1", "events", namespace), event)
        except ApiError as error:
            if error.status != 409:  # told by an earlier operator
                job = f"{namespace}/{event['involvedObject']['name']}"
                _log.warning("event_not_written", job=job, reason=event["reason"], problem=str(error))


_SECONDS = 0.5
_KNOWN_SECONDS = 5.0
_PAUSE_SECONDS = 60.0
_LIMIT = "20"
"""The most Events in one answer: whoever may create Events may create any number, and omit their content."""


class PodWarnings:
    """The last Warning of pods, for the controllers of all jobs.

    For each answer the API server reads every Event of the namespace. So all controllers share one request per half
    second, or hundreds of jobs that start at once would overload the server.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._next_at = 0.0
        self._known: dict[str, tuple[float, Waiting | None]] = {}
        self._paused: dict[str, float] = {}

    async def last(self, namespace: str, uid: str, now: float) -> Waiting | None:
        """Returns the text of the last Warning about a pod that is known at `now`, in seconds since 1970.

        A namespace whose Events cannot be listed is left alone for a while: it may have too many of them.
        """
        asked_at, known = self._known.get(uid, (0.0, None))
        if now < max(self._next_at, asked_at + _KNOWN_SECONDS, self._paused.get(namespace, 0.0)):
            return known
        self._next_at = now + _SECONDS
        self._paused[namespace] = now + _PAUSE_SECONDS  # no other is to wait for the end of its time, too
        selector = f"involvedObject.uid={uid},type=Warning"
        try:
            found = await self._client.get(path_of("v1", "events", namespace), fieldSelector=selector, limit=_LIMIT)
        except (ApiError, ApiUnavailableError) as error:
            _log.warning("warnings_not_listed", namespace=namespace, problem=str(error))
            return known
        self._paused.pop(namespace, None)
        events = sorted(found["items"], key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        known = None
        if events:
            last = events[-1]
            known = Waiting(*fitting_reason(last.get("reason") or "", last.get("message") or "", "Unknown"))
        self._known = {of: entry for of, entry in self._known.items() if now < entry[0] + 2 * _KNOWN_SECONDS}
        self._known[uid] = now, known
        return known
