"""How an evaluation computes: options as one value, and a plain pool of threads. None of it changes a result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

import torch

# Called with the number of pairs that are done and the number that there are.
Progress = Callable[[int, int], None]

# Of the products that estimate scores: products of small integers, on a processor alone, or of numbers with 11 bits, on a
# GPU alone, with 24 or with 53. Processors that multiply bfloat16 fast multiply bytes twice as fast, which round no more.
Precision = Literal["bytes", "float16", "float32", "float64"]


@dataclass(frozen=True)
class EngineOptions:
    """Options that travel as this one value; they are for tests and measurements."""

    # of the products; by default the one that a sample promises to be the fastest
    precision: Precision | None = None
    # by default those of torch
    threads: int | None = None
    # queries of a tile; by default as many as the budget and the cache of a processor suggest
    height: int | None = None
    # gallery items of a tile
    width: int | None = None
    # relevant pairs whose counters are held at once; by default as many as the budget allows
    batch: int | None = None
    # relevant scores at which all pairs are counted first; by default all for which there is room
    knots: int | None = None
    # pairs that are collected for points of all pairs, at most
    collected: int | None = None
    # count by PyTorch operations, as on a GPU, on any device
    plain: bool = False


_current: ContextVar[EngineOptions] = ContextVar("engine_options")


def current_options() -> EngineOptions:
    """Return the options of the innermost `engine_options`, or the defaults."""
    return _current.get(EngineOptions())


@contextmanager
def engine_options(**changes: Any) -> Iterator[EngineOptions]:
    """Evaluate with other options inside the block: for tests and measurements.

    Examples:
        >>> with engine_options(threads=1):
        ...     current_options().threads
        1
    """
    token = _current.set(replace(current_options(), **changes))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


@contextmanager
def computing() -> Iterator[int]:
    """Compute inside the block as the proofs assume, and yield the number of threads to compute with.

    Products of float32 are made in float32, without autocast or gradients, and torch runs one thread, since the engine has
    its own: what is left to torch are many small operations, between which threads that wait for each other cost more than
    they bring.
    """
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    cuda = torch.backends.cuda.matmul
    reductions = cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction
    torch.set_float32_matmul_precision("highest")
    cuda.allow_fp16_reduced_precision_reduction = cuda.allow_bf16_reduced_precision_reduction = False
    torch.set_num_threads(1)
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
        ):
            yield current_options().threads or threads
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(before)
        cuda.allow_fp16_reduced_precision_reduction, cuda.allow_bf16_reduced_precision_reduction = reductions


def work_off(
    tasks: Iterable[Any],
    work: Callable[[Any, Any], None],
    threads: int,
    new_space: Callable[[], Any] = lambda: None,
    between: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Call `work(task, space)` for each task, on several threads, each with its own space; return the spaces.

    Args:
        tasks: In the order in which to begin them.
        work: Called at the same time for several tasks.
        threads: How many, of which this one is the first; less than two tasks need no other.
        new_space: Makes what a thread works in.
        between: Called in this thread after each of its tasks.

    Raises:
        BaseException: What a task raised, or an interrupt; the threads have stopped by then.
    """
    coming = iter(tasks)
    first = list(islice(coming, 2))
    coming, lock, errors, spaces = chain(first, coming), threading.Lock(), list[BaseException](), list[Any]()

    def run(between: Callable[[], None] = lambda: None) -> None:
        try:
            torch.set_num_threads(1)  # of this thread's own products
            space = new_space()
            spaces.append(space)
            with torch.inference_mode(False), torch.no_grad():
                while not errors:
                    with lock:
                        task = next(coming, None)
                    if task is None:
                        return
                    work(task, space)
                    between()
        except BaseException as error:  # the caller raises it
            errors.append(error)

    def help_out(ended: threading.Event) -> None:
        run()
        ended.set()

    ends = [threading.Event() for _ in range(threads - 1 if len(first) > 1 else 0)]
    helpers = [threading.Thread(target=help_out, args=(ended,), daemon=True) for ended in ends]
    try:
        for helper in helpers:
            helper.start()
    except BaseException as error:  # an interrupt, or no more threads: those that have begun stop
        errors.append(error)
    run(between)
    begun = [(helper, ended) for helper, ended in zip(helpers, ends, strict=True) if helper.ident is not None]
    while not all(ended.is_set() for _, ended in begun):
        try:
            for _, ended in begun:  # Python 3.11 takes a thread for ended, whose `join` is interrupted
                ended.wait()
        except BaseException as error:  # an interrupt while others end their task
            errors.append(error)
    for helper, _ in begun:
        helper.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # an error knows this frame: if that knew the error, both would live until garbage is collected
    return spaces


def split(number: int, most: int = 512) -> list[slice]:
    """Return slices of at most so many that cover a range."""
    return [slice(start, min(start + most, number)) for start in range(0, number, most)]
