"""The version of this process, and whether it can work with that of another.

Processes of neighbouring versions work together: what one says and the other does not know is kept and ignored. Every
link says its version first, so that where that is not enough the reason is told.
"""

from importlib.metadata import version

VERSION = version("emberscale")
"""Of this process."""
LINK_VERSION = 1
"""Counts the changes to what processes say to each other that a neighbour cannot ignore."""


def spoken_version() -> str:
    """What a process says of itself on a link: `<link version>/<version>`."""
    return f"{LINK_VERSION}/{VERSION}"


def version_problem(spoken: str) -> str | None:
    """Why this process cannot work with one that says this of itself, in words; None where it can.

    Says nothing of a peer that names no version, such as a person's own tool.
    """
    link, _, release = spoken.partition("/")
    if not spoken or link == str(LINK_VERSION):
        return None
    return (
        f"this process is of version {VERSION} (link {LINK_VERSION}), and the other side of version {release} (link "
        f"{link}): give all processes of the job one image"
    )
