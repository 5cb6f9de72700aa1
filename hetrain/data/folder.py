"""Writes a data set folder so that it is either finished or not there, whoever is killed when."""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Decoding is on the training path. Measured per 512 rows of 40 columns: this 50 us, zstd 150 to 210, snappy 150 to 330.
# Dictionary pages alone bring a Criteo row from 160 to some 55 to 90 bytes.
PARQUET: dict[str, Any] = {"compression": "none", "use_dictionary": True, "write_statistics": False}
ROW_GROUP = 16_384  # rows decoded and shuffled as one


def partial_folder(path: Path) -> Path:
    """Where a data set is built until it is finished; on the same file system, so that a rename publishes it."""
    return path.parent / f".{path.name}.partial"


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Only one process at a time builds the data set at `path`; the kernel lets go when a process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class PartWriter:
    """One Parquet file of full row groups. It has its name only once `close` was reached."""

    def __init__(self, file: Path) -> None:
        self.rows = 0
        self._file = file
        self._temporary = file.with_suffix(".tmp")
        self._writer: pq.ParquetWriter | None = None
        self._held: list[pa.Table] = []  # less than a row group
        self._held_rows = 0

    def write(self, table: "pa.Table") -> None:
        """Append rows."""
        if self._writer is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._temporary, table.schema, **PARQUET)
        self.rows += table.num_rows
        self._held.append(table)
        self._held_rows += table.num_rows
        full = self._held_rows - self._held_rows % ROW_GROUP
        if full:
            joined = pa.concat_tables(self._held)
            self._writer.write_table(joined.slice(0, full).combine_chunks(), row_group_size=ROW_GROUP)
            self._held, self._held_rows = [joined.slice(full)], self._held_rows - full

    def close(self) -> None:
        """Finish the file and give it its name. A part without rows leaves no file."""
        if self._writer is None:
            return
        if self._held_rows:
            self._writer.write_table(pa.concat_tables(self._held).combine_chunks(), row_group_size=ROW_GROUP)
        self._writer.close()
        self._temporary.rename(self._file)
