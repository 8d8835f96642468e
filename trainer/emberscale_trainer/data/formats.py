"""The formats that a manifest can name."""

from emberscale_api.job import DataFormat, DataSpec
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.errors import DataUnavailableError
from emberscale_trainer.data.records import RecordFormat


def record_format(data: DataSpec) -> RecordFormat:
    """The reader of the data's format and columns. Raises DataUnavailableError for one that cannot be read."""
    if data.format is DataFormat.CRITEO_TSV:
        return CriteoTSV()
    raise DataUnavailableError(data.train[0], f"the format {data.format} cannot be read yet")
