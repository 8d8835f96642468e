"""The checkpoints of a run, and its `model/`: the files of the last one."""

import re
import shutil
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec

from emberscale._run.audit import AuditReport, ServerRecord, audit_applied, contradictions_of, with_forgotten
from emberscale._run.preflight import local_path
from emberscale_api.checkpoint import (
    MANIFEST_NAME,
    CheckpointFile,
    CheckpointManifest,
    DamagedCheckpointError,
    Origin,
    weight_bits_of,
)
from emberscale_api.errors import InvalidError, UnavailableError, is_there, os_errors_named
from emberscale_api.job import TrainingJob
from emberscale_api.origin import FIELD, NOTHING_NEW, InitialCheckpoints, changed_file, origin_of

if TYPE_CHECKING:
    from emberscale_trainer.checkpoint.files import PartitionFile, TablePart

_PATIENCE_SECONDS = 10.0
"""The time for which a storage that does not answer is retried."""


_ID = re.compile(r"\d{8,}")


@dataclass(frozen=True)
class SavedCheckpoint:
    """One folder of checkpoint storage.

    * `manifest`: None if there is none that can be read.
    * `problem`: why nothing can be restored from it, as far as its manifest and the sizes of its files tell; empty if
      nothing is wrong.
    * `bytes`: the size of the folder.
    """

    id: str
    manifest: CheckpointManifest | None
    problem: str
    bytes: int

    @property
    def builds_on(self) -> tuple[str, ...]:
        """The earlier checkpoints whose files this one needs, oldest first."""
        return () if self.manifest is None else self.manifest.builds_on

    @property
    def incomplete(self) -> bool:
        """Whether it was never completed, is still being written, or is being removed."""
        return self.problem in (INCOMPLETE, REMOVED)


INCOMPLETE = "has no manifest: it is being written, or was given up"
REMOVED = "was removed meanwhile"


@dataclass(frozen=True)
class TableRows:
    """The rows of one table over all servers.

    `bytes` is the size of its files, including rows that later files replace: weights, optimizer state and counts.
    `exact_bytes` is the size of its rows with weights as float32; `weight_bits` is the fewest bits of a stored weight,
    0 if all are float32.
    """

    name: str
    rows: int
    dimension: int
    optimizer: str
    bytes: int
    exact_bytes: int
    weight_bits: int


@dataclass(frozen=True)
class FoundCheckpoints:
    """Checkpoints of one job, the newest first, and why others cannot be used."""

    complete: tuple[CheckpointManifest, ...]
    damaged: tuple[str, ...]


class SavedCheckpoints:
    """The storage of a job's checkpoints: any fsspec URI. Raises InvalidError for an unusable one."""

    def __init__(self, uri: str, field: str = "spec.checkpoint.uri") -> None:
        """`field` of the manifest names the place."""
        self._uri = uri
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError, OSError) as error:
            raise InvalidError(f"{field}: {uri}: {error}") from error
        self._verified: dict[CheckpointFile, str] = {}

    def refuse_if_used(self) -> None:
        """Raises InvalidError if there are checkpoints: a job would continue from them."""
        manifests = self._manifests()
        if manifests:
            raise InvalidError(
                f"spec.checkpoint.uri: {self._uri} already holds checkpoints, from which a new run would continue: "
                "choose another URI or remove them"
            )

    def uri_of(self, manifest: CheckpointManifest) -> str:
        """Returns the URI of a checkpoint's folder."""
        return f"{self._uri.rstrip('/')}/{manifest.id}"

    def entries(self) -> tuple[SavedCheckpoint, ...]:
        """All checkpoints, the newest first, whether or not they can be restored. Raises InvalidError."""
        with os_errors_named(f"{self._uri}: cannot be read"):
            try:
                self._filesystem.invalidate_cache()
                names = {path.rstrip("/").rpartition("/")[2] for path in self._filesystem.ls(self._root, detail=False)}
                found = sorted(filter(_ID.fullmatch, names), key=int, reverse=True)
                sizes = {name: self._sizes(name) for name in found}
                return tuple(self._entry(name, sizes) for name in found)
            except FileNotFoundError:
                return ()

    def _sizes(self, identifier: str) -> dict[str, int]:
        """The size of each file in the folder of a checkpoint, by its path."""
        root = f"{self._root}/{identifier}"
        return {path: int(info["size"]) for path, info in self._filesystem.find(root, detail=True).items()}

    def _entry(self, identifier: str, sizes: Mapping[str, Mapping[str, int]]) -> SavedCheckpoint:
        root, taken = f"{self._root}/{identifier}", sum(sizes[identifier].values())
        path, manifest, problem = f"{root}/{MANIFEST_NAME}", None, ""
        if path not in sizes[identifier]:
            if refusal := self._refusal(path):
                return SavedCheckpoint(identifier, None, f"{root}: {refusal}", taken)
            return SavedCheckpoint(identifier, None, INCOMPLETE, taken)
        try:
            manifest = CheckpointManifest.from_json(self._filesystem.cat_file(path), path)
            if manifest.id != identifier:
                problem = f"{path}: is the manifest of checkpoint {manifest.id}"
        except FileNotFoundError:  # a job has just removed the checkpoint
            return SavedCheckpoint(identifier, None, INCOMPLETE, taken)
        except DamagedCheckpointError as error:
            problem = str(error)
        for file in () if manifest is None or problem else manifest.files:
            holder = file.checkpoint or identifier
            place = f"{self._root}/{holder}/{file.path}"
            found = sizes.get(holder, {}).get(place)
            if found != file.bytes:
                held = f"has {found} bytes, and should have {file.bytes}"
                if found is None:
                    held = self._refusal(place) or "is missing"
                problem = f"{place}: {held}"
                break
        return SavedCheckpoint(identifier, manifest, problem, taken)

    def _refusal(self, path: str) -> str:
        """Why a file cannot be looked at: to a walk over files, a folder without access looks empty. Else empty."""
        try:
            self._filesystem.info(path)
        except PermissionError as error:
            return f"cannot be read: {error.strerror or error}"
        except (FileNotFoundError, NotADirectoryError):
            pass
        return ""

    def initial(self) -> InitialCheckpoints:
        """Returns the complete checkpoints, for another job to start from. Raises InvalidError."""
        whole = {entry.id: entry for entry in reversed(self.entries()) if not entry.incomplete}

        def read(identifier: str) -> CheckpointManifest:
            entry = whole[identifier]
            if entry.manifest is None or entry.problem:
                raise DamagedCheckpointError(entry.problem)
            return entry.manifest

        return InitialCheckpoints(self._uri, list(whole), read)

    def find(self, job_uids: Container[str] | None) -> FoundCheckpoints:
        """The complete checkpoints of a run, whose jobs have these uids; None means any. Raises InvalidError."""
        found = self.entries()
        whole = [one.manifest for one in found if one.manifest is not None and not one.problem]
        return FoundCheckpoints(
            tuple(manifest for manifest in whole if job_uids is None or manifest.job_uid in job_uids),
            tuple(one.problem for one in found if one.problem and not one.incomplete),
        )

    def bytes_to_verify(self, entries: Iterable[SavedCheckpoint]) -> int:
        """Bytes that `verify` reads of all these together."""
        whole = [entry.manifest for entry in entries if entry.manifest is not None and not entry.problem]
        return sum({file: file.bytes for manifest in whole for file in _shared(manifest)}.values())

    def verify(self, manifest: CheckpointManifest, read: Callable[[int], None]) -> list[str]:
        """Reads every byte of a checkpoint and returns what is wrong with it; `read` is called with bytes read.

        A file on which several checkpoints build is read once.
        """
        # the trainer's tables take a second to import, which only reading rows should cost
        from emberscale_trainer.checkpoint import CheckpointFiles, StorageUnreachableError, Work

        problems: list[str] = []
        try:
            files = CheckpointFiles(self.uri_of(manifest), Work(_PATIENCE_SECONDS, missing_seconds=0))
        except (DamagedCheckpointError, StorageUnreachableError) as error:
            return [str(error)]
        for file, shared in zip(manifest.files, _shared(manifest), strict=True):
            if shared not in self._verified:
                self._verified[shared] = ""
                try:
                    files.read(file.key)
                except (DamagedCheckpointError, StorageUnreachableError) as error:
                    self._verified[shared] = str(error)
                read(file.bytes)
            problems += filter(None, [self._verified[shared]])
        return problems

    def holds(self, identifier: str) -> bool:
        """Whether a checkpoint still has its manifest, which is removed first. Raises InvalidError."""
        self._filesystem.invalidate_cache()
        with os_errors_named(f"{self._uri}: cannot be read"):
            return is_there(self._filesystem, f"{self._root}/{identifier}/{MANIFEST_NAME}")

    def remove(self, identifier: str) -> None:
        """Removes a checkpoint, its manifest first, so that no remainder counts as complete. Raises InvalidError."""
        folder = f"{self._root}/{identifier}"
        for path in (f"{folder}/{MANIFEST_NAME}", folder):
            with os_errors_named(f"{path}: cannot be removed"), suppress(FileNotFoundError):
                self._filesystem.rm(path, recursive=True)

    def tables(self, manifest: CheckpointManifest) -> list[TableRows]:
        """Returns the embedding tables, and last the dense parameters. Raises DamagedCheckpointError."""
        from emberscale_trainer.checkpoint import CheckpointFiles, StorageUnreachableError, Work
        from emberscale_trainer.checkpoint.files import PartitionFile

        try:
            files = CheckpointFiles(self.uri_of(manifest), Work(_PATIENCE_SECONDS, missing_seconds=0))
            shares = [files.parse(f"ps-{index}/partition.json", PartitionFile) for index in manifest.servers]
        except StorageUnreachableError as error:
            raise DamagedCheckpointError(f"{self.uri_of(manifest)}: cannot be read: {error}") from error
        sizes = {file.key: file.bytes for file in manifest.files}
        held = zip(*([(share, part) for part in (*share.tables, share.dense)] for share in shares), strict=True)
        return [_table_rows(parts, sizes) for parts in held]

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
        with os_errors_named(f"spec.checkpoint.uri: {self._uri}: cannot be read"):
            return sorted(self._filesystem.glob(f"{self._root}/*/{MANIFEST_NAME}"))


def check_initial(job: TrainingJob) -> tuple[str, ...]:
    """Returns why the job skips newer checkpoints, if it starts from another job's checkpoint.

    Raises UnusableOriginError if it can start from none of them, and InvalidError if none of its files are new, or one
    has changed since it was trained.
    """
    initial = job.spec.checkpoint.initial_from
    if initial is None:
        return ()
    there = SavedCheckpoints(initial.uri, f"{FIELD}.uri").initial()
    manifest, damaged = there.choose(job)
    origin = origin_of(manifest, there.uri_of(manifest.id), job.spec.data.continuation)
    if origin.trained:
        _refuse_trained_files(origin, job.spec.data.train)
    return tuple(damaged.values())


def _refuse_trained_files(origin: Origin, uris: Sequence[str]) -> None:
    """Raises InvalidError if a file on this machine has changed since its training, or all files are here and trained.

    The job itself looks at files elsewhere.
    """
    # slow to import, so only a job that leaves out files pays for it
    from emberscale_trainer.data.files import expand
    from emberscale_trainer.data.records import DataUnavailableError

    here = [uri for uri in uris if local_path(uri) is not None]
    try:
        present = {file.uri: file.bytes for file in expand(here)}
    except DataUnavailableError:  # a manifest that is only printed may be for another machine
        return
    if changed := changed_file(origin, present):
        raise InvalidError(f"spec.data.train: {changed}")
    if len(here) == len(uris) and present.keys() <= {file.uri for file in origin.trained}:
        raise InvalidError(NOTHING_NEW)


def _table_rows(parts: Sequence[tuple["PartitionFile", "TablePart"]], sizes: Mapping[str, int]) -> TableRows:
    """One table: its part on each server, and the sizes of all files by their keys."""
    first = parts[0][1]
    rows = sum(part.rows for _, part in parts)
    keys = [share.key_of(name) for share, part in parts for name in part.files]
    return TableRows(
        first.name,
        rows,
        first.dimension,
        first.optimizer,
        sum(sizes.get(key, 0) for key in keys),
        rows * first.stride,
        min(filter(None, map(weight_bits_of, keys)), default=0),
    )


def _shared(manifest: CheckpointManifest) -> list[CheckpointFile]:
    """Returns the files of a checkpoint as later ones list them: each with the checkpoint in whose folder it is."""
    return [file.model_copy(update={"checkpoint": file.checkpoint or manifest.id}) for file in manifest.files]


def audit_checkpoints(folder: SavedCheckpoints, found: FoundCheckpoints) -> tuple[AuditReport | None, list[str]]:
    """Returns the audit of the newest sound checkpoint, and why newer ones are not sound."""
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
        shares = manifest.forgotten
        counts = with_forgotten(counts, shares, manifest.training_records, manifest.batch_size)
        origin = manifest.origin
        contradictions = contradictions_of(servers, shares, 0 if origin is None else origin.dense_steps)
        return AuditReport(counts, contradictions, manifest.id, manifest.ps_count, shares, origin), refused
    return None, refused


class ModelUnavailableError(UnavailableError):
    """The files of the checkpoint are unavailable; the text says which and why."""


def export_model(uri: str, checkpoint: str, model: Path) -> None:
    """Copies the checkpoint's files to `model`, and replaces its content.

    Copies rather than hard links, so that damage to a file does not affect both. Raises ModelUnavailableError.
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
    """Returns the first problem of a copy; `shutil` collects (source, target, problem) for each file."""
    if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
        return str(error.args[0][0][2])
    return error.strerror or str(error)
