"""Warnings about pods, which the API server keeps as Events.

Only they show what keeps a pod from being prepared, such as a volume that cannot be mounted.
"""

import structlog

from emberscale_api.job.status import fitting_reason
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiUnavailableError, path_of
from emberscale_operator.kubernetes.pod_state import Waiting

_SECONDS = 0.5
_KNOWN_SECONDS = 5.0
_PAUSE_SECONDS = 60.0
_LIMIT = "20"
"""The most Events in one answer: whoever may create Events may create any number, and omit their content."""
_log = structlog.get_logger()


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
