"""CRC-32 of a checkpoint's files: worked out while they are written (7 GB/s here), checked before they are read."""

import io
import os
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from hetrain.errors import CheckpointError

CHUNK = 1 << 24  # bytes read at a time


@dataclass(frozen=True)
class Sum:
    """What a file held when it was written."""

    bytes: int
    crc32: int


class _Summed(io.FileIO):
    """A file written from its start to its end, summed on the way."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.written = Sum(0, 0)

    def write(self, data: Any, /) -> int:
        count = super().write(data)
        assert count is not None  # the file blocks
        with memoryview(data).cast("B") as seen:
            self.written = Sum(self.written.bytes + count, zlib.crc32(seen[:count], self.written.crc32))
        return count


@contextmanager
def writing(path: Path, sums: dict[Path, Sum]) -> Generator["io.BufferedWriter[_Summed]"]:
    """`path` opened to be written; its sum is in `sums` afterwards. Raises OSError."""
    raw = _Summed(path)
    with io.BufferedWriter(raw) as f:
        yield f
        if not f.closed:  # torch.distributed.checkpoint syncs and closes by itself
            f.flush()
            os.fsync(f.fileno())
        sums[path] = raw.written


class SummedFileSystem(FileSystem):
    """Files of torch.distributed.checkpoint, summed while it writes them."""

    def __init__(self, sums: dict[Path, Sum]) -> None:
        self._sums = sums

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        """A stream to write to is summed; one to read from is the plain one."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with writing(Path(path), self._sums) as f:
            yield cast(io.IOBase, f)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """The sum goes with the name."""
        super().rename(path, new_path)
        if (found := self._sums.pop(Path(path), None)) is not None:
            self._sums[Path(new_path)] = found


def check_file(checkpoint: Path, name: str, expected: Mapping[str, int]) -> None:
    """Raise CheckpointError when file `name` of a checkpoint is missing or holds other bytes than were written."""
    file = checkpoint / name
    advice = f"Remove {checkpoint} and use an older checkpoint (checkpoint.resume=FOLDER, or eval's checkpoint=)."
    size = file.stat().st_size if file.is_file() else None
    if size != expected["bytes"]:
        state = "is missing" if size is None else f"has {size} bytes, {expected['bytes']} were written"
        raise CheckpointError(f"{file} {state}. {advice}")
    crc = 0
    with file.open("rb", buffering=0) as f:
        while chunk := f.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    if crc != expected["crc32"]:
        raise CheckpointError(f"{file} is damaged: its checksum is not that of what was written. {advice}")
