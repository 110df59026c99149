"""Embeddings of an epoch, copied to the CPU: this process's part, or the embeddings of all processes.

A store owns copies of all batches until it is cleared or dropped. Nothing is sent between processes before `shard` or
`gather`, which every process must call.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.distributed.torch_distributed import all_processes, gather_objects, process_count
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, encode, encode_ids, join, no_labels
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional._repeated import first_of_each, note_on_ids
from fewshot_callbacks.functional.class_subset import class_subset
from fewshot_callbacks.metrics._rows import RowsInFile, RowsInMemory, rows_in_file, sketches_of
from fewshot_callbacks.metrics.item_batch import ItemBatch, copied


class _ItemColumns(NamedTuple):
    """Items without their embeddings."""

    labels: Labels
    # (items,) index of each item in this rank's pass over the data; items that are dropped later count, too
    positions: Tensor
    # see `ItemBatch.columns`
    columns: Mapping[Hashable, Labels]

    def chosen(self, mask: Bool[Tensor, "items"]) -> _ItemColumns:
        """Return the items that a mask selects."""
        return _ItemColumns(self.labels[mask], self.positions[mask], _chosen(self.columns, mask))


class Shard(NamedTuple):
    """One process's items of a set. Each item of the set is in exactly one process.

    `places` and `positions` are both indices of the items. They differ if repeated items were dropped:

        read by all processes   a  b  a  c
        positions               0  1     3   the dropped item keeps its number
        places                  0  1     2   without gaps, as `Share` needs them

    Attributes:
        embeddings: (items, dim) rows on the CPU.
        labels: As they were given, for `evaluate_retrieval`. `labels.tolist()` lists them.
        places: (items,) index of each item among the items of all processes, without dropped items; for `Share`.
        dropped: Number of repeated items of all processes that were dropped.
        positions: (items,) index of each item in the pass of all processes over the data; dropped items count, too.
        note: A warning if a dropped item differs from the first item of its id; None otherwise.
        groups: Group of each item, as it was given; None without groups.
        ids: Id of each item, as it was given; None without ids.
        columns: Name -> other values of each item.
    """

    embeddings: Float[Tensor, "items dim"]
    labels: Labels
    places: Int[Tensor, "items"]
    dropped: int
    positions: Int[Tensor, "items"]
    note: str | None = None
    groups: Labels | None = None
    ids: Labels | None = None
    columns: Mapping[Hashable, Labels] = {}

    @default_mode()
    def some_of_each_class(self, items: int, seed: int) -> Shard:
        """Return at most this number of items per class of the whole set, drawn with a seed. *Collective*."""
        processes = all_processes()
        length = sum(processes.gather(len(self.labels)))
        [codes], _ = encode("Shard", {"labels": self.labels}, processes)
        all_labels = processes.placed(codes, self.places, length)
        drawn_places = class_subset(all_labels, None, items, seed).sort().values
        is_drawn = torch.isin(self.places, drawn_places)
        places = torch.searchsorted(drawn_places, self.places[is_drawn])
        return self._chosen(is_drawn, places, self.embeddings[is_drawn])

    def _chosen(self, mask: Bool[Tensor, "items"], places: Tensor, embeddings: Tensor) -> Shard:
        """Return the items that a mask selects, with these places and embeddings."""
        return self._replace(
            embeddings=embeddings,
            labels=self.labels[mask],
            places=places,
            positions=self.positions[mask],
            groups=None if self.groups is None else self.groups[mask],
            ids=None if self.ids is None else self.ids[mask],
            columns=_chosen(self.columns, mask),
        )

    def part(
        self,
        is_kept: Bool[Tensor, "items"],
        spill_to: str | os.PathLike[str] | None = None,
        call: str = "EmbeddingStore",
    ) -> Shard:
        """Return some items. Their places count only the items that all processes keep. *Collective*.

        Args:
            is_kept: Whether each item of this process is kept.
            spill_to: A folder in which the rows of the new shard are written to a file; None keeps them in memory.
            call: Name of the owner, for messages.
        """
        all_positions = torch.cat(all_processes().gather(self.positions[is_kept])).sort().values
        places = torch.searchsorted(all_positions, self.positions[is_kept])
        rows = self.embeddings
        return self._chosen(
            is_kept, places, rows[is_kept] if spill_to is None else rows_in_file(rows, is_kept, spill_to, call)
        )


class EmbeddingStore:
    """Collects embeddings and labels on the CPU batch by batch, and returns the whole set.

    The store keeps detached copies in the dtype of the model, so half precision takes half the memory. CUDA tensors are
    copied through pinned memory without stalling the device, and are read one batch later. `clear` frees the copies.

    Args:
        spill_to: A folder. Embeddings are written to a file in it, and read when they are needed. The file has no name,
            so it is deleted with the store, and with the process even if that is killed.
        call: Name of this class, or of the callback that owns the store, for messages.

    Raises:
        ValueError: If the folder does not exist, or its disk is full.

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

    def __init__(self, spill_to: str | os.PathLike[str] | None = None, call: str = "EmbeddingStore") -> None:
        self._folder = spill_to
        self._call = call
        # The user of a callback has not called a method.
        self._method = f"{call}.append" if call == type(self).__name__ else call
        self.clear()

    def clear(self) -> None:
        """Drop all stored items."""
        self._rows = RowsInMemory() if self._folder is None else RowsInFile(self._folder, self._call)
        # the items of each batch without their embeddings
        self._batches: list[_ItemColumns] = []
        # embeddings and labels in pinned memory, each with the event that marks the end of its copy
        self._arriving: list[tuple[torch.cuda.Event, Tensor, _ItemColumns]] = []
        self._items = 0
        self._dim: int | None = None
        # form of the labels, ids, groups and other columns so far, by name (see `Labels.form`)
        self.forms: dict[Hashable, str] = {}

    def __len__(self) -> int:
        """Return the number of items in this process."""
        return self._items

    @default_mode()
    def append(
        self,
        embeddings: Any,
        labels: Any,
        positions: Tensor | None = None,
        ids: Any | None = None,
        groups: Any | None = None,
    ) -> None:
        """Copy a batch to the CPU.

        Args:
            embeddings: (items, dim), any floating dtype, any device.
            labels: (items,) integers or strings, or (items, labels) zeros and ones, any device.
            positions: (items,) index of each item in this process's pass over its data, including repeated items. By
                default the next indices. You need it only if the items of one loader go to two stores.
            ids: (items,) integers or strings that identify each item, so that repeated items can be dropped. Pass ids
                with each batch or with none.
            groups: (items,) integers or strings. Items of one group are not candidates for each other. Pass groups with
                each batch or with none.

        Raises:
            ValueError: If the shapes do not fit each other or earlier batches, labels are neither integers nor strings,
                or labels, ids or groups have another form than in earlier batches.
        """
        self.add(ItemBatch.read(self._method, embeddings, labels, ids, groups, positions, sets=True))

    @default_mode()
    def add(self, batch: ItemBatch) -> None:
        """Copy an `ItemBatch` to the CPU.

        Raises:
            ValueError: If it does not fit earlier batches, see `append`.
        """
        batch.refuse_unlike(self._method, self._dim, self.forms)
        # Before the next copy begins, so that at most two batches are in pinned memory.
        self._move_arrived(waiting=1)
        positions = batch.positions
        if positions is None:
            positions = torch.arange(self._items, self._items + len(batch))
        items = _ItemColumns(_to_host_labels(batch.labels), positions.to("cpu", copy=True), batch.columns)
        self.forms |= batch.forms
        self._dim = batch.embeddings.shape[1]
        self._items += len(batch)
        device = _cuda_device(batch.embeddings, batch.labels.values)
        if device is None:
            self._keep(batch.embeddings.detach(), items)
        else:
            pinned = _to_host(batch.embeddings)
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
            self._arriving.append((arrived, pinned, items))

    def _keep(self, embeddings: Tensor, items: _ItemColumns) -> None:
        """Copy the rows of a batch to their place."""
        self._rows.append(embeddings)
        self._batches.append(items)

    def _move_arrived(self, waiting: int = 0) -> None:
        """Move the oldest batches out of pinned memory until only `waiting` are pinned."""
        while len(self._arriving) > waiting:
            arrived, embeddings, items = self._arriving.pop(0)
            arrived.synchronize()
            self._keep(embeddings, items._replace(labels=copied(items.labels)))

    @default_mode()
    def shard(
        self, dataset_size: int | None = None, part: tuple[int, int] | None = None, *, clear: bool = False
    ) -> Shard:
        """Return the items of this process without repeated items. *Collective*.

        The shard is a copy. With `spill_to` its rows are in a file, too.

        Args:
            dataset_size: The number of items in the data set, if a `DistributedSampler` has dealt them. The i-th item
                of a rank is then item `i * ranks + rank` of the data set. The sampler repeats the first items to give
                all ranks the same number. These repetitions are past the end, and are dropped.
            part: (index of this process's part of the data set, number of parts), if they differ from rank and number
                of processes: the processes of a tensor-parallel group have the same part, and only one of them stores
                it.
            clear: Drop stored batches while they are copied, so that the embeddings are never in memory twice.

        Returns:
            The items of this process; with ids only the first item of each id. If nothing is stored, all tensors are
            empty: (0, 0) and (0,).

        Raises:
            ValueError: In all processes, if only some batches or some processes had ids or groups, or if the processes
                passed different sizes of the data set.
        """
        self._move_arrived()
        processes = all_processes()
        calls = processes.gather(_Call.of(self._batches, dataset_size))
        refuse_different_calls(calls, self._call)

        items = self._joined()
        # The sampler deals items to the ranks in turn.
        number, parts = (processes.rank, processes.count) if part is None else part
        positions = items.positions * parts + number
        is_kept = torch.ones(len(positions), dtype=torch.bool)
        if dataset_size is not None:
            is_kept &= positions < dataset_size
        note = None
        if any(True in call.ids for call in calls):
            compared = items._replace(positions=positions).chosen(is_kept)
            first_positions, note = _first_positions(
                processes, compared, sketches_of(self._rows.batches())[is_kept], self._call
            )
            is_kept &= torch.isin(positions, first_positions)

        kept_positions = positions[is_kept]
        all_positions = torch.cat(processes.gather(kept_positions)).sort().values
        kept = items.chosen(is_kept)
        columns = dict(kept.columns)
        embeddings = self._rows.kept(is_kept, clear=clear)
        if clear:
            self.clear()
        return Shard(
            embeddings=embeddings,
            labels=kept.labels,
            places=torch.searchsorted(all_positions, kept_positions),
            dropped=sum(call.items for call in calls) - len(all_positions),
            positions=kept_positions,
            note=note,
            groups=columns.pop("groups", None),
            ids=columns.pop("ids", None),
            columns=columns,
        )

    def _joined(self) -> _ItemColumns:
        """Return the items of all batches without their embeddings, and with the columns that every batch has."""
        # A batch without items may lack columns.
        filled = [batch.columns for batch in self._batches if len(batch.labels)]
        names = [name for name in filled[0] if all(name in columns for columns in filled)] if filled else []
        return _ItemColumns(
            labels=join(self._call, [batch.labels for batch in self._batches]),
            positions=torch.cat([batch.positions for batch in self._batches] or [torch.empty(0, dtype=torch.int64)]),
            columns={name: join(self._call, [columns[name] for columns in filled], str(name)) for name in names},
        )

    @default_mode()
    def gather(self, dataset_size: int | None = None, part: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
        """Return the items of all processes on every rank, in the order of the data set. *Collective*.

        Args:
            dataset_size: See `shard`.
            part: See `shard`.

        Returns:
            Embeddings (items, dim) and labels (items,). String labels become their indices in sorted order. If no rank
            has stored anything, both are empty: (0, 0) and (0,).
        """
        shard_here = self.shard(dataset_size, part)
        if process_count() == 1:
            return shard_here.embeddings, shard_here.labels.codes
        shards = gather_objects(shard_here)
        codes, _ = encode(self._call, {f"labels of process {rank}": shard.labels for rank, shard in enumerate(shards)})
        order = torch.cat([shard.places for shard in shards]).argsort()
        # A process without items does not know the dimension.
        embeddings = [shard.embeddings for shard in shards if len(shard.embeddings)] or [shards[0].embeddings]
        return torch.cat(embeddings)[order], torch.cat(codes)[order]


@dataclass(frozen=True)
class _Call:
    """The arguments of one process, to compare them with the other processes."""

    items: int
    dataset_size: int | None
    # whether batches with items had ids: (True,), (False,), both if batches differ, or () without items
    ids: tuple[bool, ...]
    # the same for groups
    groups: tuple[bool, ...]

    @classmethod
    def of(cls, batches: Sequence[_ItemColumns], dataset_size: int | None) -> _Call:
        filled = [batch for batch in batches if len(batch.labels)]
        return cls(
            items=sum(len(batch.labels) for batch in filled),
            dataset_size=dataset_size,
            ids=tuple({"ids" in batch.columns for batch in filled}),
            groups=tuple({"groups" in batch.columns for batch in filled}),
        )


def refuse_different_calls(calls: Sequence[_Call], call: str) -> None:
    """Refuse ids, groups or sizes that only some batches or only some processes have.

    `calls` has the arguments of each process, by rank, and is the same in every process, so all raise the error.
    """
    has_several = len(calls) > 1
    which_batches = "each batch of every process" if has_several else "each batch"
    for name in ("ids", "groups"):
        fix = f"Pass them with {which_batches}, or with none."
        # A process without items is not compared.
        presence = {rank: getattr(call, name) for rank, call in enumerate(calls) if getattr(call, name)}
        mixed_ranks = [rank for rank, values in presence.items() if len(values) > 1]
        if mixed_ranks:
            batches = f"some batches of process {mixed_ranks[0]}" if has_several else "some batches"
            raise InputError(f"{call}: {name} are given only in {batches}. {fix}")
        words = {rank: "given" if values[0] else "left out" for rank, values in presence.items()}
        if len(set(words.values())) > 1:
            raise InputError(f"{call}: {name} are {_two_that_differ(words)}. {fix}")
    sizes = {rank: str(call.dataset_size) for rank, call in enumerate(calls)}
    if len(set(sizes.values())) > 1:
        raise InputError(
            f"{call}: dataset_size is {_two_that_differ(sizes)}. Pass the number of items of the whole data set in "
            "every process."
        )


def _two_that_differ(words: dict[int, str]) -> str:
    """Return the first word and the first different word, with their ranks."""
    first_rank = next(iter(words))
    other_rank = next(rank for rank, word in words.items() if word != words[first_rank])
    return f"{words[first_rank]} in process {first_rank}, {words[other_rank]} in process {other_rank}"


def _chosen(columns: Mapping[Hashable, Labels], mask: Bool[Tensor, "items"]) -> dict[Hashable, Labels]:
    """Return the columns of the items that a mask selects."""
    return {name: values[mask] for name, values in columns.items()}


def _first_positions(
    processes: Processes, items: _ItemColumns, row_sketches: Float[Tensor, "items numbers"], call: str
) -> tuple[Int[Tensor, "first"], str | None]:
    """Return the positions of the first items of all ids, and a note on ids with different items. *Collective*.

    `items` have their positions in the pass of all processes, and may lack ids if they are empty.
    """
    [id_codes] = encode_ids(call, {"ids": items.columns.get("ids", no_labels())}, processes)
    [label_codes], _ = encode(call, {"labels": items.labels}, processes)
    # Sketches show whether items of one id have different embeddings; all rows would be too much to send.
    given = (items.positions, id_codes, label_codes, row_sketches)
    by_rank = [columns for columns in processes.gather(given) if len(columns[0])]
    if not by_rank:
        return items.positions, None
    all_positions, all_ids, all_labels, all_sketches = (torch.cat(tensors) for tensors in zip(*by_rank, strict=True))
    order = all_positions.argsort()
    note = note_on_ids(all_ids[order], all_labels[order], all_sketches[order])
    return all_positions[order][first_of_each(all_ids[order])], note


def _cuda_device(*columns: Any) -> torch.device | None:
    """Return the device of the first CUDA tensor; None without one."""
    devices = (column.device for column in columns if isinstance(column, Tensor))
    return next((device for device in devices if device.type == "cuda"), None)


def _to_host_labels(labels: Labels) -> Labels:
    """Return labels on the CPU (see `_to_host`)."""
    return Labels(_to_host(labels.values)) if isinstance(labels.values, Tensor) else labels


def _to_host(tensor: Tensor) -> Tensor:
    """Return a detached CPU copy; from CUDA it is pinned, and complete only later."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
