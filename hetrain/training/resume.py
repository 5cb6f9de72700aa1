"""What a checkpoint was made with against this run: the same data, the same settings, something left to train."""

from collections.abc import Mapping
from typing import Any

from hetrain.checkpoint import Loaded
from hetrain.config import TrainConfig
from hetrain.data.fingerprint import Fingerprint, differing
from hetrain.errors import CheckpointError, ConfigError
from hetrain.training import summary
from hetrain.training.run_folder import LENGTH, changed

# They do not decide what is trained, but a sum of floats may come out in another order.
ARITHMETIC = ("launch.device", "launch.threads")


def check_data(meta: Mapping[str, Any], data: Fingerprint, path: str, where: object) -> None:
    """Raise CheckpointError when the data set at `path` is not that of the checkpoint whose meta.json this is."""
    parts = differing(meta["data"], data)
    if parts:
        raise CheckpointError(
            f"data.path={path}: its {' and '.join(parts)} are not those that {where} was trained on: the data was "
            "replaced. Put that data set back or name it by data.path; to train on the new one, start a run of "
            "another name."
        )


def check_left(train: TrainConfig, step: int, steps_left: int, name: str | None) -> None:
    """Raise ConfigError when a run that starts at `step` would train nothing."""
    if train.max_steps is not None and train.max_steps <= step:
        key, value = "train.max_steps", train.max_steps
    elif steps_left == 0:
        key, value = "train.epochs", train.epochs
    else:
        return
    raise ConfigError(
        f"{key}={value}: the checkpoint that name={name} starts from is already at step {step}. "
        f"Raise {key}, or take another name to start anew."
    )


def settled(resumed: Loaded, settings: Mapping[str, Any]) -> str:
    """How exactly a run goes on, and what is not as it was when the checkpoint was written."""
    pairs = changed(resumed.meta["settings"], settings, ARITHMETIC)
    pairs |= changed(resumed.meta["versions"], summary.versions())
    differ = "; ".join(f"{key}: {old} there, {new} now" for key, (old, new) in pairs.items() if key not in LENGTH)
    if not resumed.exact:
        how = "weights, optimizer state and data position are taken up, caches start empty and clocks at 0"
    elif resumed.meta["layout"].get("own_pace"):
        how = "weights, optimizer state and data position are taken up, caches start empty and worker clocks at 0"
    else:
        how = "caches, clocks and random numbers included" if differ else "bit for bit"
    return f"goes on from {resumed.path}: {how}" + (f". Not as it was: {differ}" if differ else "")
