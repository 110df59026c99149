"""Embeddings on their way from the steps of an epoch to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fewshot_callbacks.functional._checks import check_labels

T = TypeVar("T")


@dataclass(frozen=True)
class _Batch:
    embeddings: Tensor  # (items, dim), on the CPU
    labels: Tensor  # (items,)
    positions: Tensor  # (items,) place of each item in this rank's pass over the data


class EmbeddingStore:
    """Collects (embeddings, labels) batch by batch on the CPU, and hands the whole set out once.

    What is stored is a detached copy in the dtype that the model produced (half precision stays half the size),
    never a view that would keep a larger tensor alive. From a CUDA device the copy goes through pinned memory without
    stalling the device: it is read one batch later, when it has long arrived.

    Examples:
        >>> import torch
        >>> store = EmbeddingStore()
        >>> store.append(torch.ones(3, 8), torch.tensor([0, 1, 1]))
        >>> store.append(torch.zeros(1, 8), torch.tensor([0]))
        >>> len(store)
        4
        >>> embeddings, labels = store.gather()
        >>> embeddings.shape, labels.tolist()
        (torch.Size([4, 8]), [0, 1, 1, 0])
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._batches: list[_Batch] = []
        self._arriving: list[tuple[torch.cuda.Event, _Batch]] = []
        self._items = 0
        self._dim: int | None = None

    def __len__(self) -> int:
        """Number of items held by this process."""
        return self._items

    def append(self, embeddings: Tensor, labels: Tensor, positions: Tensor | None = None) -> None:
        """Copy one batch to the CPU.

        Args:
            embeddings: (items, dim), any floating dtype, any device.
            labels: (items,), any integer dtype, any device.
            positions: (items,) place of each item in this process's pass over its data; by default they follow on.
                Needed only where the items of one loader go to two stores.

        Raises:
            ValueError: if the shapes do not fit each other or what was stored before, or labels are no integers.
        """
        if embeddings.ndim != 2:
            raise ValueError(
                f"EmbeddingStore needs embeddings of shape (items, dim); got shape {tuple(embeddings.shape)}. "
                "Flatten what belongs to one item: embeddings.flatten(1)."
            )
        if self._dim is not None and self._dim != embeddings.shape[1]:
            raise ValueError(
                f"EmbeddingStore holds embeddings of dimension {self._dim}; this batch has dimension "
                f"{embeddings.shape[1]}. Every batch must come from the same layer."
            )
        self._settle(keep=1)
        on_cuda = embeddings.device.type == "cuda"
        if positions is None:
            positions = torch.arange(self._items, self._items + len(embeddings))
        elif positions.shape != embeddings.shape[:1]:
            raise ValueError(
                f"EmbeddingStore needs one position for each of the {len(embeddings)} embeddings; got positions of shape "
                f"{tuple(positions.shape)}."
            )
        batch = _Batch(
            embeddings=_to_host(embeddings),
            labels=_to_host(labels)
            if on_cuda
            else check_labels(labels.detach(), len(embeddings), *_LABEL_WORDS).clone(),
            positions=positions.to("cpu", copy=True),
        )
        self._dim = embeddings.shape[1]
        self._items += len(embeddings)
        if on_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(embeddings.device))
            self._arriving.append((arrived, batch))
        else:
            self._batches.append(batch)

    def _settle(self, keep: int = 0) -> None:
        """Move what has arrived from pinned into ordinary memory, but for the newest `keep` batches."""
        while len(self._arriving) > keep:
            arrived, batch = self._arriving.pop(0)
            arrived.synchronize()
            labels = check_labels(batch.labels.clone(), len(batch.embeddings), *_LABEL_WORDS)
            self._batches.append(_Batch(batch.embeddings.clone(), labels, batch.positions))

    def gather(self, dataset_size: int | None = None) -> tuple[Tensor, Tensor]:
        """All items of all processes, in the order of the data set; the same on every rank.

        Args:
            dataset_size: the number of items that there are, where a `DistributedSampler` has dealt them out. It gives
                item `i * ranks + rank` to a rank as its i-th, and repeats the first ones to even out the ranks:
                the repeats lie past the end, and are dropped.

        Returns:
            embeddings (items, dim) and labels (items,). With nothing stored anywhere, both are empty: (0, 0) and (0,).
        """
        self._settle()
        embeddings = torch.cat([batch.embeddings for batch in self._batches] or [torch.empty(0, 0)])
        labels = torch.cat([batch.labels for batch in self._batches] or [torch.empty(0, dtype=torch.int64)])
        if process_count() == 1:
            return embeddings, labels
        positions = torch.cat([batch.positions for batch in self._batches] or [torch.empty(0, dtype=torch.int64)])
        ranks = process_count()
        shards = gather_objects((embeddings, labels, positions))
        places = torch.cat([place * ranks + rank for rank, (_, _, place) in enumerate(shards)])
        order = places.argsort(stable=True)
        if dataset_size is not None:
            order = order[places[order] < dataset_size]
        filled = [shard for shard, _, _ in shards if len(shard)]
        everything = torch.cat(filled or [embeddings])
        return everything[order], torch.cat([shard for _, shard, _ in shards])[order]


_LABEL_WORDS = ("labels", "embeddings", "EmbeddingStore")


def _to_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def process_count() -> int:
    """How many processes take part; 1 where nothing is distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return 1


def gather_objects(mine: T) -> list[T]:
    """What each process holds, by rank, on every process; on one process a list of one."""
    if process_count() == 1:
        return [mine]
    everyone: list[T] = [mine] * process_count()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def is_rank_zero() -> bool:
    """Whether this process is the first."""
    return process_count() == 1 or torch.distributed.get_rank() == 0


def broadcast_object(mine: T | None) -> T | None:
    """What the first process holds, on every process."""
    held = [mine]
    if process_count() > 1:
        torch.distributed.broadcast_object_list(held, src=0)
    return held[0]
