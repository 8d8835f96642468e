"""Durations for people."""


def clock_time(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
