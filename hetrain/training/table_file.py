"""Tables that a user asked for, as files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from hetrain.durable import replacing

OUT_FORMATS = (".parquet", ".csv")


def write_table(table: "pa.Table", out: Path) -> None:
    """Write `out`, in the format of its suffix, whole or not at all. Raises OSError."""
    with replacing(out) as aside:
        if out.suffix == ".parquet":
            pyarrow.parquet.write_table(table, aside)
        else:
            pyarrow.csv.write_csv(table, aside)
