"""What the system refused (a full disk, a read-only folder) said as one message: it is no defect of ours."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

FULL_BELOW = 1 << 20  # bytes free
UNNAMED = (tempfile.gettempdir(), "/dev/shm")  # where processes write without being told to
PLACES = "runs=DIR, data.path=DIR, plan.out=DIR, out=FILE"

REMEDIES = {
    errno.ENOSPC: f"Free some space, or write elsewhere: {PLACES}.",
    errno.EDQUOT: f"Your quota is used up: free some of it, or write elsewhere: {PLACES}.",
    errno.EACCES: f"Give yourself the right to it, or name another place: {PLACES}.",
    errno.EPERM: f"Give yourself the right to it, or name another place: {PLACES}.",
    errno.EROFS: f"It cannot be written to; name another place: {PLACES}.",
    errno.ENOTDIR: "A part of this path is a file; name another place.",
    errno.EISDIR: "This is a folder; name a file.",
    errno.ENOENT: "It is not there, or was removed meanwhile.",
    errno.EEXIST: "Something is in the way; remove it or name another place.",
    errno.ENOTEMPTY: "Something is in the way; remove it or name another place.",
    errno.ENAMETOOLONG: "Choose shorter names.",
    errno.EMFILE: "Allow more open files: `ulimit -n`.",
    errno.ENFILE: "The machine has too many open files.",
    errno.EFBIG: "This file system holds no file that large; write elsewhere.",
    errno.EIO: "The device cannot be read or written; see `dmesg`.",
}


def explain(error: BaseException, places: Iterable[str | Path] = ()) -> str | None:
    """The message for what the system refused; None when `error` is anything else.

    `places`: where the command writes. Writing to an open file fails without a name; then the full one is named.
    """
    if not isinstance(error, OSError) or isinstance(error, ConnectionError | TimeoutError):
        return None
    if error.errno not in REMEDIES and error.filename is None:
        return None
    what = os.strerror(error.errno) if error.errno is not None else str(error)
    if error.filename is None and error.strerror and error.strerror != what:  # pyarrow names the file in its own words
        what = f"{error.strerror.partition('. Detail:')[0]}: {what}"
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    if not names and error.errno == errno.ENOSPC:
        names = sorted({str(place) for place in (*places, *UNNAMED) if _is_full(Path(place))})
    where = f"{' -> '.join(names)}: " if names else ""
    return f"{where}{what}.\n  {REMEDIES.get(error.errno or 0, 'See whether this path is what you meant.')}"


def _is_full(place: Path) -> bool:
    """Whether the file system of `place`, or of the folder it would be made in, is full."""
    there = next((path for path in (place.absolute(), *place.absolute().parents) if path.exists()), None)
    return there is not None and shutil.disk_usage(there).free < FULL_BELOW
