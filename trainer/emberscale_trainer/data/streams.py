"""The bytes of text files, including compressed ones, which can only be read forwards.

A compressed file is decompressed as it is read: neither its text nor an index is stored. Ranges in ascending order
decompress each byte once; going back starts at the beginning again. The order of an epoch therefore never goes back
within such a file.
"""

import threading
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from emberscale_trainer.data.files import open_filesystem, read_range
from emberscale_trainer.data.records import DataUnavailableError

_SUFFIXES = {".gz": "gzip", ".zst": "zstd"}
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}
_RECODE = "convert it to UTF-8, for example with `iconv -f UTF-16 -t UTF-8`"
_NO_TEXT = {
    b"PAR1": ("a Parquet file", "set spec.data.format to Parquet (or pass --from parquet)"),
    b"ARROW1": ("an Arrow file", "write Parquet or CSV instead"),
    b"ORC": ("an ORC file", "write Parquet or CSV instead"),
    b"Obj\x01": ("an Avro file", "write Parquet or CSV instead"),
    b"\x89HDF": ("an HDF5 file", "write Parquet or CSV instead"),
    b"\x93NUMPY": ("a NumPy file", "write Parquet or CSV instead"),
    b"\xff\xfe": ("UTF-16 text", _RECODE),
    b"\xfe\xff": ("UTF-16 text", _RECODE),
}
_LOOKED_AT = 4096
_OPEN_STREAMS = 2
_SKIPPED_BYTES = 4 << 20


def compression_of(uri: str) -> str | None:
    """Returns gzip or zstd, by the suffix of the name; None for plain text."""
    return next((name for suffix, name in _SUFFIXES.items() if uri.endswith(suffix)), None)


def uncompressed_name(uri: str) -> str:
    """Returns a name without the suffix of compressed files."""
    return next((uri.removesuffix(suffix) for suffix in _SUFFIXES if uri.endswith(suffix)), uri)


class TextStream:
    """The text of a file, decompressed, from its first byte on."""

    def __init__(self, uri: str) -> None:
        """Raises DataUnavailableError."""
        self._uri = uri
        self._compression = compression_of(uri)
        self.position = 0
        filesystem, path = open_filesystem(uri)
        try:
            if self._compression is None:
                self._stream: Any = filesystem.open(path, "rb")
            else:
                self._stream = _decompressing(filesystem, path, self._compression)
        except OSError as error:
            raise DataUnavailableError(uri, f"cannot be read: {error.strerror or error}") from error

    def read(self, length: int) -> bytes:
        """Reads the next bytes: `length` of them, or fewer at the end of the file. Raises DataUnavailableError."""
        try:
            data: bytes = self._stream.read(length)
        except OSError as error:
            if self._compression is None:
                raise DataUnavailableError(self._uri, f"cannot be read: {error.strerror or error}") from error
            raise DataUnavailableError(
                self._uri, f"is no sound {self._compression} file, after {self.position:,} bytes of text: {error}"
            ) from error
        if not self.position:
            _refuse_binary(self._uri, data, self._compression)
        self.position += len(data)
        return data

    def close(self) -> None:
        """Closes the file."""
        self._stream.close()


class TextRanges:
    """Reads ranges of bytes of the text of files; keeps the last two compressed files open. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[tuple[str, TextStream]] = []

    def read(self, uri: str, offset: int, length: int) -> bytes:
        """Reads exactly the bytes [offset, offset + length) of the text. Raises DataUnavailableError."""
        if compression_of(uri) is None:
            return read_range(uri, offset, length)
        with self._lock:
            stream = self._at_or_before(uri, offset)
            try:
                while stream.position < offset:
                    if not stream.read(min(offset - stream.position, _SKIPPED_BYTES)):
                        break
                data = stream.read(length)
            except DataUnavailableError:
                self._open = [(name, other) for name, other in self._open if other is not stream]
                stream.close()
                raise
        if len(data) != length:
            raise DataUnavailableError(uri, f"is shorter than when it was indexed: no byte {offset + length:,}")
        return data

    def _at_or_before(self, uri: str, offset: int) -> TextStream:
        for place, (name, stream) in enumerate(self._open):
            if name == uri and stream.position <= offset:
                self._open.append(self._open.pop(place))
                return stream
        stream = TextStream(uri)
        self._open.append((uri, stream))
        if len(self._open) > _OPEN_STREAMS:
            self._open.pop(0)[1].close()
        return stream


def _decompressing(filesystem: Any, path: str, compression: str) -> Any:
    # takes a moment to import, which plain text should not cost
    import pyarrow as pa

    source = path if isinstance(filesystem, LocalFileSystem) else filesystem.open(path, "rb")
    return pa.input_stream(source, compression=compression)


def _refuse_binary(uri: str, begin: bytes, compression: str | None) -> None:
    """Raises DataUnavailableError for a file whose first bytes are not text."""
    for magic, name in _COMPRESSED.items():
        if begin.startswith(magic):
            suffix = next((suffix for suffix, known in _SUFFIXES.items() if known == name), None)
            advice = f"give it a name that ends in {suffix}" if suffix else "only gzip and zstd can be read"
            if compression is not None:
                advice = "compress it once only"
            raise DataUnavailableError(uri, f"is compressed with {name}: {advice}")
    for magic, (name, advice) in _NO_TEXT.items():
        if begin.startswith(magic):
            raise DataUnavailableError(uri, f"is {name}: {advice}")
    if b"\0" in begin[:_LOOKED_AT]:
        raise DataUnavailableError(uri, "is a binary file, not text: it holds bytes of value 0")
