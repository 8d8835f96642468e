"""Changed copies of frozen dataclasses: how the state machines make their next states."""

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

_Instance = TypeVar("_Instance")

if TYPE_CHECKING:
    from dataclasses import replace as replace  # type checkers know which fields it takes
else:

    def replace(instance: _Instance, /, **changes: Any) -> _Instance:
        """Returns a copy with some fields changed. Raises TypeError for a field that does not exist.

        `dataclasses.replace` calls `__init__`, which sets the fields of a frozen instance one by one: a copy of the
        master's state takes ten times as long. Where `__init__` does nothing else, this copies all fields at once.
        """
        cls = type(instance)
        if fields := _plain_fields(cls):
            values = {**instance.__dict__, **changes}
            if len(values) == fields:  # neither an unknown field nor the value of a cached property
                copy = object.__new__(cls)
                object.__setattr__(copy, "__dict__", values)
                return copy
        return dataclasses.replace(instance, **changes)


@cache
def _plain_fields(cls: type[Any]) -> int:
    """Returns the number of fields of a dataclass whose `__init__` only sets them; 0 for any other class."""
    if hasattr(cls, "__post_init__") or any(getattr(base, "__slots__", ()) for base in cls.__mro__):
        return 0
    fields, init = dataclasses.fields(cls), getattr(cls.__init__, "__code__", None)
    if init is None or init.co_filename != "<string>":  # where the code is that dataclasses generate
        return 0
    if any("__new__" in vars(base) for base in cls.__mro__[:-1]):
        return 0
    only_sets = init.co_argcount + init.co_kwonlyargcount == 1 + len(fields)  # an InitVar is one more
    return len(fields) if only_sets and all(field.init for field in fields) else 0
