"""The processes that torchrun or srun has started for one evaluation, and the files and rows of each process."""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.addresses import path_text
from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.functional.items import KINDS
from fewshot_callbacks.functional.retrieval import Share
from fewshot_callbacks.storage import RowSubset, Shards
from fewshot_callbacks.storage.arrays import EmptyFilesError
from fewshot_callbacks.storage.columns import has_own_files, join_column, read_own_files
from fewshot_callbacks.storage.shard_files import ListedShards, list_shards
from fewshot_callbacks.system.words import counted

T = TypeVar("T")

# Each process reads its own files unless a process would have more than this many times the mean number of queries.
MOST_QUERIES = 1.5


def joined_processes() -> Processes:
    """Join the processes that torchrun or Slurm's srun has started, and return them."""
    # Outside srun, the script of a Slurm job is a single process.
    if "WORLD_SIZE" not in os.environ and {"SLURM_NTASKS", "SLURM_STEP_ID"} <= set(os.environ):
        join_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
        # torch warns at exit if the group was not destroyed, and commands end in many places.
        atexit.register(torch.distributed.destroy_process_group)
    if torch.cuda.is_available():  # `--device cuda` must be a different device in each process of a node
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return all_processes()


def join_slurm() -> None:
    """Set the environment variables of torch.distributed from Slurm's variables, as Lightning reads them."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # noqa: PLC0415 - takes a second

    try:
        slurm = SLURMEnvironment()
    except RuntimeError as error:
        raise InputError(error) from error
    numbers = {"WORLD_SIZE": slurm.world_size(), "RANK": slurm.global_rank(), "LOCAL_RANK": slurm.local_rank()}
    of_main = {"MASTER_ADDR": slurm.main_address, "MASTER_PORT": slurm.main_port}
    os.environ |= {name: str(value) for name, value in (numbers | of_main).items()}


def read_in_all(processes: Processes, read: Callable[[], T]) -> T:
    """Return what this process reads, after every process has read. *Collective*."""
    if processes.count == 1:
        return read()
    results: list[T] = []
    cause: Exception | None = None
    try:
        results.append(read())
    except (ValueError, OSError, ModuleNotFoundError) as error:
        cause = error
    messages = [message for message in processes.gather(None if cause is None else str(cause)) if message is not None]
    if messages:
        raise InputError(messages[0]) from cause
    return results[0]


def list_in_all(file: Path, processes: Processes) -> ListedShards:
    """Return the files of a set, which are the same in every process. *Collective*."""
    listed = read_in_all(processes, lambda: list_shards(file))
    if processes.count == 1:
        return listed
    sizes = read_in_all(processes, listed.sizes)
    # The folder may have another path on each machine.
    names_and_sizes = [(file.name, size) for file, size in zip(listed.files, sizes, strict=True)]
    digest = hashlib.sha256(repr(names_and_sizes).encode()).hexdigest()[:8]
    by_rank = processes.gather(f"{counted(len(sizes), 'file')} (digest of names and sizes {digest})")
    for rank, of_rank in enumerate(by_rank):
        if of_rank != by_rank[0]:
            raise InputError(
                f"{path_text(file)}: process 0 finds {by_rank[0]}, but process {rank} finds {of_rank}. Copy the same files "
                "to every machine."
            )
    return listed


def files_of_process(listed: ListedShards, processes: Processes) -> ListedShards:
    """Return the files of this process; all files if there are fewer files than processes."""
    if len(listed.files) < processes.count:
        return listed
    return listed.part(processes.rank, processes.count)


class OpenedShards(NamedTuple):
    """The shards that a process has opened."""

    # one per request
    shards: list[Shards]
    # whether they contain only the rows of this process
    is_part: bool


def open_shards(listed: ListedShards, requests: Sequence[Mapping[str, Any]], processes: Processes) -> OpenedShards:
    """Return the shards of each request. Each process opens only its own files if possible. *Collective*.

    All processes open all files if there are fewer files than processes, if a process would have many more queries than
    the others, or if only all files show whether they are compatible. `requests` are arguments of `Shards`. The first
    has the column `is_gallery`, if there is one.
    """
    if 1 < processes.count <= len(listed.files):
        parts = [_open_part(listed, request, processes) for request in requests]
        shards = [part for part in parts if part is not None]
        if len(shards) == len(parts) and _are_balanced(shards[0], processes):
            return OpenedShards(shards, is_part=True)
    whole = read_in_all(processes, lambda: [Shards(listed, **request) for request in requests])
    return OpenedShards(whole, is_part=False)


def _open_part(listed: ListedShards, request: Mapping[str, Any], processes: Processes) -> Shards | None:
    """Return the shards of the files of this process. *Collective*.

    None in every process if the files of a process have no rows, or if only all files show whether they are compatible.
    """
    own = files_of_process(listed, processes)
    arguments: dict[str, Any] = dict(request)
    columns = {argument: column for argument, column in request.items() if has_own_files(column)}
    if columns:
        vectors = {name: value for name, value in request.items() if name == "embeddings"}
        shards = read_in_all(processes, partial(_shards_or_none, own, vectors))
        rows = processes.gather(0 if shards is None else len(shards))
        if 0 in rows:
            return None
        first = sum(rows[: processes.rank])
        own_rows = slice(first, first + rows[processes.rank])
        arguments |= read_in_all(processes, partial(_rows_of_columns, columns, listed, sum(rows), own_rows))
    shards = read_in_all(processes, partial(_shards_or_none, own, arguments))
    forms = processes.gather(None if shards is None else _forms_of(shards))
    return shards if None not in forms and len(set(forms)) == 1 else None


def _shards_or_none(files: ListedShards, arguments: Mapping[str, Any]) -> Shards | None:
    """Return the shards; None if they have no rows."""
    try:
        return Shards(files, **arguments)
    except EmptyFilesError:
        return None


def _rows_of_columns(
    columns: Mapping[str, str], listed: ListedShards, all_rows: int, rows: slice
) -> dict[str, NDArray[Any]]:
    """Return argument -> the requested rows of its column.

    `columns` maps an argument to the path of `.npy` files that cover all rows.
    """
    return {
        argument: join_column(read_own_files(column, argument), argument, listed.files, all_rows)[rows]
        for argument, column in columns.items()
    }


def _forms_of(shards: Shards) -> str | None:
    """Return a description of the types, which must be the same in all files.

    None if a word is not in Unicode's composed form: another process's files may spell it differently.
    """
    forms = [f"{shards.shape[1]} {shards.dtype}"]
    for kind in KINDS:
        column = getattr(shards, kind)
        if column is None:
            continue
        if column.dtype.kind == "U" and any(composed_form(word) != word for word in np.unique(column).tolist()):
            return None
        forms.append(f"{kind} {column.dtype.kind} {column.shape[1:]}")
    return ", ".join(forms)


def _are_balanced(shards: Shards, processes: Processes) -> bool:
    """Return whether no process has many more queries than the others. *Collective*."""
    queries = len(shards) if shards.is_gallery is None else int((~shards.is_gallery).sum())
    by_rank = processes.gather(queries)
    return max(by_rank) * processes.count <= MOST_QUERIES * sum(by_rank)


def part_of_process(queries: Any, arguments: dict[str, Any], processes: Processes) -> tuple[Any, dict[str, Any]]:
    """Return this process's part of the queries, and the arguments of `evaluate_retrieval` for its part and its share.

    Each process gets contiguous rows, and about equally many. The names of gallery arrays begin with `gallery`.
    """
    query_rows = _rows_of_process(len(queries), processes)
    gallery_rows = query_rows
    if arguments["gallery"] is not None:
        gallery_rows = _rows_of_process(len(arguments["gallery"]), processes)
    parts: dict[str, Any] = {}
    for name, values in arguments.items():
        if values is None or name == "relevance":
            parts[name] = values
        elif name == "slices":
            parts[name] = {attribute: _take_rows(of_queries, query_rows) for attribute, of_queries in values.items()}
        else:
            parts[name] = _take_rows(values, gallery_rows if name.startswith("gallery") else query_rows)
    parts["share"] = Share(processes, _indices(query_rows), _indices(gallery_rows))
    return _take_rows(queries, query_rows), parts


def own_rows(values: Any, processes: Processes) -> Any:
    """Return the rows of this process, divided as in `part_of_process`."""
    return _take_rows(values, _rows_of_process(len(values), processes))


def _rows_of_process(rows: int, processes: Processes) -> slice:
    """Return the contiguous rows of this process, about as many as in other processes."""
    return slice(rows * processes.rank // processes.count, rows * (processes.rank + 1) // processes.count)


def _take_rows(values: Any, rows: slice) -> Any:
    """Return contiguous rows of an array, a list or rows on disk, which are not read."""
    if isinstance(values, Shards | RowSubset):
        mask = np.zeros(len(values), bool)
        mask[rows] = True
        return RowSubset(values, mask)
    return values[rows]


def _indices(rows: slice) -> NDArray[np.int64]:
    """Return the indices of the rows of a slice."""
    return np.arange(rows.start, rows.stop)
