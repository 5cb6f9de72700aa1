"""The temporary folder of a launch; those of launchers that were killed are removed by the next one."""

import contextlib
import fcntl
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "hetrain-"
LOCK = "launcher.lock"  # held while the launcher lives
SETTLED_S = 60  # a younger folder may not have its lock yet


@contextmanager
def job_folder() -> Iterator[str]:
    """A new folder, removed at the end."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name, (Path(name) / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield name


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders whose launcher is gone; another user's are left to them."""
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError), lock.open("r+") as file:  # held, removed meanwhile, or not ours
            if time.time() - lock.stat().st_mtime > SETTLED_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
