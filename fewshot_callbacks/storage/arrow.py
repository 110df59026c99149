"""Columns of Arrow files (`.arrow`, `.feather`) and streams: memory-mapped, or read batch by batch if compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fewshot_callbacks.storage.arrays import FileArrays
from fewshot_callbacks.storage.arrow_columns import ArrowColumn
from fewshot_callbacks.system.extras import required_extra

# The first bytes of an Arrow file. A stream begins differently, and has no index.
_FILE_MARK = b"ARROW1"


def open_arrow(file: Path) -> FileArrays:
    """Return the columns of a file or a stream.

    Only the headers of batches that are not requested are read.
    """
    with required_extra("files", f"a {file.suffix} file"):
        arrow = import_module("pyarrow")
    # The file is mapped once, so a file that later replaces it is not read.
    mapped = arrow.memory_map(str(file)).read_buffer()
    is_stream = not is_arrow_file(mapped[: len(_FILE_MARK)].to_pybytes())
    return arrow_arrays(lambda: arrow.BufferReader(mapped), is_stream=is_stream)


def is_arrow_file(head: bytes) -> bool:
    """Return whether the first bytes belong to an Arrow file, and not to a stream."""
    return head.startswith(_FILE_MARK)


def arrow_arrays(new_source: Callable[[], Any], *, is_stream: bool) -> FileArrays:
    """Return the columns of a file or a stream.

    `new_source` returns a pyarrow source, positioned at the beginning.
    """
    ipc = import_module("pyarrow.ipc")

    def reader(columns: list[int]) -> Any:
        """Return a reader of the chosen columns; [] means all."""
        options = ipc.IpcReadOptions(included_fields=columns)
        if is_stream:
            return ipc.open_stream(new_source(), options=options)
        return ipc.open_file(new_source(), options=options)

    def batches(column: int, group: int = 0) -> Iterator[Any]:
        of_column = reader([column])
        if is_stream:
            yield from of_column
        else:
            yield from map(of_column.get_batch, range(group, of_column.num_record_batches))

    schema = reader([]).schema
    # One column is read to count the rows. It may have to be decompressed, so it is not the vectors.
    smallest = min(range(len(schema)), key=lambda column: schema.field(column).type.num_fields)
    rows = sum(batch.num_rows for batch in batches(smallest))
    return {field.name: ArrowColumn(field, [0, rows], partial(batches, column)) for column, field in enumerate(schema)}
