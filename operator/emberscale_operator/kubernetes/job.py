"""A TrainingJob as the API server holds it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from emberscale_api.compatibility import VERSION
from emberscale_api.errors import InvalidError
from emberscale_api.job import ManifestError, TrainingJob, TrainingJobSpec, cpu_cores, memory_bytes, parse_manifest
from emberscale_api.job.manifest import plain
from emberscale_api.job.newer import UnknownValue, parse_newer_manifest
from emberscale_api.job.roles import Role
from emberscale_api.job.status import TrainingJobStatus, UnreadableStatusError, parse_status
from emberscale_operator.kubernetes import names


@dataclass(frozen=True)
class JobKey:
    """The namespace and name of a job."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Job:
    """One generation of a job.

    `unknown` are the values that this version does not know; `manifest` has the defaults in their place.
    """

    key: JobKey
    uid: str
    generation: int
    manifest: TrainingJob
    unknown: tuple[UnknownValue, ...] = ()

    @property
    def spec(self) -> TrainingJobSpec:
        """The manifest's spec."""
        return self.manifest.spec

    def owned(self, api_version: str, kind: str, name: str, **content: Any) -> dict[str, Any]:
        """Returns an object that is deleted with the job."""
        metadata = {
            "name": name,
            "namespace": self.key.namespace,
            "labels": names.job_labels(self.key.name),
            "ownerReferences": [names.owner_reference(self.key.name, self.uid)],
        }
        return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


class UnreadableJobError(InvalidError):
    """The API server accepted a job that cannot run; the text names the field and the reason."""


def read_job(body: Mapping[str, Any], runs_newer: bool = False) -> Job:
    """Reads the job in an object. Raises UnreadableJobError.

    The API server refuses unknown fields, so a field that is unknown here belongs to a newer definition, which an
    upgrade installs before it replaces the operator. It is kept, because the job's processes may know it. With
    `runs_newer`, those processes have another version, and unknown values are accepted too.
    """
    metadata = body["metadata"]
    key = JobKey(metadata["namespace"], metadata["name"])
    document = {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "metadata": {"name": key.name, "namespace": key.namespace},
        "spec": plain(body.get("spec") or {}),
    }
    unknown: tuple[UnknownValue, ...] = ()
    try:
        if runs_newer:
            manifest, unknown = parse_newer_manifest(document, source="TrainingJob")
        else:
            manifest = parse_manifest(document, source="TrainingJob", unknown="allow")
    except ManifestError as error:
        raise UnreadableJobError(str(error).replace("TrainingJob: ", "")) from error
    return Job(
        key=key,
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        manifest=manifest,
        unknown=unknown,
    )


def read_status(body: Mapping[str, Any]) -> TrainingJobStatus:
    """Returns the status that an operator wrote last, or that of a new job. Raises UnreadableStatusError.

    Texts that only an operator interprets are checked here: other readers show them as they are.
    """
    status = parse_status(plain(body.get("status") or {}))
    for path, text, read in _interpreted(status):
        try:
            read(text)
        except ValueError as error:
            raise UnreadableStatusError(f"version {VERSION} cannot read {path} ({text!r})") from error
    return status


def _interpreted(status: TrainingJobStatus) -> Iterator[tuple[str, str, Callable[[str], object]]]:
    """Yields the path of each such text with what reads it, but for empty quantities, which stand for no limit."""
    for place, member in enumerate(status.members):
        yield f"status.members.{place}.role", member.role, Role
        if member.memory:
            yield f"status.members.{place}.memory", member.memory, memory_bytes
    plans = {"ps": status.plan.ps, "worker": status.plan.worker} if status.plan is not None else {}
    for role, plan in plans.items():
        if plan is not None and plan.cpu:
            yield f"status.plan.{role}.cpu", plan.cpu, cpu_cores
        if plan is not None and plan.memory:
            yield f"status.plan.{role}.memory", plan.memory, memory_bytes


def parse_time(text: str) -> float:
    """Returns the seconds since 1970 of a metav1.Time."""
    return datetime.fromisoformat(text).timestamp()
