"""Neighbours in files: Parquet with exact scores, ties and ids, or `.ivecs` and `.fvecs` for other libraries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Shaped
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.outputs import naming_output, whole_file
from fewshot_callbacks.functional.neighbours import Neighbours
from fewshot_callbacks.system.extras import required_extra

# Neighbours per row group. It is constant, so that the file only depends on the neighbours, not on the number of processes
# or the size of batches.
GROUP_NEIGHBOURS = 2**18
# Key of the metadata of a Parquet file.
METADATA = b"fewshot_callbacks"
# The columns from which neighbours are read again.
_NEEDED = ("query", "indices", "scores", "tied", "unlisted_ties")


class UserIds(NamedTuple):
    """The ids of the queries and of the gallery, as the user passed them."""

    queries: NDArray[Any] | None = None  # (queries,) None if they have none
    gallery: NDArray[Any] | None = None  # (gallery,)


def write_neighbours(
    path: str | os.PathLike[str],
    found: Neighbours,
    *,
    query_ids: Any | None = None,
    gallery_ids: Any | None = None,
    about: Mapping[str, object] | None = None,
) -> None:
    """Write neighbours to a file. The file extension decides the format.

    A `.parquet` file has one row per query, with the columns `query`, `indices`, `scores` (float64), `tied`, `unlisted_ties`
    and, if you have them, `query_id`, `ids` and `relevant`. `indices` are gallery rows, and `ids` are the ids of these rows.
    An `.ivecs` file only has `indices`, as int32. An `.fvecs` file only has `scores`, rounded to float32.

    Args:
        path: The file. An existing file is replaced when the new file is complete.
        found: The result of `nearest`.
        query_ids: (queries,) ids of all queries, integers or strings. They are only written to Parquet.
        gallery_ids: (gallery,) id of each gallery row.
        about: Plain values to record in a Parquet file, such as `{"similarity": "cosine"}`.

    Raises:
        ValueError: If the extension is unknown, or a gallery row does not fit into int32 in an `.ivecs` file.
        ModuleNotFoundError: If `pyarrow` is not installed, for a `.parquet` file.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from fewshot_callbacks import nearest
        >>> found = nearest(torch.tensor([[1.0, 0.0], [2.0, 0.0], [1.0, 1.0]]), k=2)
        >>> path = f"{tempfile.mkdtemp()}/truth.parquet"
        >>> write_neighbours(path, found, gallery_ids=["owl-1", "owl-2", "heron-1"])
        >>> read_neighbours(path).indices
        tensor([[1, 2],
                [0, 2],
                [0, 1]])
    """
    ids = UserIds(*(None if values is None else np.asarray(values) for values in (query_ids, gallery_ids)))
    write_batches(path, [found], ids, about or {})


def write_batches(
    path: str | os.PathLike[str], batches: Iterable[Neighbours], ids: UserIds, about: Mapping[str, object]
) -> None:
    """Write the neighbours of batches of queries to one file, in order (see `write_neighbours`).

    A few times `GROUP_NEIGHBOURS` neighbours are in memory, in addition to a batch.
    """
    opened = _opener(path)
    with whole_file(path) as file, opened(file, ids, about) as write:
        for group in _groups(batches):
            with naming_output(path):
                write(group)


def check_name(path: str | os.PathLike[str]) -> None:
    """Refuse a file name with an unknown extension, or a format whose package is not installed."""
    if _opener(path) is _parquet:
        with required_extra("files", "a .parquet file"):
            import_module("pyarrow.parquet")


def read_neighbours(path: str | os.PathLike[str]) -> Neighbours:
    """Return the neighbours in a `.parquet` file that `write_neighbours` or `fewshot nearest` wrote.

    Raises:
        ValueError: If the file does not exist or is not such a file. (`.ivecs` and `.fvecs` files lack scores or ties.)
        ModuleNotFoundError: If `pyarrow` is not installed.

    Examples:
        >>> import tempfile
        >>> import torch
        >>> from fewshot_callbacks import nearest
        >>> path = f"{tempfile.mkdtemp()}/truth.parquet"
        >>> write_neighbours(path, nearest(torch.eye(3), k=1))
        >>> read_neighbours(path).unlisted_ties  # the other two rows tie
        tensor([1, 1, 1])
    """
    file = Path(path)
    how = "Write one with 'fewshot nearest FILES -o truth.parquet', or with write_neighbours."
    if file.suffix.lower() != ".parquet" or not file.is_file():
        fact = f"{file} is not a .parquet file" if file.exists() else f"{file} does not exist"
        raise InputError(f"read_neighbours: {fact}. {how}")
    with required_extra("files", "read_neighbours"):
        parquet = import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            missing = [name for name in _NEEDED if name not in names]
            if missing:
                raise InputError(f"read_neighbours: {file} has no column {missing[0]!r}. {how}")
            present = [name for name in (*_NEEDED, "relevant") if name in names]
            columns = {name: _as_tensor(opened.read([name]).column(0)) for name in present}
    except import_module("pyarrow").ArrowException as error:
        cause = " ".join(str(error).split())
        raise InputError(f"read_neighbours: {file} is damaged, or is not a Parquet file ({cause}). {how}") from error
    return Neighbours(query_indices=columns.pop("query"), **columns)


def _as_tensor(column: Any) -> Shaped[Tensor, "*shape"]:
    """Return a Parquet column of numbers, or of lists of equal length."""
    types = import_module("pyarrow.types")
    pieces = []
    for chunk in column.chunks:
        values = chunk.flatten() if types.is_fixed_size_list(chunk.type) else chunk
        pieces.append(values.to_numpy(zero_copy_only=False))
    joined = np.concatenate(pieces) if pieces else np.empty(0)
    if types.is_fixed_size_list(column.type):
        joined = joined.reshape(-1, column.type.list_size)
    return torch.from_numpy(joined)


def _groups(batches: Iterable[Neighbours]) -> Iterator[Neighbours]:
    """Yield the rows of all batches in groups of equal size. Only the last group may be smaller."""
    pending: list[Neighbours] = []
    number = 0
    for batch in batches:
        rows = max(1, GROUP_NEIGHBOURS // batch.indices.shape[1])
        first = 0
        while first < len(batch):
            stop = min(len(batch), first + rows - number)
            pending.append(_slice_of(batch, slice(first, stop)))
            number += stop - first
            first = stop
            if number == rows:
                yield _joined(pending)
                pending, number = [], 0
    if pending:
        yield _joined(pending)


def _slice_of(found: Neighbours, rows: slice) -> Neighbours:
    """Return the neighbours of a slice of queries."""
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    return replace(found, **{name: value[rows] for name, value in values.items() if value is not None})


def _joined(pieces: list[Neighbours]) -> Neighbours:
    """Return the neighbours of the queries of all pieces."""
    if len(pieces) == 1:
        return pieces[0]
    by_name = {field.name: [getattr(piece, field.name) for piece in pieces] for field in fields(Neighbours)}
    return replace(pieces[0], **{name: torch.cat(values) for name, values in by_name.items() if values[0] is not None})


# ------------------------------------------------------------------------------------------------------------------ formats


def _opener(path: str | os.PathLike[str]) -> Callable[..., Any]:
    """Return the context manager that opens a file for writing, by its extension."""
    formats = {".parquet": _parquet, ".ivecs": _ivecs, ".fvecs": _fvecs}
    opener = formats.get(Path(path).suffix.lower())
    if opener is None:
        raise InputError(
            f"{os.fspath(path)} does not end with {', '.join(formats)}. Pass a name such as truth.parquet, which "
            "stores exact scores, ties and ids."
        )
    return opener


@contextmanager
def _parquet(file: Path, ids: UserIds, about: Mapping[str, object]) -> Iterator[Callable[[Neighbours], None]]:
    """Open a Parquet file, and yield the function that writes a row group."""
    with required_extra("files", "a .parquet file"):
        arrow = import_module("pyarrow")
        parquet = import_module("pyarrow.parquet")
    writer: Any = None

    def write(found: Neighbours) -> None:
        nonlocal writer
        table = _table(arrow, found, ids).replace_schema_metadata({METADATA: json.dumps(dict(about), sort_keys=True)})
        if writer is None:
            writer = parquet.ParquetWriter(file, table.schema, use_dictionary=False)
        writer.write_table(table, row_group_size=len(table))

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def _table(arrow: Any, found: Neighbours, ids: UserIds) -> Any:
    """Return the Arrow table of some neighbours."""
    indices = found.indices.numpy()

    def lists(values: NDArray[Any], mask: Bool[np.ndarray, "queries k"] | None = None) -> Any:
        flat = arrow.array(values.reshape(-1), mask=None if mask is None else mask.reshape(-1))
        return arrow.FixedSizeListArray.from_arrays(flat, indices.shape[1])

    columns = {"query": arrow.array(found.query_indices.numpy())}
    if ids.queries is not None:
        columns["query_id"] = arrow.array(ids.queries[found.query_indices.numpy()])
    columns["indices"] = lists(indices)
    if ids.gallery is not None:
        columns["ids"] = lists(ids.gallery[indices], indices < 0)
    columns["scores"] = lists(found.scores.numpy())
    columns["tied"] = lists(found.tied.numpy())
    columns["unlisted_ties"] = arrow.array(found.unlisted_ties.numpy())
    if found.relevant is not None:
        columns["relevant"] = lists(found.relevant.numpy())
    return arrow.table(columns)


@contextmanager
def _vecs(file: Path, vectors_of: Callable[[Neighbours], NDArray[Any]]) -> Iterator[Callable[[Neighbours], None]]:
    """Open a file of vectors with 4 bytes per number, each after its length, and yield the function that writes them."""
    with file.open("wb") as opened:

        def write(found: Neighbours) -> None:
            vectors = vectors_of(found)
            rows = np.empty((len(vectors), 1 + vectors.shape[1]), "<i4")
            rows[:, 0] = vectors.shape[1]
            rows[:, 1:] = vectors.view("<i4")
            opened.write(rows.tobytes())

        yield write


def _ivecs(file: Path, ids: UserIds, about: Mapping[str, object]) -> Any:
    del ids, about  # the format cannot store them

    def rows_of_gallery(found: Neighbours) -> NDArray[Any]:
        if int(found.indices.max()) >= 2**31:
            raise InputError("An .ivecs file can only store gallery rows below 2^31. Write a .parquet file.")
        return found.indices.numpy().astype("<i4")

    return _vecs(file, rows_of_gallery)


def _fvecs(file: Path, ids: UserIds, about: Mapping[str, object]) -> Any:
    del ids, about
    return _vecs(file, lambda found: found.scores.numpy().astype("<f4"))
