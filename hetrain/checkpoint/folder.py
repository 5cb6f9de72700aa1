"""The folder `checkpoints/`: which checkpoints are complete, which are kept."""

import json
import math
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hetrain.checkpoint.checksum import Sum, check_file
from hetrain.durable import sync_folder, write_text
from hetrain.errors import CheckpointError
from hetrain.ranks import Ranks

FORMAT = 2
META = "meta.json"
CRC = "crc32"  # of everything else in meta.json, as JSON
ASIDE = ".tmp"  # suffix of a checkpoint that is being written


def step_folder(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies."""
    return folder / f"step_{step}"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint in `folder`, oldest first. What lies aside is not complete."""
    found = []
    for path in folder.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit() and (path / META).is_file():
            found.append((int(number), path))
    return sorted(found)


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`, or None."""
    found = complete(folder)
    return found[-1][1] if found else None


def best(folder: Path) -> Path | None:
    """The checkpoint of the highest validation AUC, the earliest of equals; None when none has one."""
    scored = [(_validation_auc(path), -step, path) for step, path in complete(folder)]
    scored = [s for s in scored if not math.isnan(s[0])]
    return max(scored)[2] if scored else None


def _validation_auc(path: Path) -> float:
    try:
        validation = read_meta(path).get("validation") or {}
    except CheckpointError:  # a damaged checkpoint is nobody's best; loading it says what is wrong
        return math.nan
    auc = validation.get("auc")
    return math.nan if auc is None else float(auc)


def clean(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for path in folder.glob(f"step_*{ASIDE}"):
        shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int, ranks: Ranks) -> None:
    """Remove all but the newest `keep` and the best. Collective; rank 0 removes."""

    def failed(reason: str) -> CheckpointError:
        return CheckpointError(f"old checkpoints in {folder} could not be removed ({reason}). Remove them by hand.")

    ranks.together(lambda: _prune(folder, keep) if ranks.first else None, (OSError,), failed)


def _prune(folder: Path, keep: int) -> None:
    spared = best(folder)
    for _, path in complete(folder)[:-keep]:
        if path != spared:
            # renamed first, so that a half-removed checkpoint is never taken for a complete one
            doomed = path.with_name(path.name + ASIDE)
            path.rename(doomed)
            shutil.rmtree(doomed)


def read_meta(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint. Raises CheckpointError when it is missing, damaged or of another format."""
    file = path / META
    try:
        meta: Any = json.loads(file.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"no checkpoint at {path}: {META} is missing. Name a run folder or a folder like checkpoints/step_100."
        ) from None
    except (OSError, ValueError) as e:
        raise _damaged(file, str(e)) from e
    if not isinstance(meta, dict):
        raise _damaged(file, "it holds no JSON object")
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {meta.get('format')!r}, this version reads {FORMAT}. Use the hetrain that wrote it."
        )
    if meta.pop(CRC, None) != _crc(meta):
        raise _damaged(file, "its checksum is not that of what was written")
    return meta


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file} is damaged ({what}). Remove {file.parent} and use an older checkpoint.")


def _crc(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta).encode())


def check_files(path: Path, meta: dict[str, Any], ranks: Ranks) -> None:
    """Raise CheckpointError when a file of the checkpoint is missing or holds other bytes than were written.

    Local: every rank checks its share of the files.
    """
    for name in sorted(meta["files"])[ranks.rank :: ranks.world_size]:
        check_file(path, name, meta["files"][name])


def publish(meta: dict[str, Any], sums: Mapping[Path, Sum], aside: Path, path: Path) -> None:
    """Write meta.json into `aside` and rename it to `path`, durably: after a crash it is there whole or not at all.

    `sums`: of every file in `aside`, by its path there.
    """
    files = {f.relative_to(aside).as_posix(): asdict(found) for f, found in sums.items()}
    whole = json.loads(json.dumps(meta | {"files": files}))  # as it will be read: the checksum is over that
    write_text(aside / META, json.dumps(whole | {CRC: _crc(whole)}, indent=1) + "\n")
    aside.rename(path)
    sync_folder(path.parent)
