"""Processes that are threads of one: fast enough for hypothesis, and in step by the same calls as real ones."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes

PATIENCE = 60.0
"""Seconds after which a process that waits for another gives up: nothing must hang."""


class _Room:
    def __init__(self, count: int) -> None:
        self.held: list[Any] = [None] * count
        self.barrier = threading.Barrier(count)


class Thread(Processes):
    """One of several, which meet in a room."""

    def __init__(self, room: _Room, rank: int, count: int) -> None:
        self._room, self.rank, self.count, self.most_received = room, rank, count, 0

    def _gather(self, value: Any) -> list[Any]:
        self._room.held[self.rank] = value
        self._room.barrier.wait(PATIENCE)
        values = list(self._room.held)
        self._room.barrier.wait(PATIENCE)
        return copy.deepcopy(values)  # what another process holds is never one's own memory

    def _swap(
        self, sent: Sequence[Tensor], destination: int | None, received: Sequence[Tensor], source: int | None
    ) -> None:
        messages = self._gather(([tensor.clone() for tensor in sent], destination))
        if source is not None:
            tensors, target = messages[source]
            assert target == self.rank
            for empty, tensor in zip(received, tensors, strict=True):
                empty.copy_(tensor)
                self.most_received = max(self.most_received, empty.numel())


def in_threads(count: int, work: Callable[[Thread], Any]) -> list[Any]:
    """What each of so many processes returns, or raises."""
    room, outcomes = _Room(count), [None] * count

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(Thread(room, rank, count))
        except BaseException as error:
            outcomes[rank] = error

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, rank), daemon=True) for rank in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a process waits for ever"
    return outcomes
