"""The folder of a run: who may write into it, what it resumes from, which checkpoint its numbers describe."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetrain import checkpoint
from hetrain.config import RunConfig
from hetrain.config.compose import to_yaml
from hetrain.config.saved import read_saved
from hetrain.config.schema_keys import flatten
from hetrain.durable import write_text
from hetrain.errors import CheckpointError, ConfigError
from hetrain.training.run_lock import RunLock

CONFIG, PLAN, SUMMARY, METRICS, CHECKPOINTS = (
    "config.yaml",
    "plan.json",
    "summary.json",
    "metrics.jsonl",
    "checkpoints",
)
# What may change when a run goes on: its length, how it is watched and where it runs. Weights do not depend on these.
FREE = ("name", "runs", "checkpoint.", "telemetry.", "launch.", "data.prefetch", "data.raw")
LENGTH = ("train.epochs", "train.max_steps", "train.patience")
WATCHING = ("train.eval_every", "train.eval_batch_size")


@dataclass(frozen=True)
class Claim:
    """A run folder that is ours to write into."""

    folder: Path
    start: Path | None  # the checkpoint to start from
    ended: bool  # `start` is of a run that has ended: going on must train something


def claim(cfg: RunConfig) -> tuple[Claim, RunLock]:
    """Make or take up the folder of a run, on rank 0, and keep others out of it while the lock is held.

    Raises ConfigError rather than write over another run, CheckpointError when checkpoint.resume names none.
    """
    assert cfg.name is not None  # the command line names every run
    folder = Path(cfg.runs) / cfg.name
    given = _given(cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder)
    except FileExistsError:
        raise ConfigError(f"name={cfg.name}: {folder} is a file. Choose another name.") from None
    except OSError as e:
        raise ConfigError(f"{folder} cannot be made ({e.strerror}). Set `runs` to a folder you can write to.") from e
    try:
        own = _take_up(cfg, folder)
    except BaseException:
        lock.release()
        raise
    if own is None:
        return Claim(folder, given, ended=True), lock
    return Claim(folder, own, ended=_is_finished(read_summary(folder))), lock


def _take_up(cfg: RunConfig, folder: Path) -> Path | None:
    """The newest checkpoint of the run in a folder; None when it is new or died before its first one."""
    holds = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
    if not holds:
        return None
    if CONFIG not in holds:
        raise ConfigError(f"name={cfg.name}: {folder} exists and holds no run. Choose another name.")
    if cfg.checkpoint.resume == "never":
        raise ConfigError(
            f"name={cfg.name}: {folder} holds a run already and checkpoint.resume=never. "
            "Choose another name, or checkpoint.resume=auto to go on with it."
        )
    differ = changed(flatten(asdict(read_saved(folder / CONFIG))), flatten(asdict(cfg)))
    other = {key: pair for key, pair in differ.items() if key not in LENGTH}
    if other:
        listed = "; ".join(f"{key}: {old} there, {new} now" for key, (old, new) in other.items())
        raise ConfigError(
            f"name={cfg.name}: {folder} holds a run with other settings ({listed}). "
            "Choose another name, or the same settings to go on with it."
        )
    summary = read_summary(folder)
    if not differ and summary is not None and _is_finished(summary):
        raise ConfigError(
            f"name={cfg.name}: the run in {folder} is finished ({summary.get('steps')} steps, AUC "
            f"{summary.get('auc')}). Choose another name, or raise train.epochs or train.max_steps to train it further."
        )
    _check_metrics(folder / METRICS)
    checkpoint.clean(folder / CHECKPOINTS)
    return checkpoint.newest(folder / CHECKPOINTS)


def _given(cfg: RunConfig) -> Path | None:
    """The checkpoint that checkpoint.resume names. Raises CheckpointError when there is none."""
    return None if cfg.checkpoint.resume in ("auto", "never") else find(Path(cfg.checkpoint.resume), "last")


def start_of(cfg: RunConfig) -> tuple[Path | None, int]:
    """The checkpoint that a run would start from now, and its step; None and 0 where it would begin anew."""
    assert cfg.name is not None
    start = checkpoint.newest(Path(cfg.runs) / cfg.name / CHECKPOINTS) or _given(cfg)
    return start, 0 if start is None else checkpoint.read_meta(start)["step"]


def has_ended(folder: Path) -> bool:
    """Whether the run in a folder has trained to its end, by its summary.json."""
    return _is_finished(read_summary(folder))


def _is_finished(summary: Mapping[str, Any] | None) -> bool:
    return summary is not None and not summary.get("interrupted")


def _check_metrics(file: Path) -> None:
    try:
        file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except ValueError as e:
        raise ConfigError(f"{file} is damaged ({e}). Move it away to go on with this run without it.") from None


def changed(old: Mapping[str, Any], new: Mapping[str, Any], also: Collection[str] = ()) -> dict[str, tuple[Any, Any]]:
    """Flat settings that matter to a run's weights or length, or are named in `also`, and differ: key -> (old, new)."""
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return {
        key: (old.get(key), new.get(key))
        for key in keys
        if key in also or not (key.startswith(FREE) or key in WATCHING)
    }


def describe(folder: Path, cfg: RunConfig, plan: dict[str, Any]) -> None:
    """Write config.yaml and plan.json, on rank 0. A summary that lies there is of an earlier sitting: it goes."""
    (folder / SUMMARY).unlink(missing_ok=True)
    write_text(folder / CONFIG, to_yaml(cfg))
    write_text(folder / PLAN, json.dumps(plan, indent=1) + "\n")


def make_anew(folder: Path, cfg: RunConfig, plan: dict[str, Any]) -> RunLock:
    """The folder of a run that goes on, once it was removed: described, and locked again, on rank 0.

    Raises ConfigError when another run stands there by now.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder)
    if (folder / CONFIG).exists():
        lock.release()
        raise ConfigError(
            f"name={cfg.name}: {folder} was removed while this run went on, and another run has taken its place. "
            "This one cannot save any more; start it under another name."
        )
    describe(folder, cfg, plan)
    return lock


def read_summary(folder: Path) -> dict[str, Any] | None:
    """summary.json of a run; None when it has not ended, or did not get to write it."""
    try:
        found = json.loads((folder / SUMMARY).read_text())
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


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
