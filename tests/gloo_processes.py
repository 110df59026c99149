"""Real processes over gloo that do the work of a module of jobs, and leave their answers behind for every test that asks.

A module of jobs has a function `answers(rank, folder)`, which each process of a group calls. On Linux each process is a copy
of a server that has imported torch, Lightning and this package, so that a group starts in a moment.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # libraries of macOS do not survive a fork
IMPORTED = ("torch", "torchvision", "torchmetrics", "lightning.pytorch", "fewshot_callbacks.callbacks", __name__)
"""What the server imports, once for each process of pytest-xdist."""
TIMEOUT = 300
"""Seconds for a group: a process that waits for another one would wait for half an hour."""


def folder_of(shared: Path, module: str, count: int, backend: str = "gloo") -> Path:
    """Where a group of processes writes."""
    return shared / module / f"{count} {backend}"


def answers(shared: Path, module: str, count: int, backend: str = "gloo") -> list[Any]:
    """What each process of a group has answered, in the order of their ranks.

    The folder is one that all test processes (pytest-xdist) have in common. The backend is that of torch.distributed;
    "without CPU" refuses tensors on the CPU, as NCCL does.
    """
    folder = folder_of(shared, module, count, backend)
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            _run_group(folder, module, count, backend)
    if (folder / "error.txt").exists():
        raise RuntimeError((folder / "log.txt").read_text()[-5000:] + (folder / "error.txt").read_text())
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


def _run_group(folder: Path, module: str, count: int, backend: str) -> None:
    """Start a group and wait for its end; what goes wrong is written to `error.txt`."""
    multiprocessing.get_context(METHOD).set_forkserver_preload(list(IMPORTED))
    environment = dict(os.environ)
    environment.pop("PL_GLOBAL_SEED", None)  # of another test: Lightning would seed all random numbers with it
    arguments = module, folder, count, backend, environment
    group = torch.multiprocessing.start_processes(_work, args=arguments, nprocs=count, join=False, start_method=METHOD)
    latest = time.monotonic() + TIMEOUT
    try:
        while not group.join(timeout=5):
            if time.monotonic() > latest:
                raise TimeoutError(f"{module}: {count} processes have not ended in {TIMEOUT} seconds.")
    except Exception:
        (folder / "error.txt").write_text(traceback.format_exc())
    finally:
        for process in group.processes:
            process.kill()


def _work(rank: int, module: str, folder: Path, count: int, backend: str, environment: dict[str, str]) -> None:
    """Join the group, answer, write."""
    os.environ.clear()
    os.environ.update(environment, LOCAL_RANK=str(rank))  # the rank tells Lightning that the processes are there
    os.chdir(folder)
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    name = backend
    if backend == "without CPU":
        torch.distributed.Backend.register_backend("standin", torch.distributed.ProcessGroupGloo, devices=["cuda"])
        name = "standin"
    # first: modules of torch keep the group that is there when they are imported
    jobs = importlib.import_module(module)
    meeting = f"file:///{folder.as_posix().lstrip('/')}/meeting"  # of Windows, too: file:///C:/...
    torch.distributed.init_process_group(name, init_method=meeting, rank=rank, world_size=count)
    found = jobs.answers(rank, folder)
    torch.save(found, folder / f"{rank}.pt")
    if backend == "gloo":
        torch.distributed.barrier()
    group = weakref.ref(torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()
    if group() is not None:
        (folder / f"{rank} holds its group").touch()
