"""What a cache counts."""

from dataclasses import dataclass


@dataclass
class Counters:
    """Distinct rows per step, summed over steps."""

    hits: int = 0  # read from the cache, found valid
    misses: int = 0  # not cached
    invalid: int = 0  # cached, but the owner's clock was too far ahead
    own_invalid: int = 0  # cached, but too many own updates held back
    evictions: int = 0
