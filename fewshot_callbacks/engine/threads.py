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


class _TaskList:
    """Hands tasks to several threads: those first whose turn it is, as far as what they change is free.

    Tasks are taken from the iterable one by one, and only those are held that wait for others.
    """

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._coming, self._waiting = tasks, list[Task]()
        self._busy, self._free = set[int](), threading.Condition()

    def take(self) -> Task | None:
        """Return the next task, perhaps after waiting for another to be finished; None where there is none."""
        with self._free:
            while True:
                for position, task in enumerate(self._waiting):
                    if self._busy.isdisjoint(task.changes):
                        self._busy.update(task.changes)
                        return self._waiting.pop(position)
                for task in self._coming:
                    if self._busy.isdisjoint(task.changes):
                        self._busy.update(task.changes)
                        return task
                    self._waiting.append(task)
                if not self._waiting:
                    return None
                self._free.wait()

    def finish(self, task: Task) -> None:
        """Free what the task has changed."""
        with self._free:
            self._busy.difference_update(task.changes)
            self._free.notify_all()

    def stop(self) -> None:
        """Hand out no more tasks, and wake those who wait for one."""
        with self._free:
            self._waiting.clear()
            self._coming = iter(())
            self._free.notify_all()


def run_tasks(tasks: Iterable[Task], spaces: Sequence[Any], done: Callable[[int], None]) -> None:
    """Work off the tasks with one thread for each space; this thread is one of them.

    Args:
        tasks: In the order in which to begin them, as far as what they change is free.
        spaces: One for each thread.
        done: Called in the calling thread with the size of each finished task.

    Raises:
        BaseException: What a task or `done` raised, or an interrupt. The threads have stopped by then.
    """
    coming = iter(tasks)
    first = list(islice(coming, 2))
    if len(spaces) == 1 or len(first) < 2:
        for only in chain(first, coming):
            only.work(spaces[0])
            done(only.size)
        return
    todo, finished = _TaskList(chain(first, coming)), SimpleQueue[int | BaseException]()
    # each thread has its own mode; the caller's tensors need the caller's
    inference = torch.is_inference_mode_enabled()

    def work(space: Any) -> None:
        torch.set_num_threads(1)  # of this thread's own products; the caller has set its own
        try:
            with torch.inference_mode(inference), torch.no_grad():
                while (task := todo.take()) is not None:
                    task.work(space)
                    finished.put(task.size)
                    todo.finish(task)
        except BaseException as error:
            finished.put(error)
            todo.stop()

    def tell() -> None:
        """Tell what the other threads have finished."""
        while not finished.empty():
            result = finished.get()
            if isinstance(result, BaseException):
                raise result
            done(result)

    threads = [threading.Thread(target=work, args=(space,), daemon=True) for space in spaces[1:]]
    before = torch.get_num_threads()
    try:
        for thread in threads:
            thread.start()
        torch.set_num_threads(1)
        with torch.no_grad():
            while (task := todo.take()) is not None:
                tell()
                task.work(spaces[0])
                done(task.size)
                todo.finish(task)
        for thread in threads:
            thread.join()
        tell()
    finally:
        todo.stop()
        for thread in threads:
            if thread.ident is not None:  # an interrupt may come before all have started
                thread.join()
        torch.set_num_threads(before)  # some libraries have one number for all threads
