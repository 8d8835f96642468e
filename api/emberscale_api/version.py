"""The version of this process, and its compatibility with others.

Processes of neighbouring versions work together: each keeps and ignores fields that it does not know. Every link
carries its version first, so that an error can name incompatible versions.
"""

from importlib.metadata import version

VERSION = version("emberscale")
"""Of this process."""
LINK_VERSION = 1
"""Counts the changes to what processes say to each other that a neighbour cannot ignore."""


def spoken_version() -> str:
    """Returns the version that a process sends on a link: `<link version>/<version>`."""
    return f"{LINK_VERSION}/{VERSION}"


def version_problem(spoken: str) -> str | None:
    """Explains why this process cannot work with a peer of this version; None if it can.

    Returns None for a peer without a version, such as a user's own tool.
    """
    link, _, release = spoken.partition("/")
    if not spoken or link == str(LINK_VERSION):
        return None
    return (
        f"this process is of version {VERSION} (link {LINK_VERSION}), and the other side of version {release} (link "
        f"{link}): give all processes of the job one image"
    )
