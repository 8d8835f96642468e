"""Refusals of a user's own model.

Users have to fix errors in their own models, so they see the frames of their code and what was expected, not the frames
of this program.
"""

import importlib
import importlib.util
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emberscale_api.errors import InvalidError

REASON = "ModelRefused"
"""The reason in the job's status when a user's model fails."""

_OURS = str(Path(__file__).parents[1])


class EntrypointError(InvalidError):
    """The user's model cannot be made or called. `frames` are those of the user's code, or empty."""

    def __init__(self, entrypoint: str, problem: str, frames: str = "") -> None:
        super().__init__(f"{frames}spec.model.entrypoint: {entrypoint}: {problem}")
        self.problem = problem
        self.frames = frames


@contextmanager
def their_frames(entrypoint: str, doing: str) -> Iterator[None]:
    """Turns errors of the body into an EntrypointError with the frames of the user's code."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise EntrypointError(entrypoint, f"{doing} {summary(error)}", trace(error)) from error


def summary(error: BaseException) -> str:
    """Returns the type and the first line of an error."""
    return "".join(traceback.format_exception_only(error)[-1:]).strip().partition("\n")[0]


def trace(error: BaseException) -> str:
    """Returns the frames of the user's code, as Python prints them."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    if not frames and not isinstance(error, SyntaxError):
        return ""
    only = traceback.format_exception_only(error)
    return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames), *only])


def _is_machinery(file: str) -> bool:
    return file.startswith((_OURS, *_places_of_torch(), "<frozen importlib", importlib.__file__ or "<frozen"))


def _places_of_torch() -> list[str]:
    found = importlib.util.find_spec("torch")
    return list(found.submodule_search_locations or ()) if found is not None else []
