"""Copies of frozen dataclasses: as those of the standard library, whatever the class computes."""

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
        """Computed once."""
        return 2 * self.one


@pytest.mark.parametrize("instance", [Plain(2, (3,), {"a": 1}), Slotted(2), Checked(2), Derived(2), Computing(2)])
def test_a_copy_is_that_of_the_standard_library(instance: Any) -> None:
    copy = replace(instance, one=5)
    assert copy == dataclasses.replace(instance, one=5)
    assert (copy.one, instance.one) == (5, 2)
    assert replace(instance) == instance


def test_a_copy_computes_anew() -> None:
    before = Computing(2)
    assert before.twice == 4
    assert replace(before, one=3).twice == 6


def test_a_copy_is_checked() -> None:
    with pytest.raises(ValueError, match="negative"):
        replace(Checked(), one=-1)


@pytest.mark.parametrize("instance", [Plain(), Checked(), Computing()])
def test_a_field_that_does_not_exist_is_an_error(instance: Any) -> None:
    with pytest.raises(TypeError, match="another"):
        replace(instance, another=1)


def test_a_copy_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        replace(Plain(), one=2).one = 3  # type: ignore[misc]  # which is the point
