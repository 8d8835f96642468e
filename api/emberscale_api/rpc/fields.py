"""The fields of a message that are set, for those who check what other processes say.

Maps, lists and single values are walked in one way; what is allowed is up to each reader.
"""

from collections.abc import Callable, Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message


class PresentField:
    """A field with a value.

    * `name`: the field's. `field` describes one value: of a map, that is the field of its values.
    * `keys`: those of a map; none of any other field.
    """

    def __init__(self, message: Message, field: FieldDescriptor, value: Any) -> None:
        entry = field.message_type
        self._message, self._value = message, value
        self.name, self.field = field.name, field
        self._is_map = False
        if entry is not None and entry.GetOptions().map_entry:
            self._is_map, self.field = True, entry.fields_by_name["value"]
        self._is_list = field.is_repeated and not self._is_map

    @property
    def is_single(self) -> bool:
        """Whether it is neither a map nor a list."""
        return not self._is_map and not self._is_list

    @property
    def is_message(self) -> bool:
        """Whether its values are messages."""
        return bool(self.field.type == FieldDescriptor.TYPE_MESSAGE)

    @property
    def keys(self) -> list[Any]:
        """The keys of a map; none of any other field."""
        return list(self._value) if self._is_map else []

    @property
    def values(self) -> list[Any]:
        """All values of a map or of a list, or the only one. Messages are the ones within, and may be changed."""
        if self._is_map:
            return list(self._value.values())
        return list(self._value) if self._is_list else [self._value]

    def cut(self, most: int) -> None:
        """Keeps only the first `most` entries of a map or of a list."""
        if self._is_list:
            del self._value[most:]
        for key in self.keys[most:]:
            del self._value[key]

    def replace(self, change: Callable[[Any], Any]) -> None:
        """Changes each value in place. Not for messages."""
        if self._is_map:
            # A map must not change under its own iterator, not even in its values: some entries would be walked twice.
            for key in self.keys:
                self._value[key] = change(self._value[key])
        elif self._is_list:
            self._value[:] = [change(value) for value in self._value]
        elif (changed := change(self._value)) != self._value:
            setattr(self._message, self.name, changed)


def present_fields(message: Message) -> Iterator[PresentField]:
    """The fields that are set, but for those without presence whose value is the default."""
    for field, value in message.ListFields():
        yield PresentField(message, field, value)
