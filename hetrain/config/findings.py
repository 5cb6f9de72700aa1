"""What is wrong with a setting, in a sentence: key, value, what was expected, what to do. Nothing imports torch."""

import math
from collections.abc import Iterator

from hetrain.config.unread import Unread, shown


def finding(key: str, value: object, expected: str, remedy: str = "") -> str:
    """KEY=VALUE: expected WHAT. REMEDY"""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
    return f"{key}={text}: expected {expected}." + (f" {remedy}" if remedy else "")


def one_of(key: str, value: str, allowed: tuple[str, ...]) -> Iterator[str]:
    """A finding unless `value` is among `allowed`."""
    if value not in allowed:
        yield finding(key, value, "one of " + ", ".join(allowed))


def at_least(key: str, value: float | None, least: float, remedy: str = "") -> Iterator[str]:
    """A finding where `value` is below `least`."""
    if value is not None and not value >= least:  # also true for nan
        yield finding(key, value, f"at least {least}", remedy)


def at_most(key: str, value: float | None, most: float, remedy: str = "") -> Iterator[str]:
    """A finding where `value` is above `most`."""
    if value is not None and value > most:
        yield finding(key, value, f"at most {most:,}", remedy)


def positive(key: str, value: float | None, remedy: str = "") -> Iterator[str]:
    """A finding unless `value` is a finite number above 0."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        yield finding(key, value, "a number above 0", remedy)


def comes_from(key: str, origin: str | None, idle: Unread | None) -> str:
    """What to type against a value that nobody typed; `idle`: the setting where its default would do."""
    if origin is None:
        return ""
    value = "VALUE" if idle is None else shown(idle.default)
    return f" {origin} sets it; {key}={value} on the command line overrides that."
