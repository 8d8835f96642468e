"""Durations as people write them: `90s`, `5m`, `1h30m`, or a number of seconds."""

import re
from typing import Annotated

from pydantic import BeforeValidator

_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Seconds in a duration such as `1h30m`."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration: write 90s, 5m or 1h30m (units ms, s, m, h, d)")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _seconds(value: object) -> object:
    return parse_duration(value) if isinstance(value, str) else value


Seconds = Annotated[float, BeforeValidator(_seconds)]
"""Seconds, accepted as a number or as a duration in words."""
