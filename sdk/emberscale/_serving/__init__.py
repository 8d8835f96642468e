"""A model for serving: plain tensors (`export`, in a `table_file` each) and a `program` that needs only torch."""

from pathlib import Path

from emberscale_api.errors import InvalidError

ABOUT = "model.json"
"""The file of an exported model that describes it, and by which it is recognised."""


def ensure_replaceable(out: Path) -> None:
    """Raises InvalidError if an export to the folder would replace anything but an earlier export."""
    if out.exists() and not out.is_dir():
        raise InvalidError(f"OUT: {out} is not a folder")
    if out.is_dir() and any(out.iterdir()) and not (out / ABOUT).exists():
        raise InvalidError(f"OUT: {out} holds files that are no exported model; choose another folder")
