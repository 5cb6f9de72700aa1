"""Files that are there whole or not at all, whatever is killed and whenever the disk is full."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path`, which begins with a dot, to write to: closing it puts that file in the place of `path`.

    On OSError `path` is what it was, and the file beside it is gone.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        yield aside
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in one stroke: a reader, or a crash, meets the old content or the new one.

    Raises OSError, and then leaves what was there.
    """
    with replacing(path) as aside, aside.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
