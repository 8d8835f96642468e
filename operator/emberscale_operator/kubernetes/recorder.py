"""Events: what the operator did with a job and why, for `kubectl describe`."""

import asyncio
from datetime import UTC, datetime

import structlog

from emberscale_operator.kubernetes import names
from emberscale_operator.kubernetes.client import ApiClient, ApiError, ApiUnavailableError, core
from emberscale_operator.kubernetes.job import Job

_LONGEST_MESSAGE = 1024
_log = structlog.get_logger()


class Recorder:
    """Writes Events in the background; an Event that cannot be written is logged, and holds nothing up.

    `key` names the occasion: the same occasion is recorded once, however often the operator comes back to it.
    """

    def __init__(self, client: ApiClient, identity: str) -> None:
        self._client = client
        self._identity = identity
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: set[str] = set()

    def normal(self, job: Job, reason: str, message: str, key: str) -> None:
        """Something went as it should."""
        self._record(job, "Normal", reason, message, key)

    def warning(self, job: Job, reason: str, message: str, key: str) -> None:
        """Something that a person may want to act on."""
        self._record(job, "Warning", reason, message, key)

    async def drain(self) -> None:
        """Waits for what is being written."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)

    def _record(self, job: Job, kind: str, reason: str, message: str, key: str) -> None:
        name = f"{job.key.name}.{names.digest(f'{job.uid}/{reason}/{key}')}"
        if name in self._known:
            return
        self._known.add(name)
        if len(self._known) > 100_000:
            self._known = {name}
        moment = datetime.now(UTC)
        event = {
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
        task = asyncio.create_task(self._write(job, event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, job: Job, event: dict[str, object]) -> None:
        try:
            await self._client.create(core(job.key.namespace, "events"), event)
        except ApiError as error:
            if error.status != 409:  # recorded before the operator was restarted
                _log.warning("event not written", job=str(job.key), reason=event["reason"], problem=str(error))
        except ApiUnavailableError as error:
            _log.warning("event not written", job=str(job.key), reason=event["reason"], problem=str(error))
