"""The folder of a job's checkpoints, at any fsspec URI."""

import errno
import inspect
import json
import os
import re
import uuid
from collections.abc import Container, Iterable
from pathlib import Path

import fsspec
import structlog
from fsspec.implementations.local import LocalFileSystem

from emberscale_api.checkpoint import (
    MANIFEST_NAME,
    PRIORITY_PREFIX,
    CheckpointFile,
    CheckpointManifest,
    DamagedCheckpointError,
    number_of,
)
from emberscale_api.errors import InvalidError, is_there
from emberscale_api.job import Keeper, TrainingJob, broken_fields

_ID = re.compile(r"^\d{8,}$")
_SAVE = re.compile(rf"^{PRIORITY_PREFIX}\d{{8,}}$")
_log = structlog.get_logger()


class CheckpointFolder:
    """Checkpoints below one URI, which `field` of the manifest names.

    Raises InvalidError; all methods raise OSError if the storage is unreachable.
    """

    def __init__(self, uri: str, field: str = "spec.checkpoint.uri") -> None:
        try:
            self._filesystem, self._root = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError) as error:
            raise InvalidError(f"{field} ({uri}): {error}") from error
        self.uri = uri.rstrip("/")

    def uri_of(self, identifier: str) -> str:
        """The URI of one checkpoint's folder."""
        return f"{self.uri}/{identifier}"

    def folders(self) -> list[str]:
        """Ids of all checkpoints, oldest first, whether complete or not."""
        return self._names(_ID)

    def newest_number(self) -> int:
        """The largest number in the name of a checkpoint or a save of priority rows, complete or not; 0 without any."""
        return max(map(number_of, [*self.folders(), *self._names(_SAVE)]), default=0)

    def _names(self, form: re.Pattern[str]) -> list[str]:
        """The names of folders of a form, ascending."""
        self._filesystem.invalidate_cache()
        try:
            entries = self._filesystem.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = (entry.rstrip("/").rpartition("/")[2] for entry in entries)
        return sorted(name for name in names if form.match(name))

    def complete(self) -> list[str]:
        """Ids of the checkpoints that have a manifest, oldest first."""
        return [name for name in self.folders() if is_there(self._filesystem, self._manifest_path(name))]

    def read(self, identifier: str) -> CheckpointManifest:
        """The manifest of a checkpoint. Raises DamagedCheckpointError."""
        path = self._manifest_path(identifier)
        manifest = CheckpointManifest.from_json(self._filesystem.cat_file(path), path)
        if manifest.id != identifier:
            raise DamagedCheckpointError(f"{path}: is the manifest of checkpoint {manifest.id}")
        self._check_sizes(manifest.id, manifest.files)
        return manifest

    def _check_sizes(self, identifier: str, files: Iterable[CheckpointFile]) -> None:
        """Raises DamagedCheckpointError if a file of a checkpoint is missing or has another size.

        Lists each checkpoint's folder once: on a store of objects, a request for each of thousands of files takes
        longer than the master waits.
        """
        self._filesystem.invalidate_cache()  # another process may have removed what was there before
        listings: dict[str, dict[str, int]] = {}
        for file in files:
            folder = f"{self._root}/{file.checkpoint or identifier}"
            place = f"{folder}/{file.path}"
            if folder not in listings:
                listings[folder] = self._sizes(folder)
            size = listings[folder].get(place)
            try:
                size = self._filesystem.size(place) if size is None else size
            except FileNotFoundError:
                raise DamagedCheckpointError(f"{place}: is missing") from None
            if size != file.bytes:
                raise DamagedCheckpointError(f"{place}: has {size} bytes, and should have {file.bytes}")

    def _sizes(self, folder: str) -> dict[str, int]:
        """The sizes of the files below a folder, by path; empty if there is none.

        Many file systems leave out what they cannot list at present, so a file that is not here may still exist.
        """
        try:
            found = self._filesystem.find(folder, detail=True)
        except FileNotFoundError:
            return {}
        return {path: entry["size"] for path, entry in found.items() if entry.get("size") is not None}

    def write(self, manifest: CheckpointManifest) -> None:
        """Completes a checkpoint by writing its manifest atomically.

        Raises FileNotFoundError if the checkpoint has no files: a write that hung may continue after the checkpoint was
        removed, and must not leave a manifest without files. Raises FileExistsError if another job or master has
        completed a checkpoint of this id. Raises DamagedCheckpointError if a file of an earlier checkpoint on which it
        builds is missing.
        """
        self._check_sizes(manifest.id, [file for file in manifest.files if file.checkpoint])
        content = manifest.to_json().encode()
        path = self._manifest_path(manifest.id)
        if not isinstance(self._filesystem, LocalFileSystem):
            if not is_there(self._filesystem, f"{self._root}/{manifest.id}"):
                raise FileNotFoundError(f"{self.uri_of(manifest.id)} is missing")
            self._create(path, content, manifest)
            return
        target = Path(path)
        draft = target.with_suffix(f".{uuid.uuid4().hex}.writing")  # its own: an earlier write may hang, and go on
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if not target.exists() or _is_torn(target.read_bytes(), path, manifest):
                draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
        for folder in (target.parent, target.parent.parent):  # a name is durable once its folder is
            _sync_folder(folder)

    def _create(self, path: str, content: bytes, manifest: CheckpointManifest) -> None:
        """Writes a manifest only if none exists, by a conditional write where the store supports one.

        Stores report a refused condition differently, so the content at the path decides whether this checkpoint is
        complete. The answer to an earlier attempt may have been lost; a store that does not write files atomically may
        have kept a part of one.
        """
        if "mode" not in inspect.signature(self._filesystem.pipe_file).parameters:
            self._filesystem.pipe_file(path, content)
            return
        try:
            self._filesystem.pipe_file(path, content, mode="create")
        except OSError as error:
            if error.errno != errno.ENOSYS:  # some stores that speak S3 refuse conditions
                try:
                    there = self._filesystem.cat_file(path)
                except FileNotFoundError:
                    raise error from None
                if not _is_torn(there, path, manifest):
                    return
            self._filesystem.pipe_file(path, content)

    def delete(self, identifier: str) -> None:
        """Removes a checkpoint, its manifest first, so that a partial checkpoint never counts as complete."""
        for path in (self._manifest_path(identifier), f"{self._root}/{identifier}"):
            try:
                self._filesystem.rm(path, recursive=True)
            except FileNotFoundError:
                continue

    def discard(self, identifier: str) -> None:
        """Removes an abandoned checkpoint, unless it has a manifest after all."""
        self._filesystem.invalidate_cache()
        if not is_there(self._filesystem, self._manifest_path(identifier)):
            self.delete(identifier)

    def prune(self, keep: int, damaged: Container[str] = ()) -> None:
        """Removes checkpoints older than the newest complete one, except the `keep` newest sound ones.

        Also keeps the checkpoints on which those and newer damaged ones build, since the next one may build on them
        too. Removes saves of priority rows that are older than the newest complete checkpoint.
        """
        kept: list[str] = []
        needed: set[str] = set()
        complete = self.complete()
        for identifier in reversed(complete):
            if len(kept) == keep:
                break
            manifest = self._read_manifest(identifier)
            if manifest is not None and (identifier not in damaged or not kept):
                needed |= {identifier, *manifest.builds_on}
            if manifest is not None and identifier not in damaged:
                kept.append(identifier)
        for identifier in reversed(self.folders()):  # what others build on goes last
            if kept and identifier < kept[0] and identifier not in needed:
                _log.info("checkpoint_removed", checkpoint=identifier)
                self.delete(identifier)
        for save in self._names(_SAVE) if complete else ():
            if number_of(save) < int(complete[-1]):
                self.delete(save)

    def _read_manifest(self, identifier: str) -> CheckpointManifest | None:
        """The manifest of a checkpoint; None if it is damaged."""
        path = self._manifest_path(identifier)
        try:
            return CheckpointManifest.from_json(self._filesystem.cat_file(path), path)
        except DamagedCheckpointError:
            return None

    def _manifest_path(self, identifier: str) -> str:
        return f"{self._root}/{identifier}/{MANIFEST_NAME}"


def _is_torn(content: bytes, path: str, manifest: CheckpointManifest) -> bool:
    """Whether the content is only a part of a manifest: a truncated JSON object does not parse.

    Raises FileExistsError if the content is whole, unless it lists the same files of the same job.
    """
    try:
        there = CheckpointManifest.from_json(content, path)
    except DamagedCheckpointError:
        try:
            json.loads(content)
        except ValueError:
            return True
    else:
        if (there.job_uid, there.files) == (manifest.job_uid, manifest.files):
            return False
    raise FileExistsError(f"{path} was written by another master, or by another job")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def incompatibility(manifest: CheckpointManifest, job: TrainingJob) -> str:
    """Returns why a job cannot continue from a checkpoint, for people; empty if it can."""
    if manifest.job.metadata.name != job.metadata.name:
        return f"it belongs to job {manifest.job.metadata.name}: choose another spec.checkpoint.uri for this one"
    changed = [difference.path for difference in broken_fields(manifest.job, job, Keeper.CHECKPOINT)]
    return f"{', '.join(changed)} must stay as it was when the checkpoint was taken" if changed else ""
