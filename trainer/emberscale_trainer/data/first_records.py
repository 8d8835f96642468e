"""Whether a file of lines holds what the manifest says: seen by its first records, before anything is trained."""

import numpy as np

from emberscale_api.rpc.master_pb2 import DataFile
from emberscale_trainer.data.errors import DataUnavailableError
from emberscale_trainer.data.index import LineIndexer
from emberscale_trainer.data.records import RecordFormat, empty_columns
from emberscale_trainer.data.streams import open_text

_HEAD_BYTES = 1 << 18
_RECORDS = 100
_ENOUGH = 10


def refuse_unreadable_head(
    file: DataFile, reader: RecordFormat, delimiter: str | None = None, header: bool = False
) -> None:
    """Raises DataUnavailableError if the first records of a file are all malformed, or are not UTF-8 text.

    Then it is of another format, or a column of another type. A few malformed ones are left to
    `spec.data.maxBadRecords`. `delimiter` and `header` are those of LineIndexer.
    """
    with open_text(file.uri) as stream:
        head = stream.read(_HEAD_BYTES)
    whole = head if len(head) < _HEAD_BYTES else head[: head.rfind(b"\n") + 1]
    try:
        whole.decode("utf-8")
    except UnicodeDecodeError as error:
        line = whole.count(b"\n", 0, error.start) + 1
        raise DataUnavailableError(
            file.uri,
            f"is not UTF-8 text: line {line:,} has the byte {whole[error.start]:#x}; convert it, for example with "
            "`iconv -f LATIN1 -t UTF-8`, or its ids would not be those of the same texts elsewhere",
        ) from None
    indexer = LineIndexer(0, _RECORDS, delimiter, header)
    indexer.feed(whole)
    for block in indexer.finish()[:1]:
        columns = empty_columns(block.records, reader.columns, reader.raw)
        good, bad = reader.read_block(file, block).read(np.arange(block.records), columns)
        if not good and len(bad) >= _ENOUGH:
            raise DataUnavailableError(file.uri, f"none of its first {len(bad)} records can be read; {bad[0]}")
