"""What `eval` and `predict` take beside the config that a run saved: what they read and where they run."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetrain.config import RunConfig
from hetrain.config.compose import GROUPS, chosen_experiment, typed
from hetrain.config.schema_keys import flatten
from hetrain.config.unread import shown
from hetrain.errors import ConfigError

TAKEN = (
    *("data.name", "data.path", "data.prefetch", "data.sample", "data.split"),
    *("launch.nproc", "launch.device", "launch.threads", "launch.timeout_s"),
    *("planner", "cluster", "consistency", "store.device", "store.index", "train.eval_batch_size"),
    "checkpoint.resume",  # that of the run may be gone
)
NOT_TAKEN = ("planner.plan",)
GROUPS_TAKEN = tuple(group for group in GROUPS if group not in ("model", "optimizer", "comms"))


def check_no_experiment(verb: str, words: Sequence[str], file: Path) -> None:
    """Raise ConfigError for an experiment, which chooses a model: that of the run is in `file`."""
    if (name := chosen_experiment(words)) is not None:
        raise ConfigError(
            f"+experiment={name}: {verb} takes the config that the run saved, {file}. Leave it out, or set single "
            "keys, as in data.path=DIR."
        )


def check_evaluated(verb: str, words: Sequence[str], saved: RunConfig, cfg: RunConfig, file: Path) -> None:
    """Raise ConfigError for a word that contradicts the run whose config is `saved`, in `file`, or that nothing reads.

    cfg: what `saved` has become by `words`.
    """
    mine, theirs = flatten(asdict(saved)), flatten(asdict(cfg))
    for key, value in typed(words).items():
        if key in GROUPS_TAKEN or takes(key) or key == "model._target_":  # a class may have moved
            continue
        if key.partition(".")[0] == "comms" and value in (None, "none"):  # of a path that another mode has not
            continue
        below = f"{key}."
        changed = [k for k in theirs if (k == key or k.startswith(below)) and theirs[k] != mine.get(k)]
        if changed:
            raise ConfigError(f"{key}={shown(value)}: {_why(verb, key, changed, mine, file)} Leave it out.")


def takes(key: str) -> bool:
    """Whether `eval` and `predict` read `key` from their command line."""
    return key not in NOT_TAKEN and any(key == taken or key.startswith(f"{taken}.") for taken in TAKEN)


def _why(verb: str, key: str, changed: Sequence[str], mine: dict[str, Any], file: Path) -> str:
    """What was expected in place of `key`, whose keys `changed` are not those of the run."""
    if key == "train.batch_size":
        return f"{verb} does not read it, but train.eval_batch_size."
    if key.partition(".")[0] == "comms":
        return f"{verb} does not read it: it exchanges float32, whatever the run did."
    if key.partition(".")[0] != "model":
        return f"{verb} does not read it, as it trains nothing: what the run had is in {file}."
    own = mine["model._target_"] if "model._target_" in changed else None
    own = own or ", ".join(f"{k}={shown(mine.get(k))}" for k in changed)
    return f"expected the model of the run, whose weights these are ({own} in {file})."
