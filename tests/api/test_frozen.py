"""Copies of frozen dataclasses: like the standard library's, whatever the class computes."""

import dataclasses
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Annotated, Any

import pydantic
import pydantic.dataclasses
import pytest

from emberscale_api.frozen import replace


@dataclass(frozen=True)
class Plain:
    one: int = 1
    many: tuple[int, ...] = ()
    made: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Slotted(Plain):
    __slots__ = ("_kept",)


@dataclass(frozen=True)
class Checked:
    one: int = 1

    def __post_init__(self) -> None:
        if self.one < 0:
            raise ValueError("one must not be negative")


@dataclass(frozen=True)
class Derived:
    one: int = 1
    twice: int = field(init=False, default=2)


@dataclass(frozen=True)
class Computing:
    one: int = 1

    @cached_property
    def twice(self) -> int:
        """Twice the value, computed once."""
        return 2 * self.one


class Initialised(Plain):
    def __init__(self, one: int = 1) -> None:
        if one < 0:
            raise ValueError("one must not be negative")
        super().__init__(one)


@dataclass(frozen=True)
class Made(Plain):
    def __new__(cls, one: int = 1, *_: Any, **__: Any) -> "Made":
        if one < 0:
            raise ValueError("one must not be negative")
        return super().__new__(cls)


@dataclass(frozen=True)
class Given:
    one: int
    other: InitVar[int]


@dataclass(frozen=True)
class FailedError(Exception):
    one: int = 1


@pydantic.dataclasses.dataclass(frozen=True)
class Validated:
    one: Annotated[int, pydantic.Field(ge=0)] = 1


@pytest.mark.parametrize(
    "instance",
    [Plain(2, (3,), {"a": 1}), Slotted(2), Checked(2), FailedError(2), Validated(2), Derived(2), Computing(2)],
)
def test_a_copy_is_that_of_the_standard_library(instance: Any) -> None:
    copy = replace(instance, one=5)
    assert copy == dataclasses.replace(instance, one=5)
    assert (copy.one, instance.one) == (5, 2)
    assert replace(instance) == instance


def test_a_copy_computes_anew() -> None:
    before = Computing(2)
    assert before.twice == 4
    assert replace(before, one=3).twice == 6


@pytest.mark.parametrize("instance", [Checked(), Made(), Validated()])
def test_a_copy_is_checked(instance: Any) -> None:
    with pytest.raises(ValueError, match=r"negative|greater than or equal to 0"):
        replace(instance, one=-1)


def test_a_copy_is_made_by_an_initialiser_of_its_own() -> None:
    with pytest.raises(TypeError, match="many"):  # like the standard library, which passes all fields to it
        replace(Initialised(), one=5)
    with pytest.raises(ValueError, match="other"):
        replace(Given(1, 2), one=5)  # type: ignore[call-arg]  # which is the point
    assert replace(Given(1, 2), one=5, other=3) == Given(5, 3)


@pytest.mark.parametrize("instance", [Plain(), Checked(), Computing()])
def test_a_field_that_does_not_exist_is_an_error(instance: Any) -> None:
    with pytest.raises(TypeError, match="another"):
        replace(instance, another=1)


def test_a_copy_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        replace(Plain(), one=2).one = 3  # type: ignore[misc]  # which is the point
