"""How much a cache may keep, as one writes it: a share of all rows, a number of rows, or an amount of memory."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from hetrain.errors import ConfigError

KEY = "consistency.cache.capacity"
EXPECTED = (
    "a share of all rows (0 to 1), a whole number of rows (above 1) or an amount of memory per worker (512MiB, 2GB)"
)
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b", re.IGNORECASE)


@dataclass(frozen=True)
class Capacity:
    """`amount` is a share of all rows, a number of rows, or bytes of one worker's memory."""

    amount: float
    unit: Literal["share", "rows", "bytes"]


def parse_capacity(value: float | str) -> Capacity:
    """Numbers up to 1 are shares, above it rows; text with a unit is bytes: B, kB .. TB (1000), KiB .. TiB (1024).

    Raises ConfigError for anything else.
    """
    if isinstance(value, str):
        if match := _BYTES.fullmatch(value.strip()):
            number, prefix, binary = match.groups()
            if prefix or not binary:
                size = (1024 if binary else 1000) ** _PREFIXES[prefix.lower()]
                return Capacity(float(int(float(number) * size)), "bytes")
        try:
            value = float(value)
        except ValueError:
            raise _error(value) from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise _error(value)
    if value <= 1:
        return Capacity(float(value), "share")
    if value != int(value):
        raise _error(value)
    return Capacity(float(value), "rows")


def _error(value: object) -> ConfigError:
    return ConfigError(f"{KEY}={value}: expected {EXPECTED}. 0 keeps no row between steps.")
