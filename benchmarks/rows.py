"""The train split of a data set `hetrain prepare` made, as one .npz every contender can load."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from hetrain.data.schema import LABEL, load_schema, split_files


def export(path: Path, out: Path) -> int:
    """Write dense [N, I] float32, ids [N, F] int64, labels [N] float32 and rows [F] to `out`; returns N."""
    schema = load_schema(path)
    table = pq.ParquetDataset([str(file) for file in split_files(path, "train")]).read()
    if any(column.multi_hot for column in schema.sparse):
        raise SystemExit(f"{path}: has multi-hot columns, which deepctr-torch's fit() does not read here.")
    dense = np.stack([table[name].to_numpy() for name in schema.dense], axis=1).astype(np.float32)
    ids = np.stack([table[column.name].to_numpy() for column in schema.sparse], axis=1).astype(np.int64)
    labels = table[LABEL].to_numpy().astype(np.float32)
    np.savez(out, dense=dense, ids=ids, labels=labels, rows=np.array([column.rows for column in schema.sparse]))
    return len(labels)
