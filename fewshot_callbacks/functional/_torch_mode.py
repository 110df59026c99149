"""Computes in PyTorch's default mode, whatever the caller has set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def default_mode() -> Iterator[None]:
    """Inside the block, make new tensors on the CPU, and keep denormal numbers.

    A default device (`torch.set_default_device`) would hold some tensors of a calculation, and not those of its inputs.
    Where denormal numbers are flushed to zero (`torch.set_flush_denormal`, or a library that was built with
    `-ffast-math`), two different numbers have a difference of zero, and neighbouring ones are equal: no bound of an
    error holds. Other threads of the process keep their mode, and threads that are started inside have this one.
    """
    flushes = sys.float_info.min / 2 == 0
    with ExitStack() as stack:
        if torch.empty(0).device.type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if flushes:
            threads = torch.get_num_threads()
            stack.callback(torch.set_flush_denormal, True)
            stack.callback(torch.set_num_threads, threads)
            torch.set_flush_denormal(False)
            torch.set_num_threads(1)  # PyTorch's own threads may have begun with the caller's mode
        yield
