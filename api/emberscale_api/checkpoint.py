"""`manifest.json` of a checkpoint: the files in the folder, and the batches that its rows contain.

The folder of a checkpoint is `<spec.checkpoint.uri>/<id>/`. Parameter server i writes its files below `ps-<i>/`; the
master writes the manifest last. A folder without a valid manifest is not a checkpoint.
"""

import json
import re
import zlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from emberscale_api.errors import InvalidError
from emberscale_api.job import TrainingJob
from emberscale_api.job.status import EvaluationResult

MANIFEST_NAME = "manifest.json"

FLASH_PREFIX = "flash-"
"""Begins the id of a flash checkpoint; a number that both tiers share follows, as in other ids."""

FLASH_KEPT_SECONDS = 3600
"""How long Redis keeps what belongs to a flash checkpoint that nobody renews."""


def is_flash(checkpoint: str) -> bool:
    """Whether this is the id of a flash checkpoint."""
    return checkpoint.startswith(FLASH_PREFIX)


def number_of(checkpoint: str) -> int:
    """The number in the id of a checkpoint of either tier: a later one has a larger number."""
    return int(checkpoint.removeprefix(FLASH_PREFIX))


class DamagedCheckpointError(InvalidError):
    """The checkpoint must not be used; the text says which one and why."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="strings")


class CheckpointFile(_Part):
    """A file, its path relative to the checkpoint's folder; `crc32` is `zlib.crc32` of its content."""

    path: str
    bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=1 << 32)


class DataFileIdentity(_Part):
    """A data file as it was when the job indexed it."""

    uri: str
    bytes: int


_SERVER_FOLDER = re.compile(r"ps-\d+")


class EpochApplied(_Part):
    """Batches [start, stop) of an epoch that every parameter server has applied; ascending, disjoint."""

    epoch: int
    ranges: tuple[tuple[int, int], ...]


class CheckpointManifest(_Part):
    """The content of `manifest.json`.

    `seal` is the CRC-32 of the manifest itself, with `seal` set to 0, sorted keys and no spaces. It covers the document
    as written, including fields of a newer version, which are kept.
    """

    format_version: Literal[1] = 1
    id: str
    number: int
    created: datetime
    job_uid: str
    job: TrainingJob
    ps_count: int = Field(ge=1)
    generation: int
    routing_version: int
    epoch: int
    batch_size: int
    training_records: int
    applied: tuple[EpochApplied, ...]
    evaluations: tuple[EvaluationResult, ...]
    training_files: tuple[DataFileIdentity, ...]
    evaluation_files: tuple[DataFileIdentity, ...]
    training_seconds: float
    files: tuple[CheckpointFile, ...]
    seal: int = 0

    @property
    def servers(self) -> tuple[int, ...]:
        """The indexes of the servers that wrote files: those that owned rows."""
        folders = {file.path.partition("/")[0] for file in self.files}
        found = sorted(int(name.removeprefix("ps-")) for name in folders if _SERVER_FOLDER.fullmatch(name))
        return tuple(found) or tuple(range(self.ps_count))

    @property
    def applied_samples(self) -> int:
        """The samples that the rows have seen, those of every epoch counted."""
        batches = sum(stop - start for epoch in self.applied for start, stop in epoch.ranges)
        last, missing = divmod(self.training_records, self.batch_size)
        short = self.batch_size - missing if missing else 0
        return batches * self.batch_size - short * sum(
            any(start <= last < stop for start, stop in epoch.ranges) for epoch in self.applied
        )

    def to_json(self) -> str:
        """The sealed manifest as text."""
        document = json.loads(self.model_dump_json(by_alias=True))
        return json.dumps({**document, "seal": _seal(document)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> "CheckpointManifest":
        """Reads a manifest; `name` is what errors call it. Raises DamagedCheckpointError."""
        try:
            manifest = cls.model_validate_json(text, extra="allow")
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(str(part) for part in problem["loc"]) or "content"
            raise DamagedCheckpointError(f"{name}: {where}: {problem['msg']}") from error
        if _seal(json.loads(text)) != manifest.seal:
            raise DamagedCheckpointError(f"{name}: was altered after it was written (its seal does not match)")
        return manifest


def _seal(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({**document, "seal": 0}, sort_keys=True, separators=(",", ":")).encode())
