"""The folder of a run: who may write into it, what it resumes from, which checkpoint its numbers describe."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetrain import checkpoint
from hetrain.config import RunConfig
from hetrain.config.compose import from_yaml, to_yaml
from hetrain.config.schema_keys import flatten
from hetrain.errors import CheckpointError, ConfigError

CONFIG, PLAN, SUMMARY, CHECKPOINTS = "config.yaml", "plan.json", "summary.json", "checkpoints"
# What may change when a run goes on: its length, how it is watched and where it runs. Weights do not depend on these.
FREE = ("name", "runs", "checkpoint.", "telemetry.", "launch.", "data.prefetch", "data.raw")
LENGTH = ("train.epochs", "train.max_steps", "train.patience")
WATCHING = ("train.eval_every", "train.eval_batch_size")


def claim(cfg: RunConfig) -> tuple[Path, Path | None]:
    """Make or take up the folder of a run, on rank 0: (folder, checkpoint to start from or None).

    Raises ConfigError rather than write over another run, CheckpointError when checkpoint.resume names none.
    """
    assert cfg.name is not None  # the command line names every run
    folder = Path(cfg.runs) / cfg.name
    given = None if cfg.checkpoint.resume in ("auto", "never") else find(Path(cfg.checkpoint.resume), "last")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return folder, _take_up(cfg, folder) or given
    except OSError as e:
        raise ConfigError(f"{folder} cannot be made ({e.strerror}). Set `runs` to a folder you can write to.") from e
    return folder, given


def _take_up(cfg: RunConfig, folder: Path) -> Path | None:
    """The newest checkpoint of the run in an existing folder; None when it died before its first one."""
    if not folder.is_dir() or (any(folder.iterdir()) and not (folder / CONFIG).is_file()):
        raise ConfigError(f"name={cfg.name}: {folder} exists and holds no run. Choose another name.")
    if not any(folder.iterdir()):
        return None
    if cfg.checkpoint.resume == "never":
        raise ConfigError(
            f"name={cfg.name}: {folder} holds a run already and checkpoint.resume=never. "
            "Choose another name, or checkpoint.resume=auto to go on with it."
        )
    changed = _changed(from_yaml((folder / CONFIG).read_text()), cfg)
    other = {key: pair for key, pair in changed.items() if key not in LENGTH}
    if other:
        listed = "; ".join(f"{key}: {old} there, {new} now" for key, (old, new) in other.items())
        raise ConfigError(
            f"name={cfg.name}: {folder} holds a run with other settings ({listed}). "
            "Choose another name, or the same settings to go on with it."
        )
    if not changed and (summary := read_summary(folder)) is not None and not summary.get("interrupted"):
        raise ConfigError(
            f"name={cfg.name}: the run in {folder} is finished ({summary['steps']} steps, AUC {summary['auc']}). "
            "Choose another name, or raise train.epochs or train.max_steps to train it further."
        )
    checkpoint.clean(folder / CHECKPOINTS)
    return checkpoint.newest(folder / CHECKPOINTS)


def _changed(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Settings that matter to a run's weights or length and differ: key -> (before, now)."""
    old, new = flatten(asdict(before)), flatten(asdict(now))
    return {
        key: (old.get(key), new.get(key))
        for key in {**old, **new}
        if not key.startswith(FREE) and key not in WATCHING and old.get(key) != new.get(key)
    }


def describe(folder: Path, cfg: RunConfig, plan: dict[str, Any]) -> None:
    """Write config.yaml and plan.json, on rank 0. A summary that lies there is of an earlier sitting: it goes."""
    (folder / SUMMARY).unlink(missing_ok=True)
    (folder / CONFIG).write_text(to_yaml(cfg))
    (folder / PLAN).write_text(json.dumps(plan, indent=1) + "\n")


def read_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json of a run; None when it has not ended, or did not get to write it."""
    try:
        found: dict[str, Any] = json.loads((folder / SUMMARY).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found


def find(path: Path, which: str | None) -> Path:
    """A checkpoint folder from a run folder (or a checkpoint folder itself) and best, last, step_N or None.

    None: the one that summary.json describes: the best with early stopping, else the last. Raises CheckpointError.
    """
    if (path / checkpoint.META).is_file():
        return path
    inside = path / CHECKPOINTS
    if which is None:
        summary = read_summary(path) or {}
        which = f"step_{summary['weights_step']}" if "weights_step" in summary else "last"
    if which == "best":
        found = checkpoint.best(inside)
    elif which == "last":
        found = checkpoint.newest(inside)
    else:
        found = inside / which if (inside / which / checkpoint.META).is_file() else None
    if found is None:
        there = ", ".join(p.name for _, p in checkpoint.complete(inside)) or "none"
        raise CheckpointError(f"{path} has no checkpoint {which!r}; complete ones: {there}.")
    return found
