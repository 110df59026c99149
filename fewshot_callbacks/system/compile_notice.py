"""Counts the seconds of compiling kernels, and prints a notice if compiling takes so long that the process looks hung."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
import time

import torch
from numba.core.event import Event, Listener, register

# Total seconds of compiling after which the notice is printed. A shorter pause needs no explanation.
NOTICE_AFTER = 2.0
_NOTICE = (
    "fewshot_callbacks is compiling its numba kernels for {what} and this kind of data. This takes up to about twenty "
    "seconds on two cores. The kernels are cached, but other kinds of data need other kernels. fewshot warm compiles all "
    "kernels."
)
# Module -> purpose of its kernels. The kernels of all other modules are for exact retrieval.
_PURPOSES = {"_scatter_kernel": "J", "nearest": "nearest neighbours", "relevance": "judgements and label sets"}


def notice_for(module: str) -> str:
    """Return the notice that is printed while the kernels of a module are compiled."""
    name = module.rpartition(".")[2]
    return _NOTICE.format(what=_PURPOSES.get(name, "exact retrieval"))


@functools.cache
def announce_compiling() -> None:
    """Print a notice once, on the standard error, as soon as kernels of this package have compiled for two seconds.

    Kernels that are loaded from the cache are not compiled and print no notice. Call this function before the first kernel
    runs. Later calls do nothing.
    """
    register("numba:compile", _STOPWATCH)


def compiling_seconds() -> float:
    """Return the total time in which kernels of this package have compiled in this process since `announce_compiling`."""
    return _STOPWATCH.seconds


class _Stopwatch(Listener):
    """Adds up the seconds in which kernels compile. A kernel compiles while the kernel that calls it compiles."""

    def __init__(self) -> None:
        # Kernels may compile in any thread, and the timer has a thread of its own.
        self.lock = threading.Lock()
        # number of kernels that are being compiled, each inside the previous one
        self.depth = 0
        # total seconds of compiling
        self.seconds = 0.0
        # when the outermost of these kernels began
        self.started = 0.0
        self.timer: threading.Timer | None = None
        self.is_said = False

    def on_start(self, event: Event) -> None:
        if not _is_ours(event):
            return
        with self.lock:
            self.depth += 1
            if self.depth > 1:
                return
            self.started = time.perf_counter()
            if self.is_said:
                return
            notice = notice_for(_module_of(event))
            self.timer = threading.Timer(max(0.0, NOTICE_AFTER - self.seconds), self._say, [notice])
            self.timer.daemon = True  # the process does not wait for the timer when it ends
            self.timer.start()

    def on_end(self, event: Event) -> None:
        if not _is_ours(event):
            return
        with self.lock:
            self.depth -= 1
            if self.depth > 0:
                return
            self.seconds += time.perf_counter() - self.started
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

    def _say(self, notice: str) -> None:
        with self.lock:
            # An expired timer cannot be cancelled: compiling may have ended by now.
            if self.is_said or self.depth == 0:
                return
            self.is_said = True
        say_once(notice)


_STOPWATCH = _Stopwatch()


@functools.cache
def say_once(sentence: str) -> None:
    """Print a sentence about compiled kernels to the standard error, once, and only in the first process."""
    if _is_first_process():
        from tqdm import tqdm  # noqa: PLC0415 - writes above a progress bar, not into it

        tqdm.write(sentence, file=sys.stderr)


def _is_ours(event: Event) -> bool:
    return _module_of(event).startswith("fewshot_callbacks.")


def _module_of(event: Event) -> str:
    """Return the module of the kernel that an event is about."""
    return str(event.data["dispatcher"].py_func.__module__)


def _is_first_process() -> bool:
    """Return whether this process prints for all processes: it has rank 0, and is not a data loader's worker."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    # These variables have the rank before torch.distributed is initialised: the first two under torchrun and
    # Lightning's launcher, the last one under Slurm.
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")
    return rank == "0" and multiprocessing.parent_process() is None
