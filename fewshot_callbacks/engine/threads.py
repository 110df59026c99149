"""Threads that work off a list of tasks, no two of which change the same thing at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch


class Task(NamedTuple):
    """Something to do."""

    changes: frozenset[int]
    """what no other task may change meanwhile"""
    work: Callable[[Any], None]
    """called with the working space of the thread"""
    size: int
    """how much is done when it is done"""


def run_tasks(tasks: Iterable[Task], spaces: Sequence[Any], done: Callable[[int], None]) -> None:
    """Work off the tasks with one thread for each space, and this thread alone where there is only one.

    Args:
        tasks: In the order in which to begin them, as far as what they change is free. They are taken one by one, and only
            those are held that wait for others.
        spaces: One for each thread.
        done: Called in the calling thread with the size of each finished task.

    Raises:
        BaseException: What a task or `done` raised, or an interrupt. The threads have stopped by then.
    """
    coming = iter(tasks)
    pending = list(islice(coming, 2))
    if len(spaces) == 1 or len(pending) < 2:
        for task in chain(pending, coming):
            task.work(spaces[0])
            done(task.size)
        return
    busy, free = set[int](), threading.Condition()
    inference = (
        torch.is_inference_mode_enabled()
    )  # each thread has its own mode; the caller's tensors need the caller's
    finished: SimpleQueue[int | BaseException | None] = SimpleQueue()

    def next_task() -> Task | None:
        with free:
            while True:
                for position, task in enumerate(pending):
                    if busy.isdisjoint(task.changes):
                        busy.update(task.changes)
                        return pending.pop(position)
                for task in coming:
                    if busy.isdisjoint(task.changes):
                        busy.update(task.changes)
                        return task
                    pending.append(task)
                if not pending:
                    return None
                free.wait()

    def work(space: Any) -> None:
        torch.set_num_threads(1)  # of this thread's own products; the caller has set its own
        try:
            with torch.inference_mode(inference), torch.no_grad():
                while (task := next_task()) is not None:
                    task.work(space)
                    with free:
                        busy.difference_update(task.changes)
                        free.notify_all()
                    finished.put(task.size)
            finished.put(None)
        except BaseException as error:
            finished.put(error)

    threads = [threading.Thread(target=work, args=(space,), daemon=True) for space in spaces]
    before = torch.get_num_threads()
    try:
        for thread in threads:
            thread.start()
        for size in _sizes(finished, len(threads)):
            done(size)
    finally:
        with free:
            pending.clear()
            coming = iter(())
            busy.clear()
            free.notify_all()
        for thread in threads:
            if thread.ident is not None:  # an interrupt may come before all have started
                thread.join()
        torch.set_num_threads(before)  # some libraries have one number for all threads


def _sizes(finished: SimpleQueue[int | BaseException | None], threads: int) -> Iterator[int]:
    """Yield the sizes of finished tasks until each thread has put None; raise what a thread has put as an error."""
    while threads:
        result = finished.get()
        if isinstance(result, BaseException):
            raise result
        if result is None:
            threads -= 1
        else:
            yield result
