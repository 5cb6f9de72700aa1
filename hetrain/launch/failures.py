"""How a failing rank tells the launcher what went wrong, and which rank's error was the cause.

Each failing rank leaves one small file. When one rank dies the others soon fail too, for want of their peer: those
are consequences and must not hide the cause.
"""

import json
import re
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hetrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    HetrainError,
    LostPeerError,
    SilentPeerError,
    TrainingError,
)
from hetrain.launch.system_error import explain
from hetrain.roles import Roles

# gloo raises plain RuntimeErrors: only their text tells.
GLOO_LOST_PEER = re.compile(
    r"gloo|connection (was )?(closed|reset|refused|lost)|broken pipe|closed by peer|timed out|timeout|tcpstore",
    re.IGNORECASE,
)
GLOO_WAITED = re.compile(r"timed out waiting \d+\s?ms", re.IGNORECASE)

# What is wrong with settings and files is so for every rank the launcher starts: they share one machine, and the
# others may have been ended before they could say it too.
SAME_EVERYWHERE = {error.exit_code for error in (ConfigError, DataError, CheckpointError)}


@dataclass(frozen=True)
class Failure:
    """One rank's error. `defect`: not the user's to mend, so `text` is a traceback."""

    rank: int
    text: str
    exit_code: int
    defect: bool
    lost_peer: bool
    time: float
    waited: bool = False  # the peer was there and did not answer in time


class RankError(HetrainError):
    """A rank ended with an error; the message is that rank's own.

    `may_pass`: a process died, crashed or waited in vain, so that another try may do better; what a user or the data
    got wrong stays wrong. `what`: who died of what, in half a line.
    """

    def __init__(self, text: str, exit_code: int, what: str = "", may_pass: bool = False) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.what, self.may_pass = what, may_pass


def describe(rank: int, error: BaseException, places: Iterable[str | Path] = ()) -> Failure:
    """The record of `error` as rank `rank` met it; `places`: where it was writing."""
    refused = explain(error, places)
    defect = not isinstance(error, HetrainError) and refused is None
    text = "".join(traceback.format_exception(error)).rstrip() if defect else refused or str(error)
    code = error.exit_code if isinstance(error, HetrainError) else 1
    return Failure(rank, text, code, defect, _lost_peer(error), time.time(), _waited(error))


def _lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone. Our own say so by their class, whatever they quote."""
    if isinstance(error, HetrainError):
        return isinstance(error, LostPeerError)
    if isinstance(error, ConnectionError | TimeoutError) or any(k.__name__ == "DistError" for k in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and bool(GLOO_LOST_PEER.search(str(error)))


def _waited(error: BaseException) -> bool:
    """Whether `error` says that another rank is there and did not answer in time."""
    if isinstance(error, SilentPeerError | TimeoutError):
        return True
    return isinstance(error, RuntimeError) and bool(GLOO_WAITED.search(str(error)))


def leave(folder: Path, failure: Failure) -> None:
    """Write `failure` where the launcher looks, whole or not at all."""
    temporary = folder / f".rank{failure.rank}"
    temporary.write_text(json.dumps(asdict(failure)))
    temporary.replace(folder / f"rank{failure.rank}.json")


def forget(folder: Path) -> None:
    """Remove what the ranks have left, before they are started again."""
    for file in folder.glob("rank*.json"):
        file.unlink()


def cause(folder: Path, roles: Roles, exit_codes: dict[int, int], after_death: str = "") -> RankError:
    """The error to show for a run whose ranks ended with `exit_codes` (those known; negative: a signal).

    after_death: what to do when a process died without a word.
    """
    told = [Failure(**json.loads(file.read_text())) for file in folder.glob("rank*.json")]
    told.sort(key=lambda failure: (failure.lost_peer, failure.time))
    silent = [rank for rank in range(roles.world_size) if all(failure.rank != rank for failure in told)]
    killed = [rank for rank in silent if exit_codes.get(rank, 0) != 0]
    killed.sort(key=lambda rank: exit_codes[rank] == -signal.SIGTERM)  # which the launcher ends the others with
    if told and not told[0].lost_peer:
        return _shown(told[0], roles)
    waited = [failure for failure in told if failure.waited]
    if waited and silent:  # the launcher ended what did not even notice
        what = f"{' and '.join(roles.name(rank) for rank in silent)} did not answer for launch.timeout_s"
        return RankError(
            f"{what} and had to be ended: stopped, or far slower than the others. "
            f"{roles.name(waited[0].rank)} says: {_in_short(waited[0])}{after_death}",
            TrainingError.exit_code,
            what,
            may_pass=True,
        )
    if killed or (told and silent):  # the others only lost their peer: one that left no word is the cause
        rank = killed[0] if killed else silent[0]
        what, remedy = _death(exit_codes.get(rank), roles.computes(rank))
        what = f"{roles.name(rank)} {what}"
        return RankError(f"{what}{remedy}{after_death}", 1, what, may_pass=True)
    if told:
        return _shown(told[0], roles)
    what = f"the run's processes ended without a word (exit codes {exit_codes})"
    return RankError(f"{what}{after_death}", 1, what, may_pass=True)


def not_ended(ranks: Iterable[int], roles: Roles, timeout_s: float, complete: str = "") -> RankError:
    """The error of ranks that were still there when others had long done their part, and were killed for it.

    complete: a sentence on what is there all the same.
    """
    what = f"{' and '.join(roles.name(rank) for rank in sorted(ranks))} did not end for launch.timeout_s={timeout_s:g}"
    text = f"{what} after the others had done their part, and had to be killed: stopped, or stuck.{complete}"
    return RankError(text, TrainingError.exit_code, what, may_pass=True)


def _shown(failure: Failure, roles: Roles) -> RankError:
    name = roles.name(failure.rank)
    if failure.lost_peer and "gloo" in _in_short(failure):  # where it was when the connection broke explains nothing
        did = "waited in vain for another rank" if failure.waited else "lost another rank"
        what = f"{name} {did}"
        return RankError(f"{what}: {_in_short(failure)}.", TrainingError.exit_code, what, may_pass=True)
    if failure.defect:
        what = f"{name} failed ({_in_short(failure)})"
        return RankError(
            f"{name} failed. This is a defect of hetrain or of a model:\n{failure.text}", 1, what, may_pass=True
        )
    told_where = roles.world_size > 1 and failure.exit_code not in SAME_EVERYWHERE
    where = f"\n  ({name})" if told_where else ""
    what = f"{name}: {failure.text.splitlines()[0]}"
    return RankError(failure.text + where, failure.exit_code, what, may_pass=failure.lost_peer)


def _in_short(failure: Failure) -> str:
    """What a rank says, without the traceback: where it waited does not matter if the peer is known."""
    return failure.text.splitlines()[-1] if failure.defect else failure.text


def _death(exit_code: int | None, computes: bool) -> tuple[str, str]:
    """What became of a process that left no word, and what to do about it."""
    if exit_code is None or exit_code == -9:
        remedy = "Lower train.batch_size, consistency.cache.capacity or launch.nproc, or use"
        if not computes:
            remedy = "A server holds rows: share them out over more machines (cluster.servers), or use"
        return (
            "was killed from outside",
            f", most often because memory ran out (see `dmesg`).\n  {remedy} a machine with more memory.",
        )
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return f"was ended by {name}", "; a crash inside a native kernel looks like this."
    return f"ended with exit code {exit_code} and left no message", "."
