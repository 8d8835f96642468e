"""Planner types as JSON, for columns and frames: infinities are kept, read-only mappings become objects."""

import json
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


class Codec(Generic[T]):
    """To and from what `json` can write, for one type."""

    def __init__(self, kind: Any) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(kind)

    def plain(self, value: T) -> Any:
        """The value as dicts, lists, texts and numbers."""
        # The types' empty mappings are mapping proxies, which pydantic takes but does not know.
        return self._adapter.dump_python(value, fallback=dict, warnings="none")

    def from_plain(self, plain: Any) -> T:
        """The inverse of `plain`. Raises pydantic.ValidationError."""
        return self._adapter.validate_python(plain)

    def text(self, value: T) -> str:
        """The value as one line of JSON, with Python's spelling of infinities."""
        return json.dumps(self.plain(value), separators=(",", ":"))

    def from_text(self, text: str | bytes) -> T:
        """The inverse of `text`. Raises pydantic.ValidationError or json.JSONDecodeError."""
        return self.from_plain(json.loads(text))
