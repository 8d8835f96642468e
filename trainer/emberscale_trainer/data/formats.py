"""The formats that a manifest can name."""

from emberscale_api.job.data import DataFormat
from emberscale_trainer.data.criteo import CriteoTSV
from emberscale_trainer.data.records import RecordFormat

_FORMATS: dict[DataFormat, RecordFormat] = {DataFormat.CRITEO_TSV: CriteoTSV()}


def record_format(name: DataFormat) -> RecordFormat:
    """The reader of a format."""
    return _FORMATS[name]
