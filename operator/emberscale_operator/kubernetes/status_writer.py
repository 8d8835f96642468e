"""The status of a TrainingJob on its way to the API server: written if it says something new."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import structlog

from emberscale_api.job.status import TrainingJobStatus
from emberscale_api.job.training_job import API_VERSION, PLURAL
from emberscale_operator.controller import BackendUnavailableError
from emberscale_operator.kubernetes.allowance import status_allowance
from emberscale_operator.kubernetes.client import ApiClient, ApiError, path_of
from emberscale_operator.kubernetes.job import JobKey, read_status
from emberscale_operator.kubernetes.status import (
    dropped_fields,
    merge_patch,
    to_document,
    unknown_after,
    unknown_progress,
    without_progress,
)

_PROGRESS_SECONDS = 5.0
_CONFLICT_SECONDS = 1.0
_log = structlog.get_logger()


class ObjectCache(Protocol):
    """The state of the cluster that is known without a call to it."""

    def job(self, key: JobKey, uid: str) -> Mapping[str, Any] | None:
        """The TrainingJob of this uid as last seen; None if it does not exist."""

    def pods(self, key: JobKey) -> Sequence[Mapping[str, Any]]:
        """The pods that carry the job's label."""


class StatusWriter:
    """Keeps and writes the status of the job of one uid."""

    def __init__(self, key: JobKey, uid: str, cluster: ObjectCache, client: ApiClient) -> None:
        self._key = key
        self._uid = uid
        self._cluster = cluster
        self._client = client
        self._status: TrainingJobStatus | None = None
        self._written: dict[str, Any] = {}
        self._version = "0"
        self._progress_at = 0.0
        self._allowance = status_allowance()
        self._dropped: set[str] = set()

    @property
    def status(self) -> TrainingJobStatus:
        """The status that is known; that of a new job before one was read."""
        return self._status or TrainingJobStatus()

    @property
    def is_read(self) -> bool:
        """Whether a status is known."""
        return self._status is not None

    def read(self, body: Mapping[str, Any]) -> None:
        """Continues from the status that an earlier operator wrote. Raises UnreadableStatusError."""
        self._status = read_status(body)
        self._written = to_document(self._status) if body.get("status") else {}

    def note_version(self, body: Mapping[str, Any]) -> None:
        """Notes the version of the object."""
        self._version = _newest(self._version, body["metadata"]["resourceVersion"])

    def schedule(self, status: TrainingJobStatus, now: float) -> float | None:
        """Plans the write of a status: returns the seconds until it may begin; None if the status says nothing new.

        Progress alone is written seldom. A status with new progress is kept until it is written. Raises
        BackendUnavailableError for one that changes all the time: it is written at a steady pace, and what it records
        is not done before that.
        """
        document = to_document(status)
        if without_progress(document) == without_progress(self._written):
            self._status = status
            if document == self._written:
                return None
            wait = self._progress_at + _PROGRESS_SECONDS - now
            if 0.0 < wait <= _PROGRESS_SECONDS:  # longer if the clock was set back
                return wait
        elif not self._allowance.take(now):
            raise BackendUnavailableError("the status changes too often", self._allowance.wait(now))
        self._progress_at = now
        return 0.0

    async def write(self, status: TrainingJobStatus) -> None:
        """Writes a status. Raises BackendUnavailableError if the job was edited meanwhile."""
        document = to_document(status)
        patch = merge_patch(self._written, document)
        if patch:
            # a patch whose answer is lost may have been applied or not
            self._written = unknown_after(self._written, document)
            await self._patch(patch)
        self._written, self._status = document, status

    async def leave_alone(self, body: Mapping[str, Any], problem: str, now: float) -> None:
        """Adds to a status of another version that this one leaves the job alone."""
        conditions = unknown_progress(body["status"].get("conditions") or (), problem, now)
        if conditions is not None:
            await self._patch({"conditions": conditions})

    async def _patch(self, patch: Mapping[str, Any]) -> None:
        """Changes the status of this job, and not that of a later one of its name.

        The version tells them apart: the API server ignores a uid in the status of a custom resource. The version does
        not match after an edit either; the write is then tried again soon.
        """
        path = path_of(API_VERSION, PLURAL, self._key.namespace, self._key.name) + "/status"
        if (seen := self._cluster.job(self._key, self._uid)) is not None:  # a step may take long
            self.note_version(seen)
        try:
            answer = await self._client.patch(path, {"metadata": {"resourceVersion": self._version}, "status": patch})
        except ApiError as error:
            if error.status == 409:
                _log.warning("status_conflict", job=str(self._key), problem=str(error))
                self._version = await self._held_version()
                raise BackendUnavailableError(str(error), _CONFLICT_SECONDS) from error
            if error.status != 404:  # gone: the watch will tell
                raise
        else:
            self.note_version(answer)
            self._tell_dropped(dropped_fields(patch, answer.get("status") or {}))

    def _tell_dropped(self, fields: set[str]) -> None:
        """Warns once of each field that is not stored: the next operator does not know what it said."""
        if new := fields - self._dropped:
            self._dropped |= new
            _log.warning(
                "status_fields_dropped",
                job=str(self._key),
                crd=PLURAL,
                fields=sorted(new),
                consequence="no later operator knows what they said: install the definition of this version",
            )

    async def _held_version(self) -> str:
        """Asks for the job's version: a watch may be late, and versions begin anew in a store restored from a copy."""
        path = path_of(API_VERSION, PLURAL, self._key.namespace)
        found = await self._client.get(path, fieldSelector=f"metadata.name={self._key.name}")
        held = (body["metadata"] for body in found["items"] or ())
        return next((str(metadata["resourceVersion"]) for metadata in held if metadata["uid"] == self._uid), "0")


def _newest(known: str, told: str) -> str:
    """Returns the newer of two versions of an object: a watch may deliver one that has been replaced since."""
    return max(known, told, key=int)
