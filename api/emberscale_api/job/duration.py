"""Durations as people write them, `90s`, `5m`, `1h30m` or a number of seconds, and as they read them."""

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


def rough_time(seconds: float) -> str:
    """Returns `45s`, `12m`, `3h20m` or `2d4h`: about how long something takes."""
    left = max(0, round(seconds))
    if left < 120:
        return f"{left}s"
    if left < 3600:
        return f"{left // 60}m"
    if left < 86400:
        return f"{left // 3600}h{left % 3600 // 60}m"
    return f"{left // 86400}d{left % 86400 // 3600}h"


def measured_time(seconds: float) -> str:
    """Returns `1.5 min`, `3.2 h`: a figure in the unit that a person would use."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def clock_time(seconds: float) -> str:
    """Returns `0:07`, `12:34` or `1:02:03`: how long something has run."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
