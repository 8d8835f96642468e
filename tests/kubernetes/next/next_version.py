"""Turns an installation in an image into a future version that sends unknown fields in every message."""

import re
from importlib.metadata import distribution
from pathlib import Path

import emberscale_api

API = Path(emberscale_api.__file__).parent
UNKNOWN_FIELD = rb"\x82\x7d\x04next".decode()
"""Field 2000 of a message, with the value `next`."""


def change(file: Path, pattern: str, replacement: str) -> None:
    """Replaces every match; there must be at least one."""
    text, count = re.subn(pattern, replacement, file.read_text(), flags=re.MULTILINE)
    assert count, f"{file}: no {pattern}"
    file.write_text(text)


def main() -> None:
    """Changes the files of the installation."""
    metadata = next(file for file in distribution("emberscale").files or () if file.name == "METADATA")
    change(Path(str(metadata.locate())), r"^Version: .*$", "Version: 99.0")
    change(API / "job" / "training.py", r"^    batch_size:", "    future_knob: int = 7\n    batch_size:")
    change(API / "job" / "status.py", r"^    selector: str", '    future: str = "seen"\n    selector: str')
    change(API / "checkpoint.py", r"^    seal: int", '    future_tier: str = "cold"\n    seal: int')
    for stubs in (API / "rpc").glob("*_pb2_grpc.py"):
        sends = r"_serializer=(\w+(?:\.\w+)*)\.SerializeToString"
        change(stubs, sends, rf'_serializer=lambda message: message.SerializeToString() + b"{_escaped()}"')


def _escaped() -> str:
    return UNKNOWN_FIELD.replace("\\", "\\\\")


main()
