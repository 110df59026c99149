"""Says that kernels are being compiled, where that takes so long that it looks hung."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import threading
import time

import torch
from numba.core.event import Event, Listener, register

# Seconds of compiling, together, after which it is said. A shorter pause is nothing to wonder about, and words about it
# would be in the way.
NOTICE_AFTER = 2.0
_NOTICE = (
    "fewshot_callbacks compiles its loops for {what} and data of this kind: up to about twenty seconds on two cores, once. "
    "They are kept for later runs."
)
# Module -> what its loops are for. Those of all other modules are for exact retrieval.
_PURPOSES = {"_scatter_kernel": "J", "nearest": "nearest neighbours", "relevance": "judgements and label sets"}


def notice_for(module: str) -> str:
    """Return what is said while the loops of a module are compiled."""
    name = module.rpartition(".")[2]
    return _NOTICE.format(what=_PURPOSES.get(name, "exact retrieval"))


@functools.cache
def announce_compiling() -> None:
    """Say once in this process, on the standard error, when kernels of this package have compiled for two seconds.

    What numba finds in its cache is not compiled, so that nothing is said. Call it before the first kernel runs; later calls
    do nothing.
    """
    register("numba:compile", _Stopwatch())


class _Stopwatch(Listener):
    """Adds up the seconds in which kernels compile. A kernel that another one calls compiles inside the time of that one."""

    def __init__(self) -> None:
        # Kernels may compile in any thread, and the timer runs in one of its own.
        self.lock = threading.Lock()
        # kernels that compile now, each inside the one before
        self.depth = 0
        # seconds of compiling so far, and when the outermost kernel of now began
        self.seconds = 0.0
        self.started = 0.0
        self.timer: threading.Timer | None = None
        self.is_said = False

    def on_start(self, event: Event) -> None:
        if not _is_ours(event):
            return
        with self.lock:
            self.depth += 1
            if self.depth > 1 or self.is_said:
                return
            self.started = time.perf_counter()
            notice = notice_for(_module_of(event))
            self.timer = threading.Timer(max(0.0, NOTICE_AFTER - self.seconds), self._say, [notice])
            self.timer.daemon = True  # a process that ends does not wait for it
            self.timer.start()

    def on_end(self, event: Event) -> None:
        if not _is_ours(event):
            return
        with self.lock:
            self.depth -= 1
            if self.depth == 0 and self.timer is not None:
                self.timer.cancel()
                self.timer = None
                self.seconds += time.perf_counter() - self.started

    def _say(self, notice: str) -> None:
        with self.lock:
            # A timer that has run out cannot be cancelled: by now the compiling may be over.
            if self.is_said or self.depth == 0:
                return
            self.is_said = True
        say_once(notice)


@functools.cache
def say_once(sentence: str) -> None:
    """Print a sentence about compiled kernels to the standard error, once in this process, if it is the first of several."""
    if _is_first_process():
        from tqdm import tqdm  # noqa: PLC0415 - writes above a progress bar, not into it

        tqdm.write(sentence, file=sys.stderr)


def _is_ours(event: Event) -> bool:
    return _module_of(event).startswith("fewshot_callbacks.")


def _module_of(event: Event) -> str:
    """Return the module of the kernel that an event is about."""
    return str(event.data["dispatcher"].py_func.__module__)


def _is_first_process() -> bool:
    """Return whether this process speaks for all: the first of those that evaluate together, and no worker of a loader."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    # Before torch.distributed begins, these tell the rank: the first two under torchrun and Lightning's launcher, the
    # last one under Slurm.
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")
    return rank == "0" and multiprocessing.parent_process() is None
