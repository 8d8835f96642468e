"""The checkpoints of a run, and its `model/`: the files of the last one."""

import shutil
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import fsspec

from emberscale._run.audit import AuditReport, ServerRecord, audit_applied, contradictions_of
from emberscale._run.preflight import local_path
from emberscale_api.checkpoint import MANIFEST_NAME, CheckpointManifest, DamagedCheckpointError
from emberscale_api.errors import InvalidError, UnavailableError

_PATIENCE_SECONDS = 10.0
"""The time for which a storage that does not answer is retried."""


@dataclass(frozen=True)
class FoundCheckpoints:
    """Checkpoints of one job, the newest first, and why others cannot be used."""

    complete: tuple[CheckpointManifest, ...]
    damaged: tuple[str, ...]


class SavedCheckpoints:
    """The place where a job's checkpoints are: any fsspec URI. Raises InvalidError for one that cannot be used."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError, OSError) as error:
            raise InvalidError(f"spec.checkpoint.uri: {uri}: {error}") from error

    def refuse_if_used(self) -> None:
        """Raises InvalidError if there are checkpoints: a job would continue from them."""
        manifests = self._manifests()
        if manifests:
            raise InvalidError(
                f"spec.checkpoint.uri: {self._uri} already holds checkpoints, from which a new run would continue: "
                "choose another URI or remove them"
            )

    def uri_of(self, manifest: CheckpointManifest) -> str:
        """The folder of one checkpoint."""
        return f"{self._uri.rstrip('/')}/{manifest.id}"

    def find(self, job_uids: Container[str] | None) -> FoundCheckpoints:
        """The complete checkpoints of a run, whose jobs have these uids; None means any. Raises InvalidError."""
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

    def records(self, manifest: CheckpointManifest) -> list[ServerRecord]:
        """Returns each server's saved record. Raises DamagedCheckpointError, also for an unreadable one."""
        # the trainer's tables take a second to import, which only an audit should cost
        from emberscale_trainer.checkpoint import CheckpointFiles, StorageUnreachableError, Work, server_history

        try:
            files = CheckpointFiles(self.uri_of(manifest), Work(_PATIENCE_SECONDS, missing_seconds=0))
            histories = [server_history(files, index) for index in manifest.servers]
        except StorageUnreachableError as error:
            raise DamagedCheckpointError(f"{self.uri_of(manifest)}: cannot be read: {error}") from error
        return [ServerRecord(applied, steps) for applied, steps in histories]

    def _manifests(self) -> list[str]:
        try:
            return sorted(self._filesystem.glob(f"{self._root}/*/{MANIFEST_NAME}"))
        except OSError as error:
            raise InvalidError(f"spec.checkpoint.uri: {self._uri}: cannot be read: {error}") from error


def audit_checkpoints(folder: SavedCheckpoints, found: FoundCheckpoints) -> tuple[AuditReport | None, list[str]]:
    """The audit of the newest checkpoint that is whole, and why newer ones are not."""
    refused = list(found.damaged)
    for manifest in found.complete:
        try:
            servers = folder.records(manifest)
        except DamagedCheckpointError as error:
            refused.append(str(error))
            continue
        counts = audit_applied(
            manifest.training_records,
            manifest.batch_size,
            manifest.job.spec.training.epochs,
            [server.applied for server in servers],
        )
        return AuditReport(counts, contradictions_of(servers), manifest.id, manifest.ps_count), refused
    return None, refused


class ModelUnavailableError(UnavailableError):
    """The files of the checkpoint are unavailable; the text says which and why."""


def export_model(uri: str, checkpoint: str, model: Path) -> None:
    """Copies the checkpoint's files to `model`, and replaces what it held.

    Copies, and no hard links: damage to a file of one must not reach the other. Raises ModelUnavailableError.
    """
    beside = model.with_name(f".{model.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    source = local_path(uri)
    try:
        if source is not None:
            shutil.copytree(source / checkpoint, beside)
        else:
            filesystem, path = fsspec.core.url_to_fs(uri)
            filesystem.get(f"{path}/{checkpoint}/", f"{beside}/", recursive=True)
    except (OSError, shutil.Error) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise ModelUnavailableError(
            f"{model}: checkpoint {checkpoint} in {uri} cannot be copied: {_first_problem(error)}"
        ) from error
    shutil.rmtree(model, ignore_errors=True)
    beside.rename(model)


def _first_problem(error: OSError) -> str:
    """`shutil` gathers what went wrong with each file: (source, target, problem)."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][2])
    return error.strerror or str(error)
