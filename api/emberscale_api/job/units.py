"""Durations (`90s`, `5m`, `1h30m` or seconds) and Kubernetes quantities (`500m`, `2Gi`), as manifests have them."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SerializationInfo

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


IN_WORDS = "in words"
"""The context in which a model is dumped with durations as `1.5s`: a cluster takes no number with a fraction."""


def _in_words(seconds: float, info: SerializationInfo) -> float | str:
    return f"{seconds:.15g}s" if info.context == IN_WORDS else seconds


DURATION = "duration"
"""The format of durations in JSON schemas."""

Seconds = Annotated[
    float, BeforeValidator(_seconds), PlainSerializer(_in_words), Field(json_schema_extra={"format": DURATION})
]
"""Seconds, accepted as a number or as a duration in words."""


_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    "k": Decimal(10) ** 3,
    "M": Decimal(10) ** 6,
    "G": Decimal(10) ** 9,
    "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15,
    "Ki": Decimal(2) ** 10,
    "Mi": Decimal(2) ** 20,
    "Gi": Decimal(2) ** 30,
    "Ti": Decimal(2) ** 40,
    "Pi": Decimal(2) ** 50,
}
_QUANTITY = re.compile(r"^(?P<number>\d+(\.\d+)?|\.\d+)(?P<suffix>m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$")


def _parse(quantity: str) -> Decimal:
    match = _QUANTITY.match(quantity)
    if match is None:
        bytes_of = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtTpP])i?[bB]", quantity)
        meant = f"; did you mean {bytes_of[1]}{bytes_of[2].upper()}i?" if bytes_of else ""
        raise ValueError(
            f"{quantity!r} is not a Kubernetes quantity, such as 500m or 2Gi: "
            f"a number and m, k, M, G, T, P, Ki, Mi, Gi, Ti or Pi{meant}"
        )
    return Decimal(match["number"]) * _SUFFIXES[match["suffix"] or ""]


def cpu_cores(quantity: str) -> float:
    """CPU as a number of cores: `500m` is 0.5."""
    return float(_parse(quantity))


def memory_bytes(quantity: str) -> int:
    """Memory in bytes, rounded up: `1Gi` is 1073741824."""
    return int(_parse(quantity).to_integral_value(rounding="ROUND_CEILING"))


def memory_quantity(size: int) -> str:
    """Bytes as people write them: `1536Mi`; as they are where they are no whole MiB."""
    return f"{size >> 20}Mi" if size % (1 << 20) == 0 else str(size)


def _number_as_text(value: object) -> object:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return value


MOST_QUANTITY = "8Pi"
"""2^53: messages and JSON hold numbers up to that exactly."""


def _in_range(quantity: str) -> str:
    number = _parse(quantity)
    if number <= 0:
        raise ValueError("must be above 0")
    if number > _parse(MOST_QUANTITY):
        raise ValueError(f"must be at most {MOST_QUANTITY}")
    return quantity


QUANTITY = "quantity"
"""The format of quantities in JSON schemas."""

Quantity = Annotated[
    str,
    BeforeValidator(_number_as_text),
    AfterValidator(_in_range),
    Field(json_schema_extra={"format": QUANTITY}),
]
"""A quantity above 0 and up to 8Pi, kept as written; a bare YAML number is accepted as Kubernetes accepts it."""
