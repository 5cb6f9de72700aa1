"""Small prepared data sets whose examples can be told apart: dense column I1 is the example's number."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hetrain.data.schema import DatasetSchema, SparseColumn, save_schema


def write_set(path: Path, examples: int, *, row_group: int = 16, files: int = 2, multi_hot: bool = False) -> Path:
    """Columns: label, I1 (example number), I2, C1 (number % 7), C2 (number % 5; a list of it when multi_hot), C3."""
    number = np.arange(examples)
    lists = [[int(n % 5)] * int(n % 3) for n in number]
    table = pa.table(
        {
            "label": (number % 2).astype(np.float32),
            "I1": number.astype(np.float32),
            "I2": (number * 2).astype(np.float32),
            "C1": (number % 7).astype(np.int32),
            "C2": pa.array(lists, pa.list_(pa.int64())) if multi_hot else (number % 5).astype(np.int64),
            "C3": (number % 11).astype(np.int32),
        }
    )
    (path / "train").mkdir(parents=True)
    cuts = [examples * i // files for i in range(files + 1)]
    for i in range(files):
        part = table.slice(cuts[i], cuts[i + 1] - cuts[i])
        pq.write_table(part, path / "train" / f"part-{i:05d}.parquet", row_group_size=row_group)
    sparse = (SparseColumn("C1", 7), SparseColumn("C2", 5, multi_hot), SparseColumn("C3", 11))
    save_schema(path, DatasetSchema(("I1", "I2"), sparse, {"train": examples, "validation": 0, "test": 0}))
    return path
