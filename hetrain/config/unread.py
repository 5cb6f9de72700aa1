"""Settings that the rest of a config leaves without effect: named, so that nobody takes them for tried.

A setting counts when it differs from its default: what a config group says anyway may stay. Nothing here imports torch.
"""

from collections.abc import Collection
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hetrain.codec import OF_MODE
from hetrain.config.comms import codecs_of
from hetrain.config.schema import RunConfig

# Key -> the consistency modes that read it.
READ_IN = {
    "consistency.staleness": ("het", "ssp"),
    "consistency.clock": ("het",),
    "consistency.validation": ("het",),
    "consistency.prefetch": ("het",),
    "consistency.late_leg": ("het",),
    "consistency.cache.capacity": ("het", "ssp"),
    "consistency.cache.policy": ("het", "ssp"),
    "telemetry.audit_every": ("het", "ssp", "asp"),
    "store.device": ("het",),  # with asp and ssp it is refused in words of its own
}
# Key of comms.dct -> the paths whose dct reads it.
READ_BY = {
    "dense_sparsity": ("dense",),
    "pooled_sparsity": ("pooled_forward",),
    "rows_sparsity": ("rows",),
    "refresh_steps": ("rows", "dense"),
    "dense_warmup_steps": ("dense",),
    "pooled_warmup_steps": ("pooled_forward",),
    "rows_warmup_steps": ("rows",),
    "smallest": ("dense",),
    "max_age": ("rows",),
}
KEYS = (*READ_IN, *(f"comms.dct.{key}" for key in READ_BY))
PATH_WORDS = {"rows": "rows", "pooled_forward": "pooled embeddings", "dense": "dense gradients"}


@dataclass(frozen=True)
class Unread:
    """A setting that nothing reads in this config; `why`: where that is, `remedy`: what to do."""

    key: str
    value: Any
    default: Any
    why: str
    remedy: str

    def __str__(self) -> str:
        """Key, value, what was expected, what to do."""
        return f"{self.named}: expected its default, {_shown(self.default)}, {self.why}. {self.remedy}"

    @property
    def named(self) -> str:
        """KEY=VALUE."""
        return f"{self.key}={_shown(self.value)}"


def unread(cfg: RunConfig) -> list[Unread]:
    """The settings of `cfg` that have no effect."""
    found = []
    read = keys_read(cfg)
    for key in KEYS:
        value, default = _get(cfg, key), _default(cfg, key)
        if key not in read and value != default:
            found.append(Unread(key, value, default, *_words(cfg, key)))
    return found


def keys_read(cfg: RunConfig) -> set[str]:
    """Of the keys that some configs do not read, those that `cfg` does."""
    mode, codecs = cfg.consistency.mode, codecs_of(cfg)
    by_mode = {key for key, modes in READ_IN.items() if mode in modes}
    of_dct = {key for key, paths in READ_BY.items() if any(getattr(codecs, path) == "dct" for path in paths)}
    return by_mode | {f"comms.dct.{key}" for key in of_dct}


def passing_over(cfg: RunConfig, keys: Collection[str]) -> tuple[RunConfig, list[Unread]]:
    """`cfg` with those of `keys` that it does not read at their defaults, and what they were set to."""
    passed = [setting for setting in unread(cfg) if setting.key in keys]
    cleared = deepcopy(cfg)
    for setting in passed:
        section, _, last = setting.key.rpartition(".")
        setattr(_get(cleared, section), last, setting.default)
    return cleared, passed


def _words(cfg: RunConfig, key: str) -> tuple[str, str]:
    """Where `key` is not read, and what to do."""
    mode = f"consistency.mode={cfg.consistency.mode}"
    if key in READ_IN:
        return f"with {mode}, which does not read it", f"Take consistency={_or(READ_IN[key])}, or leave it out."
    paths = READ_BY[key.rpartition(".")[2]]
    has = [path for path in paths if path in OF_MODE.get(cfg.consistency.mode, ())]
    why = f"as no {_or([PATH_WORDS[path] for path in paths])} travel as dct, with {mode}"
    return why, f"Set {_or([f'comms.{path}=dct' for path in has])}, or leave it out." if has else "Leave it out."


def _or(words: Collection[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _default(cfg: RunConfig, key: str) -> Any:
    if key == "consistency.cache.capacity" and cfg.consistency.mode == "asp":
        return 0  # refused otherwise
    return _get(RunConfig(), key)


def _get(cfg: RunConfig, key: str) -> Any:
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _shown(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
