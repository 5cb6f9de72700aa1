"""Tables that a user asked for, as files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

OUT_FORMATS = (".parquet", ".csv")


def write_table(table: "pa.Table", out: Path) -> None:
    """Write `out`, in the format of its suffix, whole or not at all. Raises OSError."""
    aside = out.with_name(f".{out.name}.tmp")
    try:
        if out.suffix == ".parquet":
            pyarrow.parquet.write_table(table, aside)
        else:
            pyarrow.csv.write_csv(table, aside)
        aside.replace(out)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
