"""Kubernetes resource quantities, e.g. `500m` CPU or `2Gi` of memory."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

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


def _positive(quantity: str) -> str:
    if _parse(quantity) <= 0:
        raise ValueError("must be above 0")
    return quantity


Quantity = Annotated[str, BeforeValidator(_number_as_text), AfterValidator(_positive)]
"""A quantity above 0, kept as written; a bare YAML number is accepted as Kubernetes accepts it."""
