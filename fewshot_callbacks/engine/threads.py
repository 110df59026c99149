"""A plain pool of threads; what they call releases the interpreter's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any

import torch


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
