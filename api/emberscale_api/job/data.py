"""Where the records are and how they are read."""

from enum import StrEnum

from pydantic import Field

from emberscale_api.job.schema import ManifestPart


class DataFormat(StrEnum):
    """`CriteoTSV`: label, 13 integers, 26 categories as 32-bit hexadecimal numbers, separated by tabs.

    Every field but the label may be empty.
    """

    CRITEO_TSV = "CriteoTSV"


class ShufflingSpec(ManifestPart):
    """Records are shuffled in blocks of `block_records`: the order of blocks, and the records within each."""

    enabled: bool = True
    block_records: int = Field(default=32768, ge=1, le=1 << 24)


class DataSpec(ManifestPart):
    """Paths are local files, globs, or fsspec URIs; relative ones start at the working directory."""

    format: DataFormat = DataFormat.CRITEO_TSV
    train: tuple[str, ...] = Field(min_length=1)
    evaluation: tuple[str, ...] = ()
    shuffling: ShufflingSpec = ShufflingSpec()
    max_bad_records: int = Field(default=0, ge=0, description="Malformed records to skip before the job fails")
