"""Settings that the rest of a config leaves without effect: named, so that nobody takes them for tried.

A setting counts when it differs from its default: what a config group says anyway may stay. Nothing here imports torch.
"""

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hetrain.codec import PATHS
from hetrain.config.schema import ClusterConfig, RunConfig
from hetrain.config.unread_rules import KEYS, MACHINES, READ_IN, RULED, RULES

__all__ = ["KEYS", "READ_IN", "Unread", "harmless", "keys_read", "passing_over", "shown", "unread"]

GROUP_KEYS = {"planner": "planner.name", "comms": "comms.name", "data": "data.name"}  # what GROUP=NAME sets, if typed
WHOLE = {"cluster": "local", "model": "wdl"}  # groups that a rule is about as a whole, and what they are by default
NOTHING_TRAVELS = tuple(f"comms.{path}" for path in PATHS)  # with none: as where there is no such path
ABSENT = "nothing"  # the default of a key that not every config has


@dataclass(frozen=True)
class Unread:
    """A setting that nothing reads in this config; `why`: where that is, `instead`: what to do to have it read.

    word: what the command line calls the key, where it says it: itself, or a group.
    """

    key: str
    value: Any
    default: Any
    why: str
    instead: str = ""
    word: str = ""

    def __str__(self) -> str:
        """Key, value, what was expected, what to do."""
        return self.told()

    def told(self, origin: str | None = None) -> str:
        """The same of a value that comes from `origin`: nobody typed it, so that it cannot be left out."""
        out = "leave it out" if origin is None else f"type {self.key}={shown(self.default)}"
        remedy = f"{self.instead}, or {out}" if self.instead else out[0].upper() + out[1:]
        comes = "" if origin is None else f" {origin} sets it."
        default = ABSENT if self.default is ABSENT else f"its default, {shown(self.default)}"
        return f"{self.named}: expected {default}, {self.why}.{comes} {remedy}."

    @property
    def named(self) -> str:
        """KEY=VALUE."""
        return f"{self.word or self.key}={shown(self.value)}"


def unread(cfg: RunConfig, verb: str = "", typed: Mapping[str, Any] | None = None) -> list[Unread]:
    """The settings of `cfg` that have no effect.

    verb: what the config is for; "": any. typed: the keys and groups of the command line with their values.
    """
    words = {GROUP_KEYS.get(key, key): key for key in typed or {}}
    found: dict[str, Unread] = {}
    for rule in RULES:
        said = rule.unread(cfg, verb)
        if said is None:
            continue
        for key in rule.keys:
            if key in found or (rule.typed and key not in words):
                continue
            value = (typed or {})[key] if key in WHOLE else _get(cfg, key)
            default = _default(cfg, key)
            if value != default and not _says_nothing(cfg, key, value):
                found[key] = Unread(key, value, default, *said, word=words.get(key, ""))
    return list(found.values())


def keys_read(cfg: RunConfig, verb: str = "") -> set[str]:
    """Of the keys that some configs do not read, those that `cfg` does."""
    return set(RULED) - {key for rule in RULES if rule.unread(cfg, verb) is not None for key in rule.keys}


def harmless(cfg: RunConfig, verb: str = "") -> set[str]:
    """Of the keys that `cfg` does not read, those at their defaults, as KEY=VALUE: it can run with that value."""
    keys = set(RULED) - keys_read(cfg, verb) - set(WHOLE)
    return {f"{key}={shown(_get(cfg, key))}" for key in keys if _get(cfg, key) == _default(cfg, key)}


def passing_over(
    cfg: RunConfig, taken: Collection[str], verb: str = "", typed: Mapping[str, Any] | None = None
) -> tuple[RunConfig, list[Unread]]:
    """`cfg` without the settings that it does not read, at their defaults, and what they were set to.

    taken: which of them, each as KEY or KEY=VALUE; others stay.
    """
    passed = [s for s in unread(cfg, verb, typed) if s.key in taken or f"{s.key}={shown(s.value)}" in taken]
    cleared = deepcopy(cfg)
    for setting in passed:
        _clear(cleared, setting)
    return cleared, passed


def _clear(cfg: RunConfig, setting: Unread) -> None:
    section, _, last = setting.key.rpartition(".")
    if section == "model":
        del cfg.model[last]
    elif setting.key == "cluster":  # how many machines there are is read
        for key in MACHINES:
            setattr(cfg.cluster, key, getattr(ClusterConfig(), key))
    else:
        setattr(_get(cfg, section), last, setting.default)


def _default(cfg: RunConfig, key: str) -> Any:
    if key == "consistency.cache.capacity" and cfg.consistency.mode == "asp":
        return 0  # refused otherwise
    if key in WHOLE:
        return WHOLE[key]
    return ABSENT if key.startswith("model.") else _get(RunConfig(), key)


def _says_nothing(cfg: RunConfig, key: str, value: Any) -> bool:
    """Whether a value that is no default is as good as one where nothing reads the key."""
    if key == "consistency.staleness":
        return cfg.consistency.mode == "het" and value == 0  # it keeps no row, so that none is behind
    return value == "none" and key in NOTHING_TRAVELS


def _get(cfg: RunConfig, key: str) -> Any:
    value: Any = cfg
    for name in key.split("."):
        value = value.get(name, ABSENT) if isinstance(value, dict) else getattr(value, name)
    return value


def shown(value: Any) -> str:
    """As it is written on the command line."""
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
