"""How people read durations, sizes, rates, shares and counts, wherever text is for them: one format for each."""

import math
from decimal import Decimal

_SIZES = (("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10))


def duration_text(seconds: float) -> str:
    """Returns `52ms`, `1.75s`, `1m40s`, `3h20m` or `2d4h`: three digits or two units, in the form that manifests take.

    Below half a microsecond it is `0s`; infinity, which manifests do not take, is `inf`.
    """
    size, sign = abs(seconds), "-" if seconds < 0 else ""
    if size < 5e-7:
        return "0s"
    if size < 0.9995:
        return f"{sign}{round(1e3 * size, 3):.3g}ms"
    if size < 59.95:
        return f"{sign}{size:.3g}s"
    if not math.isfinite(size):
        return f"{sign}{size}"
    if round(size) < 3600:
        return sign + _two_units(round(size), 60, "ms")
    if (minutes := round(size / 60)) < 24 * 60:
        return sign + _two_units(minutes, 60, "hm")
    return sign + _two_units(round(size / 3600), 24, "dh")


def _two_units(parts: int, parts_of_unit: int, names: str) -> str:
    whole, rest = divmod(parts, parts_of_unit)
    return f"{whole}{names[0]}" + (f"{rest}{names[1]}" if rest else "")


def bytes_text(size: float) -> str:
    """Returns `820 bytes`, `3.12 MiB` or `1,012 MiB`: about how much it is."""
    for unit, shift in _SIZES:
        if size / (1 << shift - 10) >= 1023.5:
            return f"{_figure(size / (1 << shift))} {unit}"
    return f"{size:,.0f} bytes"


def rate_text(per_second: float, what: str = "samples") -> str:
    """Returns `10,234 samples/s` or `0.513 samples/s`."""
    return f"{_figure(per_second)} {what}/s"


def share_text(share: float) -> str:
    """Returns `12.34%`, or two significant digits below a thousandth: `0.0012%`."""
    if not share or abs(share) >= 1e-3:
        return f"{share:.2%}"
    return f"{Decimal(f'{100 * share:.1e}'):f}%"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Returns a number with its noun: `1 record`, `1,200 records`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def _figure(number: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{number:,.0f}" if number >= 99.95 else f"{Decimal(f'{number:.3g}'):f}"
