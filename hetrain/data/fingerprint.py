"""Tells whether a data set is the one a run was trained on, whatever its path, age and compression.

Hashed: columns, rows of every row group, and the decoded values of up to 64 row groups of each split, spread evenly.
So a data set of up to a million rows is compared whole; in a larger one, a change inside the groups in between that
leaves every row count as it was is not seen.
"""

import hashlib
from dataclasses import asdict
from pathlib import Path

import numpy as np

from hetrain.data.columns import Columns
from hetrain.data.schema import SPLITS, DatasetSchema

SAMPLED = 64  # row groups of a split; some 2 ms each

Fingerprint = dict[str, str]  # "columns" and every split with rows -> hash


def fingerprint(path: Path | str, schema: DatasetSchema, splits: tuple[str, ...] = SPLITS) -> Fingerprint:
    """Of the data set at `path`, those of `splits` that have rows. Raises DataError when a file cannot be read."""
    columns = [list(schema.dense), [asdict(column) for column in schema.sparse]]
    found = {"columns": hashlib.blake2b(repr(columns).encode(), digest_size=16).hexdigest()}
    for split in splits:
        if schema.splits.get(split, 0):
            found[split] = _of_split(Columns(path, split, schema))
    return found


def _of_split(columns: Columns) -> str:
    sizes = columns.block_sizes
    digest = hashlib.blake2b(sizes.tobytes(), digest_size=16)
    for block in np.unique(np.linspace(0, len(sizes) - 1, SAMPLED).astype(np.int64)):
        window = columns.read(np.array([block]), 0, int(sizes[block]), None)
        jagged = [array for column in window.multi_hot for array in (column.values, column.offsets)]
        for array in (window.labels, window.dense, window.one_hot, *jagged):
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def differing(one: Fingerprint, other: Fingerprint) -> list[str]:
    """What differs among the parts that both have."""
    return [part for part in one if part in other and one[part] != other[part]]
