"""One process at a time writes into a run folder. The kernel lets go of the lock however that process ends."""

import fcntl
import logging
import os
import socket
from pathlib import Path

from hetrain.errors import ConfigError

logger = logging.getLogger(__name__)
FILE = ".lock"


class RunLock:
    """Held from its making to `release`, or to the end of this process."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError when another process holds it."""
        self._path = folder / FILE
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "that is just starting"
            self._file.close()
            raise ConfigError(
                f"name={folder.name}: run {folder} is in use by process {owner}. "
                "Wait for it to end, or choose another name."
            ) from None
        except OSError as e:
            logger.warning("%s cannot be locked (%s): see to it that no other run has this name", folder, e.strerror)
        self._file.truncate(0)
        self._file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    @property
    def lost(self) -> bool:
        """Whether the folder was removed since, so that the lock keeps nobody out of what stands in its place."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return True

    def release(self) -> None:
        """Let go; may be called twice."""
        self._file.close()
