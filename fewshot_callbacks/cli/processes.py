"""The processes that torchrun or srun has started for one evaluation, and the rows of each."""

from __future__ import annotations

import atexit
import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval import Share
from fewshot_callbacks.storage import RowSubset, Shards


def joined_processes() -> Processes:
    """Return the processes that torchrun or Slurm's srun has started, after joining them.

    Raises:
        ValueError: Slurm's variables do not fit each other.
    """
    # The script of a Slurm job, outside srun, is one process, whatever the job starts.
    if "WORLD_SIZE" not in os.environ and {"SLURM_NTASKS", "SLURM_STEP_ID"} <= set(os.environ):
        join_slurm()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
        # torch warns at the exit if nobody has done so. Commands end in many places.
        atexit.register(torch.distributed.destroy_process_group)
    if torch.cuda.is_available():  # `--device cuda` is a different device in each process of a node
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return all_processes()


def join_slurm() -> None:
    """Set the variables of torch.distributed from Slurm's variables, as Lightning reads them."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # noqa: PLC0415 - takes a second

    try:
        slurm = SLURMEnvironment()
    except RuntimeError as error:
        raise InputError(error) from error
    numbers = {"WORLD_SIZE": slurm.world_size(), "RANK": slurm.global_rank(), "LOCAL_RANK": slurm.local_rank()}
    of_main = {"MASTER_ADDR": slurm.main_address, "MASTER_PORT": slurm.main_port}
    os.environ |= {name: str(value) for name, value in (numbers | of_main).items()}


def part_of_process(queries: Any, arguments: dict[str, Any], processes: Processes) -> tuple[Any, dict[str, Any]]:
    """Return this process's part of the queries, and the arguments of `evaluate_retrieval` for its part and its share.

    Args:
        queries: All queries.
        arguments: The arguments for all queries and gallery items, including `gallery`; names of gallery arrays begin
            so.
        processes: All processes. Each has neighbouring rows, about as many as the others.
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


def _rows_of_process(rows: int, processes: Processes) -> slice:
    """Return the rows of this process: neighbours, and about as many as in other processes."""
    return slice(rows * processes.rank // processes.count, rows * (processes.rank + 1) // processes.count)


def _take_rows(values: Any, rows: slice) -> Any:
    """Return neighbouring rows of an array, a list or rows on disk. Rows on disk stay there."""
    if isinstance(values, Shards | RowSubset):
        mask = np.zeros(len(values), bool)
        mask[rows] = True
        return RowSubset(values, mask)
    return values[rows]


def _indices(rows: slice) -> NDArray[np.int64]:
    """Return the indices of neighbouring rows."""
    return np.arange(rows.start, rows.stop)
