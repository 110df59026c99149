"""Says that kernels are being compiled, where that takes so long that it looks hung.

It imports nothing of the package, so that every layer with compiled kernels can call it.
"""

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
AFTER = 2.0
WORDS = (
    "fewshot_callbacks compiles its loops for {what} and data of this kind: up to about twenty seconds on two cores, once. "
    "They are kept for later runs."
)
# What the loops of a module are for; those of all others are for exact retrieval.
PURPOSES = {"_scatter_kernel": "J", "nearest": "nearest neighbours", "relevance": "judgements and label sets"}


def words_of(module: str) -> str:
    """Return what is said while the loops of a module are compiled."""
    return WORDS.format(what=PURPOSES.get(module.rpartition(".")[2], "exact retrieval"))


@functools.cache
def announce_compiling() -> None:
    """Say once in this process, on the standard error, when kernels of this package have compiled for two seconds.

    What numba finds in its cache is not compiled, so that nothing is said. Call it before the first kernel runs; later calls
    do nothing.
    """
    register("numba:compile", _Stopwatch())


class _Stopwatch(Listener):
    """Sums up the seconds in which kernels compile; those that they call compile inside these."""

    def __init__(self) -> None:
        # Kernels may compile in any thread, and the timer runs in one of its own.
        self.lock = threading.Lock()
        self.depth, self.spent, self.began = 0, 0.0, 0.0
        self.timer: threading.Timer | None = None
        self.said = False

    def on_start(self, event: Event) -> None:
        if not _is_ours(event):
            return
        with self.lock:
            self.depth += 1
            if self.depth > 1 or self.said:
                return
            self.began = time.perf_counter()
            words = words_of(str(event.data["dispatcher"].py_func.__module__))
            self.timer = threading.Timer(max(0.0, AFTER - self.spent), self._say, [words])
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
                self.spent += time.perf_counter() - self.began

    def _say(self, words: str) -> None:
        with self.lock:
            # A timer that has run out cannot be cancelled: by now the compiling may be over.
            if self.said or self.depth == 0:
                return
            self.said = True
        say_once(words)


@functools.cache
def say_once(words: str) -> None:
    """Say something about compiled kernels on the standard error, once in this process, if it is the first of several."""
    if _is_first_process():
        from tqdm import tqdm  # noqa: PLC0415 - writes above a progress bar, not into it

        tqdm.write(words, file=sys.stderr)


def _is_ours(event: Event) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith("fewshot_callbacks.")


def _is_first_process() -> bool:
    """Whether no other process says it: of those that evaluate together the first, and no worker of a loader or a pool."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    # Before torch.distributed begins, these tell the rank: the first two under torchrun and Lightning's launcher, the
    # last one under Slurm.
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), "0")
    return rank == "0" and multiprocessing.parent_process() is None
