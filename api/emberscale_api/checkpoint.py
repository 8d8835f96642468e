"""`manifest.json` of a checkpoint: the files in the folder, and the batches that its rows contain.

The folder of a checkpoint is `<spec.checkpoint.uri>/<id>/`. Parameter server i writes its files below `ps-<i>/`; the
master writes the manifest last. A folder without a valid manifest is not a checkpoint.

The name of a file of rows says how their weights are stored: `.rows` as float32, `.b4` as codes of 4 bits, and so on.

A checkpoint that builds on earlier ones lists their files, too: readers need only its manifest, and the folders beside
its own.

Saves of priority rows, beside the checkpoints, are folders of the same form whose names begin with PRIORITY_PREFIX.
They have some rows only, and complete a checkpoint for partial recovery.
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from emberscale_api.errors import InvalidError
from emberscale_api.job import DataContinuation, TrainingJob
from emberscale_api.job.status import EvaluationResult
from emberscale_api.routing import BUCKETS

MANIFEST_NAME = "manifest.json"

FLASH_PREFIX = "flash-"
"""Begins the id of a flash checkpoint; a number that both tiers share follows, as in other ids."""

FLASH_KEPT_SECONDS = 3600
"""How long Redis keeps the keys of a flash checkpoint that is not renewed."""


PRIORITY_PREFIX = "priority-"
"""Begins the id of a save of priority rows; a number that it shares with checkpoints follows."""

PRIORITY_SHARE = 0.125
"""r of CPR (section 5.1): the part of a table's rows in such a save, and of the checkpoint interval between two."""


def is_priority(checkpoint: str) -> bool:
    """Whether this is the id of a save of priority rows."""
    return checkpoint.startswith(PRIORITY_PREFIX)


def is_flash(checkpoint: str) -> bool:
    """Whether this is the id of a flash checkpoint."""
    return checkpoint.startswith(FLASH_PREFIX)


def id_in(uri: str) -> str:
    """Returns the id of the checkpoint, or of the save of priority rows, with this folder."""
    return uri.rstrip("/").rpartition("/")[2]


def number_of(checkpoint: str) -> int:
    """Returns the number in the id of a checkpoint or save of priority rows; later ones have larger numbers."""
    return int(checkpoint.rpartition("-")[2])


class DamagedCheckpointError(InvalidError):
    """The checkpoint must not be used; the text says which one and why.

    `file` is the URI of the damaged file; empty if no other checkpoint can share the damage.
    """

    def __init__(self, problem: str, file: str = "") -> None:
        super().__init__(problem)
        self.file = file


class _ManifestPart(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="strings")


class CheckpointFile(_ManifestPart):
    """A file of a checkpoint; `path` is relative to the folder, and `crc32` is `zlib.crc32` of the content.

    `checkpoint` is the id of the earlier checkpoint whose folder has the file; empty: this checkpoint's own.
    """

    path: str = Field(pattern=r"^[^/.][^/]*(/[^/.][^/]*)*$")
    bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=1 << 32)
    checkpoint: str = Field(default="", pattern=r"^(\d{8,})?$")

    @property
    def key(self) -> str:
        """The name of the file among all that a checkpoint lists: `<path>`, or `<earlier checkpoint>/<path>`."""
        return f"{self.checkpoint}/{self.path}" if self.checkpoint else self.path


class DataFileIdentity(_ManifestPart):
    """A data file as it was when the job indexed it."""

    uri: str
    bytes: int


class Origin(_ManifestPart):
    """The checkpoint of another history from which a job started.

    * `checkpoint`: the URI of its folder. `job`, `job_uid`: its job. `samples`: the samples that its rows had seen.
    * `continuation`: what the job did with the data of its origin.
    * `trained`: training files that count as trained before the job, which does not read them.
    * `dense_steps`: the steps that each dense piece counts in addition to the applied batches.
    """

    checkpoint: str
    job: str
    job_uid: str
    samples: int = Field(ge=0)
    continuation: DataContinuation
    trained: tuple[DataFileIdentity, ...] = ()
    dense_steps: int = Field(default=0, ge=0)


_QUANTISED, _FORMERLY_QUANTISED = re.compile(r"\.b([2348])"), re.compile(r"\.q[2348]")
"""The suffixes of files of quantised rows: of blocks, and of records before format 4."""


def rows_suffix(weight_bits: int) -> str:
    """Returns the suffix of files of rows whose weights are stored in `weight_bits` bits; 0: as float32."""
    return f".b{weight_bits}" if weight_bits else ".rows"


def weight_bits_of(path: str) -> int:
    """Returns the bits of each weight in a file, by its name; 0 for anything but quantised rows."""
    match = _QUANTISED.fullmatch(_ending(path))
    return int(match[1]) if match else 0


def _ending(path: str) -> str:
    return path[path.rfind(".") :]


def _formerly_quantised(paths: Iterable[str]) -> str | None:
    """Returns the first file of rows that are quantised as before format 4; None if there is none."""
    return next((path for path in paths if _FORMERLY_QUANTISED.fullmatch(_ending(path))), None)


def fewest_weight_bits(paths: Iterable[str]) -> int:
    """Returns the fewest bits of a weight in any of these files; 0 if all are exact."""
    return min(filter(None, map(weight_bits_of, paths)), default=0)


def format_of(paths: Iterable[str], *, incremental: bool = False, partial_rows: str = "") -> Literal[1, 2, 3, 4]:
    """Returns the format version of a checkpoint with these files: the oldest that supports them.

    `incremental`: some of them are in folders of earlier checkpoints. `partial_rows`: as in the manifest. Raises
    InvalidError for files of quantised rows that a server of an earlier version wrote.
    """
    paths = tuple(paths)
    if (file := _formerly_quantised(paths)) is not None:
        raise InvalidError(f"{file} is quantised as before format 4: give all processes of the job one image")
    if any(map(weight_bits_of, paths)):
        return 4
    if partial_rows:
        return 3
    return 2 if incremental else 1


_SERVER_FOLDER = re.compile(r"ps-\d+")


class EpochApplied(_ManifestPart):
    """Batches [start, stop) of an epoch that every parameter server has applied; ascending, disjoint."""

    epoch: int
    ranges: tuple[tuple[int, int], ...]


class ForgottenShare(_ManifestPart):
    """Batches that count as applied everywhere, though the rows of lost servers have forgotten them.

    * `servers`: the indexes of the lost servers. `checkpoint`: the id of the one from which their share was reloaded;
      empty: it was rebuilt from parity that lagged.
    * `epochs`: the batches. `samples`: the number of their samples.
    * `buckets`, `pieces`: [first, stop) ranges of the lost buckets and dense pieces.
    * `pls`: the addition to the portion of lost samples (CPR equation 3, with the share of all buckets that were
      lost for its 1 / N_emb).
    * `priority_saves`: the saves of priority rows that were loaded over the checkpoint. These rows lost less than
      `epochs` and `pls` say, which count them like all others.
    """

    servers: tuple[int, ...]
    checkpoint: str
    epochs: tuple[EpochApplied, ...]
    samples: int = Field(ge=0)
    buckets: tuple[tuple[int, int], ...]
    pieces: tuple[tuple[int, int], ...]
    pls: float = Field(ge=0)
    priority_saves: int = Field(default=0, ge=0)

    @property
    def share(self) -> float:
        """The part of all buckets that was lost, 0 to 1."""
        return sum(stop - first for first, stop in self.buckets) / BUCKETS


NEWEST_FORMAT = 4
"""The newest version of the format that this version reads."""


class CheckpointManifest(_ManifestPart):
    """The content of `manifest.json`.

    `format_version` is 4 if weights are quantised, 3 for priority rows, 2 if files of earlier checkpoints are needed,
    which readers of version 1 do not support, and otherwise 1. `partial_rows` is the id of an earlier checkpoint if
    these are only some of its rows, as they were later; empty: they are all rows. `forgotten` lists what recoveries
    took from the rows before the checkpoint. `restores` counts earlier restores of the rows from quantised
    weights, by their bits. `origin` is the checkpoint from which the job started; None: it started from nothing.

    `seal` is the CRC-32 of the manifest itself, with `seal` set to 0, sorted keys and no spaces. It covers the document
    as written, including fields of a newer version, which are kept.
    """

    format_version: Literal[1, 2, 3, 4] = 1
    id: str
    number: int
    created: datetime
    job_uid: str
    job: TrainingJob
    ps_count: int = Field(ge=1)
    generation: int
    routing_version: int
    epoch: int
    batch_size: int = Field(ge=1)
    training_records: int
    applied: tuple[EpochApplied, ...]
    evaluations: tuple[EvaluationResult, ...]
    training_files: tuple[DataFileIdentity, ...]
    evaluation_files: tuple[DataFileIdentity, ...]
    training_seconds: float
    files: tuple[CheckpointFile, ...]
    forgotten: tuple[ForgottenShare, ...] = ()
    restores: dict[int, int] = {}
    origin: Origin | None = None
    partial_rows: str = ""
    seal: int = 0

    @property
    def servers(self) -> tuple[int, ...]:
        """The indexes of the servers that owned rows and therefore wrote files."""
        folders = {file.path.partition("/")[0] for file in self.files if not file.checkpoint}
        found = sorted(int(name.removeprefix("ps-")) for name in folders if _SERVER_FOLDER.fullmatch(name))
        return tuple(found) or tuple(range(self.ps_count))

    @property
    def weight_bits(self) -> int:
        """The fewest bits in which weights of its tables are stored; 0 if all are exact."""
        return fewest_weight_bits(file.path for file in self.files)

    @property
    def builds_on(self) -> tuple[str, ...]:
        """The ids of the earlier checkpoints whose files it needs, oldest first; empty: it has all rows itself."""
        return tuple(sorted({file.checkpoint for file in self.files if file.checkpoint}, key=int))

    @property
    def total_bytes(self) -> int:
        """The bytes of all its files, which a restore reads."""
        return sum(file.bytes for file in self.files)

    @property
    def begun_epochs(self) -> int:
        """The number of epochs of which the rows have seen something."""
        return max((part.epoch + 1 for part in self.applied), default=0)

    @property
    def applied_samples(self) -> int:
        """The samples that the rows have seen, over all epochs."""
        batches = sum(stop - start for epoch in self.applied for start, stop in epoch.ranges)
        last, missing = divmod(self.training_records, self.batch_size)
        short = self.batch_size - missing if missing else 0
        return batches * self.batch_size - short * sum(
            any(start <= last < stop for start, stop in epoch.ranges) for epoch in self.applied
        )

    def to_json(self) -> str:
        """Returns the sealed manifest as text."""
        document = json.loads(self.model_dump_json(by_alias=True))
        return json.dumps({**document, "seal": _seal(document)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> "CheckpointManifest":
        """Reads a manifest; errors call it `name`. Raises DamagedCheckpointError."""
        try:
            manifest = cls.model_validate_json(text, extra="allow")
        except ValidationError as error:
            problem = error.errors()[0]
            if problem["loc"] == ("format_version",) and isinstance(problem["input"], int):
                raise DamagedCheckpointError(
                    f"{name}: has format {problem['input']}, and this version reads formats up to {NEWEST_FORMAT}: use "
                    "the version of Emberscale that wrote it"
                ) from error
            where = ".".join(str(part) for part in problem["loc"]) or "content"
            raise DamagedCheckpointError(f"{name}: {where}: {problem['msg']}") from error
        if _seal(json.loads(text)) != manifest.seal:
            raise DamagedCheckpointError(f"{name}: was altered after it was written (its seal does not match)")
        if _formerly_quantised(file.path for file in manifest.files) is not None:
            raise DamagedCheckpointError(
                f"{name}: its weights are quantised as before format 4, which this version does not read: use the "
                "version of Emberscale that wrote them, or take a checkpoint with exact weights"
            )
        return manifest


def _seal(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({**document, "seal": 0}, sort_keys=True, separators=(",", ":")).encode())
