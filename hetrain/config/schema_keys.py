"""Every key of a run's config, read off the schemas, and the nearest ones to a misspelt key. No torch, no Hydra."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from hetrain.config.schema import RunConfig
from hetrain.errors import ConfigError

OPEN = "model"  # its keys are the keyword arguments of the model's class
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


@cache
def schema_keys() -> dict[str, Any]:
    """Dotted key -> its type for every key; a section's type is its dataclass."""
    found: dict[str, Any] = {}
    _walk(RunConfig, "", found)
    return found


def _walk(schema: Any, prefix: str, found: dict[str, Any]) -> None:
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        found[prefix + field.name] = kind
        if dataclasses.is_dataclass(kind):
            _walk(kind, f"{prefix}{field.name}.", found)


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings with dotted keys, as they are written on the command line."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + str(key)] = value
    return flat


def is_section(key: str) -> bool:
    """Whether `key` holds keys of its own."""
    return dataclasses.is_dataclass(schema_keys().get(key)) or key == OPEN


def expected(key: str) -> str:
    """What a value of `key` must be, in words."""
    kind = schema_keys().get(key)
    if dataclasses.is_dataclass(kind):
        return "a section with the keys " + ", ".join(children(key))
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(WORDS.get(part, str(part)) for part in typing.get_args(kind))
    if origin is list:
        (item,) = typing.get_args(kind)
        return "a list, each item " + WORDS.get(item, str(item))
    if origin is dict:
        left, right = (_in_words(part) for part in typing.get_args(kind))
        return f"a mapping as in {{KEY: VALUE}}, each KEY {left}, each VALUE {right}"
    return WORDS.get(typing.cast(type, kind), "another value")


def _in_words(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "a mapping with some of the keys " + ", ".join(field.name for field in dataclasses.fields(kind))
    return WORDS.get(kind, str(kind))


def children(section: str) -> list[str]:
    """Names of the keys directly below `section` ("" is the top)."""
    prefix = f"{section}." if section else ""
    return [key[len(prefix) :] for key in schema_keys() if key.startswith(prefix) and "." not in key[len(prefix) :]]


def check_key(key: str, where: str = "") -> None:
    """Raise ConfigError when no schema has `key`; `where` says which file or argument it came from."""
    if key in schema_keys() or key.split(".")[0] == OPEN:
        return
    section = key.rpartition(".")[0]
    while section and section not in schema_keys():
        section = section.rpartition(".")[0]
    close = difflib.get_close_matches(key, list(schema_keys()), n=1, cutoff=0.7)
    if not close:  # right name, wrong section: batch_size for train.batch_size
        last = key.rpartition(".")[2]
        names = {known.rpartition(".")[2]: known for known in schema_keys()}
        close = [names[name] for name in difflib.get_close_matches(last, list(names), n=1, cutoff=0.7)]
    lines = [f"{where}there is no key {key!r}." + (f" Did you mean {close[0]!r}?" if close else "")]
    if section and not is_section(section):
        lines.append(f"{section!r} holds {expected(section)} and has no keys below it.")
    else:
        below = f"below {section!r}" if section else "at the top"
        lines.append(f"Keys {below}: {', '.join(children(section))}")
    raise ConfigError("\n  ".join(lines))
