"""Processes that communicate through `torch.distributed`, also if its backend does not support CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes, to_the_end

T = TypeVar("T")

# A tag that no other message has.
LAST_WORD = 2**20

# Weak references: a group that something still held after `destroy_process_group` would keep its threads until the
# interpreter ends, where a thread that releases a tensor aborts the process.
# The group of all processes -> the gloo group that was created for CPU tensors.
_beside: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# A group -> its `TorchProcesses`: a single object as long as it is used, since it records which process has failed. The
# values are weak as well, since each holds its key, the group.
_talking: WeakKeyDictionary[Any, ref[TorchProcesses]] = WeakKeyDictionary()


class TorchProcesses(Processes):
    """The processes of `torch.distributed`, for `evaluate_retrieval(..., share=Share(...))`.

    Embeddings are kept on the CPU and sent from there. Since NCCL does not support CPU tensors, a gloo group is then
    created once.

    Args:
        group: A group whose backend supports CPU tensors; by default a group of all processes.

    Examples:
        >>> from fewshot_callbacks.metrics import TorchProcesses
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> TorchProcesses().count
        1
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, group: Any | None = None) -> None:
        self._group = cpu_group() if group is None else group
        self.rank = torch.distributed.get_rank(self._group)
        self.count = torch.distributed.get_world_size(self._group)

    @contextmanager
    def _naming_the_dead(self) -> Iterator[None]:
        """Say which process has ended, where gloo says at which port nobody answers.

        Raises:
            ConnectionError: With its rank.
        """
        try:
            yield
        except RuntimeError as error:
            if self._failed or (ended := self._ended()) == "":
                raise
            self._failed = True  # there is nobody left to tell
            raise ConnectionError(
                f"{ended} of {self.count}, counted from 0, has ended in the middle of the evaluation, killed or crashed, "
                "and the others cannot go on without it. See what it printed last; if the machine ran out of memory, pass "
                "less memory_mb or start fewer processes."
            ) from error

    def _ended(self) -> str:
        """Name the processes to which there is no connection any more; nothing if there are none."""
        ended = []
        for rank in range(self.count):
            try:
                if rank != self.rank:  # nobody waits for it: what matters is whether it can be sent
                    there = torch.distributed.get_global_rank(self._group, rank)
                    torch.distributed.isend(torch.zeros(1, device="cpu"), there, group=self._group, tag=LAST_WORD)
            except RuntimeError:
                ended.append(f"process {rank}")
        return " and ".join(ended)

    def _gather(self, mine: Any) -> list[Any]:
        everyone: list[Any] = [None] * self.count
        with self._naming_the_dead():
            torch.distributed.all_gather_object(everyone, mine, group=self._group)
        return everyone

    def to_first(self, mine: T) -> list[T] | None:
        """What each process holds, by rank, on the first process, without all of it in each of the others."""
        everyone: list[Any] | None = [None] * self.count if self.rank == 0 else None
        # `gather_object`, like `irecv` and `isend` below, counts ranks among all processes, not among those of the
        # group.
        first = torch.distributed.get_global_rank(self._group, 0)
        with to_the_end():
            self.gather(None)  # if one has failed, the others learn of it here
            with self._naming_the_dead():
                torch.distributed.gather_object(mine, everyone, dst=first, group=self._group)
        return everyone

    def _swap(self, mine: Sequence[Tensor], to: int | None, theirs: Sequence[Tensor], source: int | None) -> None:
        def of_all(rank: int) -> int:
            return torch.distributed.get_global_rank(self._group, rank)

        with self._naming_the_dead():
            # Receive and send are begun before either is waited for: in a ring, where each first waits until its own is
            # taken, nobody would ever take one. Both sides know the shapes, so that both leave out empty tensors.
            under_way = [
                torch.distributed.irecv(tensor, of_all(source), group=self._group, tag=tag)
                for tag, tensor in enumerate(theirs)
                if source is not None and tensor.numel()
            ]
            under_way += [
                torch.distributed.isend(tensor, of_all(to), group=self._group, tag=tag)
                for tag, tensor in enumerate(mine)
                if to is not None and tensor.numel()
            ]
            for work in under_way:
                # PyTorch returns None to a process that is not in the group.
                if work is not None:
                    work.wait()

    def summed(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum of each number over all processes, without the numbers of all in each."""
        # A copy, since `all_reduce` overwrites it.
        total = torch.from_numpy(np.array(values, np.int64))
        with to_the_end():
            self.gather(None)  # if one has failed, the others learn of it here
            with self._naming_the_dead():
                torch.distributed.all_reduce(total, group=self._group)
        return total.numpy()


def all_processes() -> Processes:
    """Return the processes of `torch.distributed`, for `evaluate_retrieval(..., share=Share(...))`.

    Without `torch.distributed` it is this process alone. If the backend does not support CPU tensors (NCCL), the first
    call is collective: all processes must make it together.

    Examples:
        >>> all_processes().count
        1
    """
    if process_count() == 1:
        return ALONE
    group = cpu_group()
    known = _talking.get(group)
    processes = known() if known is not None else None
    if processes is None:
        processes = TorchProcesses(group)
        _talking[group] = ref(processes)
    return processes


def cpu_group() -> Any:
    """Return a group of all processes whose backend supports CPU tensors. The first call is collective."""
    everyone = torch.distributed.group.WORLD
    if "cpu" in torch.distributed.get_backend_config(everyone):
        return everyone
    if everyone not in _beside:
        _beside[everyone] = torch.distributed.new_group(backend="gloo")
    return _beside[everyone]


def process_count() -> int:
    """How many processes take part; 1 where nothing is distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def gather_objects(mine: T) -> list[T]:
    """What each process holds, by rank, on every process; on one process a list of one."""
    return all_processes().gather(mine)


def broadcast_object(mine: T | None) -> T | None:
    """What the first process holds, on every process."""
    return gather_objects(mine)[0]
