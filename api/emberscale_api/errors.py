"""Errors that people see: bad input, a machine that lacks something, a disk that is full."""

import errno

_OF_DISKS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO})


class BadInputError(Exception):
    """The input is invalid, and nothing was started; the text has one line per problem and says what is allowed.

    `trace` holds the frames of the user's own code, if that code failed.
    """

    def __init__(self, problems: str, trace: str = "") -> None:
        super().__init__(problems)
        self.trace = trace


class StartError(Exception):
    """The machine lacks something that the job needs; the text names it in one line."""


class UnwritableError(Exception):
    """Files could not be written after processes had started; the text says which and why, in one line."""


def disk_problem(error: OSError) -> str | None:
    """Describes a problem of the disk, such as a full one; None for an error of another kind."""
    return error.strerror if error.errno in _OF_DISKS else None
