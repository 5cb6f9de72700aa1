"""A measured profile goes to its file, unless it would take the place of a better one."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetrain.durable import write_text
from hetrain.json_file import read_json
from hetrain.planner.machines import PROFILE

MOST_OFF = 0.3  # of measured times from what was fitted to them, where speeds can be relied on
UNEVEN = "The times are uneven: measure again when nothing else uses these machines."


def keep(file: Path, profile: Mapping[str, Any]) -> str:
    """Write `profile` to `file`, in words; of uneven times it does not replace one of even times, which stays.

    `file` is not there or holds a profile of the same machines and ranks (`check_replaceable`).
    """
    uneven = _off(profile) > MOST_OFF
    there = f"that of {_written(file)}" if file.exists() else ""
    if uneven and there and (before := _off_before(file)) <= MOST_OFF:
        return (
            f"{UNEVEN}\nnot saved   {file} keeps {there}, whose times were even (off by {before:.0%}); "
            "cluster.profile=FILE, another file, saves a profile whatever its times"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(profile, indent=1) + "\n")
    return "\n".join(
        [*[UNEVEN] * uneven, f"saved       {file}{f' (in place of {there})' * bool(there)}, {_used(file)}"]
    )


def _used(file: Path) -> str:
    """Which plans read it."""
    if file.absolute() == PROFILE.absolute():
        return "which `hetrain plan` uses where no other machines are named (cluster=local)"
    return f"which `hetrain plan` uses with cluster.profile={file}"


def _off(profile: Mapping[str, Any]) -> float:
    """How far the worst times are from what was fitted to them; older profiles say it of their series alone."""
    series = profile["measured"].values()
    return float(max(profile.get("pieces_error", 0.0), *(one["error"] for one in series)))


def _off_before(file: Path) -> float:
    """The same of the profile in `file`; infinite where it does not say, as of one written by hand: none to keep."""
    try:
        return _off(read_json(file))
    except (KeyError, TypeError, ValueError, AttributeError):
        return math.inf


def _written(file: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))
