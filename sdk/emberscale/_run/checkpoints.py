"""The checkpoints of a run, as far as people ask about them."""

import zlib
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import fsspec
from pydantic import BaseModel, ConfigDict, ValidationError

from emberscale._run.audit import AuditReport, Runs, audit_applied
from emberscale_api.checkpoint import MANIFEST_NAME, CheckpointManifest, DamagedCheckpointError
from emberscale_api.errors import BadInputError


class _EpochRuns(BaseModel):
    model_config = ConfigDict(extra="forbid")

    epoch: int
    runs: list[tuple[int, int, int]]


class _AppliedFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    epochs: list[_EpochRuns]


@dataclass(frozen=True)
class FoundCheckpoints:
    """Checkpoints of one job, the newest first, and why others cannot be used."""

    complete: tuple[CheckpointManifest, ...]
    damaged: tuple[str, ...]


class SavedCheckpoints:
    """The place where a job's checkpoints are: any fsspec URI. Raises BadInputError for one that cannot be used."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError, OSError) as error:
            raise BadInputError(f"spec.checkpoint.uri: {uri}: {error}") from error

    def refuse_if_used(self) -> None:
        """Raises BadInputError if there are checkpoints: a job goes on from those that it finds."""
        manifests = self._manifests()
        if manifests:
            raise BadInputError(
                f"spec.checkpoint.uri: {self._uri} holds checkpoints already, and a new run would go on from them: "
                "name another place, or remove them"
            )

    def uri_of(self, manifest: CheckpointManifest) -> str:
        """The folder of one checkpoint."""
        return f"{self._uri.rstrip('/')}/{manifest.id}"

    def find(self, job_uids: Container[str] | None) -> FoundCheckpoints:
        """The complete checkpoints of a run, whose jobs have these uids; None means any. Raises BadInputError."""
        complete, damaged = [], []
        for path in self._manifests():
            try:
                manifest = CheckpointManifest.from_json(self._filesystem.cat_file(path), path)
            except DamagedCheckpointError as error:
                damaged.append(str(error))
                continue
            if job_uids is None or manifest.job_uid in job_uids:
                complete.append(manifest)
        return FoundCheckpoints(
            tuple(sorted(complete, key=lambda manifest: manifest.number, reverse=True)), tuple(damaged)
        )

    def applied(self, manifest: CheckpointManifest) -> list[dict[int, Runs]]:
        """What each server had applied at the cut, by epoch. Raises DamagedCheckpointError."""
        return [self._applied(manifest, f"ps-{index}/applied.json") for index in range(manifest.ps_count)]

    def _manifests(self) -> list[str]:
        try:
            return sorted(self._filesystem.glob(f"{self._root}/*/{MANIFEST_NAME}"))
        except OSError as error:
            raise BadInputError(f"spec.checkpoint.uri: {self._uri}: cannot be read: {error}") from error

    def _applied(self, manifest: CheckpointManifest, name: str) -> dict[int, Runs]:
        path = f"{self._root}/{manifest.id}/{name}"
        recorded = next((file for file in manifest.files if file.path == name), None)
        if recorded is None:
            raise DamagedCheckpointError(f"{path}: the checkpoint's manifest does not list it")
        try:
            content: Any = self._filesystem.cat_file(path)
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: cannot be read: {error}") from error
        if len(content) != recorded.bytes or zlib.crc32(content) != recorded.crc32:
            raise DamagedCheckpointError(f"{path}: was altered after it was written (its checksum does not match)")
        try:
            applied = _AppliedFile.model_validate_json(content)
        except ValidationError as error:
            raise DamagedCheckpointError(f"{path}: is not a record of applied batches") from error
        return {epoch.epoch: epoch.runs for epoch in applied.epochs}


def audit_checkpoints(folder: SavedCheckpoints, found: FoundCheckpoints) -> tuple[AuditReport | None, list[str]]:
    """The audit of the newest checkpoint that is whole, and why newer ones are not."""
    refused = list(found.damaged)
    for manifest in found.complete:
        try:
            servers = folder.applied(manifest)
        except DamagedCheckpointError as error:
            refused.append(str(error))
            continue
        counts = audit_applied(
            manifest.training_records, manifest.batch_size, manifest.job.spec.training.epochs, servers
        )
        return AuditReport(counts, manifest.id, manifest.ps_count), refused
    return None, refused
