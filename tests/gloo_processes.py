"""Real processes over gloo that do the work of a module of jobs, and leave their answers behind for every test that asks.

A module of jobs has `GROUPS`, pairs of a number of processes and a backend, and `answers(rank, folder)`, which each process
of a group calls. All its groups run in one go, once in a test session: torch and Lightning are imported once, then forked.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import traceback
import weakref
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

ROOT = Path(__file__).parents[1]
TIMEOUT = 300
"""Seconds for all groups of a module: a process that waits for another one would wait for half an hour."""


def folder_of(shared: Path, module: str, count: int, backend: str = "gloo") -> Path:
    """Where a group of processes writes."""
    return shared / module / f"{count} {backend}"


def answers(shared: Path, module: str, count: int, backend: str = "gloo") -> list[Any]:
    """What each process of a group has answered, in the order of their ranks.

    The folder is one that all test processes (pytest-xdist) have in common. The backend is that of torch.distributed;
    "without CPU" refuses tensors on the CPU, as NCCL does.
    """
    folder = shared / module
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            environment.pop("PL_GLOBAL_SEED", None)  # of another test: Lightning would seed all random numbers with it
            with (folder / "log.txt").open("w") as log:
                command = [sys.executable, "-m", "tests.gloo_processes", module, str(shared)]
                subprocess.run(
                    command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=TIMEOUT, check=False
                )
    try:
        files = [folder_of(shared, module, count, backend) / f"{rank}.pt" for rank in range(count)]
        return [torch.load(file, weights_only=False) for file in files]
    except FileNotFoundError as error:
        raise RuntimeError((folder / "log.txt").read_text()[-5000:]) from error


def _work(rank: int, module: str, shared: str, count: int, backend: str) -> None:
    """Join the group, answer, write."""
    folder = folder_of(Path(shared), module, count, backend)
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that the processes are there
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


def main(module: str, shared: str) -> None:
    """Run all groups of a module, one after the other, also when one of them fails."""
    method = "fork" if sys.platform == "linux" else "spawn"  # libraries of macOS do not survive a fork
    for count, backend in importlib.import_module(module).GROUPS:
        folder_of(Path(shared), module, count, backend).mkdir()
        arguments = module, shared, count, backend
        try:
            torch.multiprocessing.start_processes(_work, args=arguments, nprocs=count, start_method=method)
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main(*sys.argv[1:])
