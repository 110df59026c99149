"""Columns of Parquet files, decoded a few thousand rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from fewshot_callbacks.storage.arrays import FileArrays
from fewshot_callbacks.storage.arrow_columns import ArrowColumn
from fewshot_callbacks.system.extras import required_extra

# Rows per batch: 4 MB for 256-dimensional float32 vectors, so that the cost of the calls is small.
_BATCH_ROWS = 4096
# Bytes per read: a compressed page has about a megabyte.
_BUFFER_BYTES = 1 << 20


def open_parquet(file: Path) -> FileArrays:
    """Return the columns of a file. Reading can begin at each row group."""
    with required_extra("files", "a .parquet file"):
        parquet = import_module("pyarrow.parquet")
    opened = parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES)
    groups = opened.num_row_groups
    group_rows = (opened.metadata.row_group(group).num_rows for group in range(groups))
    group_starts = [0, *accumulate(group_rows)]

    def batches(name: str, group: int) -> Iterator[Any]:
        yield from opened.iter_batches(_BATCH_ROWS, row_groups=range(group, groups), columns=[name])

    return {field.name: ArrowColumn(field, group_starts, partial(batches, field.name)) for field in opened.schema_arrow}
