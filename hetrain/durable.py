"""Files that are there whole or not at all, whatever is killed and whenever the disk is full."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one stroke: a reader, or a crash, meets the old content or the new one.

    Raises OSError, and then leaves what was there. The temporary file beside it has a name that begins with a dot.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
