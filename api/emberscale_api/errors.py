"""Errors that people see: bad input, a machine that lacks something, a disk that is full."""

import errno

_OF_DISKS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO})


class BadInputError(Exception):
    """Nothing was started because of what was given; the text is one line a problem, and says what is allowed.

    `trace` are the frames of the person's own code, where that is what went wrong.
    """

    def __init__(self, problems: str, trace: str = "") -> None:
        super().__init__(problems)
        self.trace = trace


class StartError(Exception):
    """The machine lacks something that the job needs; the text is one line that says what."""


class UnwritableError(Exception):
    """Files could not be written after something had been started; the text is one line that says which and why."""


def disk_problem(error: OSError) -> str | None:
    """What is wrong with the disk, such as that it is full; None for an error of another kind."""
    return error.strerror if error.errno in _OF_DISKS else None
