"""Limits of FBGEMM's row numbers are told before any kernel meets them."""

from dataclasses import replace

import pytest

from hetrain.errors import DataError
from hetrain.tables import MAX_ROWS, MAX_TABLES, Table, check_tables

TABLE = Table("C1", 10, 4, ("C1",), 0.1)


def test_limits_themselves_pass():
    check_tables([replace(TABLE, rows=MAX_ROWS)] * MAX_TABLES)


def test_what_lies_beyond_is_named():
    with pytest.raises(DataError, match="32,769 sparse columns: expected at most 32,768"):
        check_tables([TABLE] * (MAX_TABLES + 1))
    for rows in (0, MAX_ROWS + 1):
        with pytest.raises(DataError, match=f"C1 has {rows:,} rows"):
            check_tables([replace(TABLE, rows=rows)])
