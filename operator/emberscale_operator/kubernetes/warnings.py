"""What keeps a pod from being prepared, such as a volume that cannot be mounted: it shows in the pod's Events only."""

from emberscale_operator.kubernetes.client import ApiClient, core
from emberscale_operator.kubernetes.pod_state import Waiting

_SECONDS = 0.5
_KNOWN_SECONDS = 5.0
_LIMIT = "20"
"""Events in one answer: whoever may create Events may create any number of them, and leave out what they say."""


class PodWarnings:
    """The last Warning of pods, for the controllers of all jobs.

    For each answer the API server reads every Event of the namespace: they share one question every half second, so
    that hundreds of jobs that start at once do not ask it to a standstill.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._next_at = 0.0
        self._known: dict[str, tuple[float, Waiting | None]] = {}

    async def last(self, namespace: str, uid: str, now: float) -> Waiting | None:
        """What the last Warning about a pod says, as far as it is known at `now`, in seconds since 1970."""
        asked_at, known = self._known.get(uid, (0.0, None))
        if now < max(self._next_at, asked_at + _KNOWN_SECONDS):
            return known
        self._next_at = now + _SECONDS
        selector = f"involvedObject.uid={uid},type=Warning"
        found = await self._client.get(core(namespace, "events"), fieldSelector=selector, limit=_LIMIT)
        events = sorted(found["items"], key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
        known = None
        if events:
            known = Waiting(events[-1].get("reason") or "Unknown", events[-1].get("message") or "")
        self._known = {of: entry for of, entry in self._known.items() if now < entry[0] + 2 * _KNOWN_SECONDS}
        self._known[uid] = now, known
        return known
