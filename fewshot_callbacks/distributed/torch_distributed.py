"""Processes that communicate through `torch.distributed`, even if its backend does not support CPU tensors."""

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
from fewshot_callbacks.errors import InputError

T = TypeVar("T")

# The tag of messages that only test a connection; no other message has it.
TEST_TAG = 2**20

# The references below are weak. Otherwise a group would keep its threads after `destroy_process_group` until the interpreter
# ends, and a thread that then releases a tensor aborts the process.
# The group of all processes -> the gloo group that was created for CPU tensors.
_gloo_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
# A group -> its `TorchProcesses`. A group has a single such object as long as the object is used, since it records whether
# an error is known. The values are weak as well, since each value refers to its key, the group.
_processes_of: WeakKeyDictionary[Any, ref[TorchProcesses]] = WeakKeyDictionary()


class TorchProcesses(Processes):
    """The processes of `torch.distributed`, for `evaluate_retrieval(..., share=Share(...))`.

    Embeddings are kept on the CPU and sent from there. NCCL does not support CPU tensors, so one additional gloo group is
    created for it.

    Args:
        group: A group whose backend supports CPU tensors; by default a group of all processes.

    Examples:
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> from fewshot_callbacks.functional import Share
        >>> from fewshot_callbacks.metrics import TorchProcesses
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.8, 0.6]])
        >>> round(evaluate_retrieval(embeddings, [0, 0, 1, 1], share=Share(TorchProcesses())).mAP, 4)
        0.4167
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(self, group: Any | None = None) -> None:
        self._group = cpu_group() if group is None else group
        self.rank = torch.distributed.get_rank(self._group)
        self.count = torch.distributed.get_world_size(self._group)

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.count
        with self._naming_ended_processes():
            torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def _swap(
        self, sent: Sequence[Tensor], destination: int | None, received: Sequence[Tensor], sender: int | None
    ) -> None:
        transfers: list[Any] = []
        with self._naming_ended_processes():
            # Receiving and sending begin before either is awaited. In a ring in which each process first waits until its
            # tensors are received, no process would ever receive any. Both sides know the shapes, so both leave out empty
            # tensors.
            if sender is not None:
                rank = self._rank_among_all(sender)
                for tag, tensor in enumerate(received):
                    if tensor.numel():
                        transfers.append(torch.distributed.irecv(tensor, rank, group=self._group, tag=tag))
            if destination is not None:
                rank = self._rank_among_all(destination)
                for tag, tensor in enumerate(sent):
                    if tensor.numel():
                        transfers.append(torch.distributed.isend(tensor, rank, group=self._group, tag=tag))
            for transfer in transfers:
                # PyTorch returns None to a process that is not in the group.
                if transfer is not None:
                    transfer.wait()

    def to_first(self, value: T) -> list[T] | None:
        """Return the values of all processes, by rank, on the first process; None on the others, which receive none."""
        values: list[Any] | None = [None] * self.count if self.rank == 0 else None
        with to_the_end():
            self.gather(None)  # this reports a failed process to the others
            with self._naming_ended_processes():
                torch.distributed.gather_object(value, values, dst=self._rank_among_all(0), group=self._group)
        return values

    def summed(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sum of each value over all processes. No process receives the values of all the others."""
        total = torch.from_numpy(np.array(values, np.int64))  # a copy, since `all_reduce` overwrites it
        with to_the_end():
            self.gather(None)  # this reports a failed process to the others
            with self._naming_ended_processes():
                torch.distributed.all_reduce(total, group=self._group)
        return total.numpy()

    def _rank_among_all(self, rank: int) -> int:
        """Return the global rank of a process: `gather_object`, `irecv` and `isend` do not use ranks of the group."""
        return torch.distributed.get_global_rank(self._group, rank)

    @contextmanager
    def _naming_ended_processes(self) -> Iterator[None]:
        """Raise an error that names a process that has ended. The error of gloo only names a port that does not answer.

        Raises:
            ConnectionError: A process has ended. The message has its rank.
        """
        try:
            yield
        except RuntimeError as error:
            ended_ranks = [] if self._error_is_known else self._ended_processes()
            if not ended_ranks:
                raise
            self._error_is_known = True  # an ended process cannot be informed
            names = " and ".join(f"process {rank}" for rank in ended_ranks)
            raise ConnectionError(
                f"{names} of {self.count} (counted from 0) crashed or was killed during the evaluation, and the other "
                "processes cannot continue. Look at its last output. If the machine ran out of memory, pass a smaller "
                "memory_mb or start fewer processes."
            ) from error

    def _ended_processes(self) -> list[int]:
        """Return the ranks without a connection."""
        ended_ranks = []
        for rank in range(self.count):
            if rank == self.rank:
                continue
            try:
                # No process receives this message or waits for it, but sending it fails without a connection.
                message = torch.zeros(1, device="cpu")
                torch.distributed.isend(message, self._rank_among_all(rank), group=self._group, tag=TEST_TAG)
            except RuntimeError:
                ended_ranks.append(rank)
        return ended_ranks


def all_processes() -> Processes:
    """Return the processes of `torch.distributed`, for `evaluate_retrieval(..., share=Share(...))`.

    Without `torch.distributed`, there is only this process. If the backend does not support CPU tensors (NCCL), the first
    call is collective: all processes must make it together.

    Returns:
        An object with the number of processes, `count`, and the position of this process, `rank`, in [0, count).

    Examples:
        Each process passes its own part of the set, and gets the value of the whole set. Here one process has all items:

        >>> from fewshot_callbacks import evaluate_retrieval
        >>> from fewshot_callbacks.functional import Share
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [0.8, 0.6]])
        >>> report = evaluate_retrieval(embeddings, [0, 0, 1, 1], share=Share(all_processes()))
        >>> round(report.mAP, 4)
        0.4167
    """
    if process_count() == 1:
        return ALONE
    group = cpu_group()
    reference = _processes_of.get(group)
    processes = None if reference is None else reference()
    if processes is None:
        processes = TorchProcesses(group)
        _processes_of[group] = ref(processes)
    return processes


def cpu_group() -> Any:
    """Return a group of all processes whose backend supports CPU tensors. The first call is collective."""
    world = torch.distributed.group.WORLD
    if "cpu" in torch.distributed.get_backend_config(world):
        return world
    if world not in _gloo_groups:
        _gloo_groups[world] = torch.distributed.new_group(backend="gloo")
    return _gloo_groups[world]


def process_count() -> int:
    """Return the number of processes; 1 if nothing is distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def gather_objects(value: T) -> list[T]:
    """Return the value of each process, by rank, on every process; on one process a list of one."""
    return all_processes().gather(value)


def broadcast_object(value: T | None) -> T | None:
    """Return the value of the first process, on every process."""
    return gather_objects(value)[0]


def gather_tensors(tensor: Tensor, group: Any | None = None) -> list[Tensor]:
    """Return the non-empty tensors of all processes, by rank, as the `dist_sync_fn` of a `torchmetrics.Metric`.

    Unlike the torchmetrics function, it accepts a process that has not seen a batch, so that its state has no shape and
    dtype yet, and CPU tensors under a backend that only supports CUDA.
    """
    if group is None or group is torch.distributed.group.WORLD:
        group = cpu_group()
    by_rank: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(by_rank, tensor.detach().cpu(), group=group)
    dims = {rank: values.shape[1] for rank, values in enumerate(by_rank) if values.numel() and values.ndim == 2}
    if len(set(dims.values())) > 1:
        listed = ", ".join(f"{dim} in process {rank}" for rank, dim in dims.items())
        raise InputError(f"embeddings have dimension {listed}. Use the same model in all processes.")
    gathered = [values.to(tensor.device) for values in by_rank if values.numel()]
    return gathered or [tensor]
