"""Reads the batches of an epoch, collects their embeddings, and gathers them from all processes."""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.distributed.torch_distributed import all_processes, cpu_group, gather_objects, process_count
from fewshot_callbacks.functional._labels import (
    Labels,
    encode,
    encode_ids,
    join,
    labels_of_each,
    no_labels,
    read_labels,
    refuse_other_forms,
)
from fewshot_callbacks.functional._reading import as_tensor, default_mode
from fewshot_callbacks.functional._repeated import first_of_each, note_on_ids, sketches
from fewshot_callbacks.functional.class_subset import class_subset

# What an id in a list is where it is an integer.
WHOLE = (int, np.integer, Tensor, np.ndarray)


def gather_tensors(tensor: Tensor, group: Any | None = None) -> list[Tensor]:
    """Gather the tensors of all processes, by rank, without empty ones: `dist_sync_fn` of `torchmetrics.Metric`.

    Unlike the function of torchmetrics, it accepts a process without a single batch, whose state has no shape and no
    dtype yet, and tensors on the CPU under a backend that supports only CUDA.
    """
    if group is None or group is torch.distributed.group.WORLD:
        group = cpu_group()
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, tensor.detach().cpu(), group=group)
    dims = {rank: held.shape[1] for rank, held in enumerate(everyone) if held.numel() and held.ndim == 2}
    if len(set(dims.values())) > 1:
        shown = ", ".join(f"{dim} in process {rank}" for rank, dim in dims.items())
        raise ValueError(f"embeddings have dimension {shown}. All must come from the same model.")
    return [held.to(tensor.device) for held in everyone if held.numel()] or [tensor]


def read_batch(
    embeddings: Any, labels: Any, method: str, form: str = "", dim: int | None = None, *, sets: bool = False
) -> tuple[Tensor, Labels]:
    """Return a batch as (items, dim) embeddings and one label for each, on the devices where they are; see `as_labels`.

    Args:
        embeddings: What was given.
        labels: What was given.
        method: Who was given it, for messages, such as `EmbeddingStore.append`.
        form: That of the labels so far; empty before the first.
        dim: That of the embeddings so far; None before the first.
        sets: See `as_labels`.

    Raises:
        ValueError: If shapes or types do not fit each other or the batches before: integers where these were words,
            zeros and ones of other labels, and so on.
    """
    call = method.partition(".")[0]
    embeddings = as_tensor(embeddings, "embeddings", call)
    if embeddings.ndim != 2:
        raise ValueError(
            f"{call} needs embeddings of shape (items, dim); got shape {tuple(embeddings.shape)}. Flatten what belongs to "
            "one item: embeddings.flatten(1)."
        )
    read = labels_of_each(labels, len(embeddings), "labels", "embeddings", call, sets=sets)
    refuse_another_form(method, form, read)
    if dim not in (None, embeddings.shape[1]):
        raise ValueError(
            f"{method}: the embeddings so far have dimension {dim}, those of this batch {embeddings.shape[1]}. Every batch "
            "must come from the same layer."
        )
    return embeddings, read


def refuse_another_form(call: str, form: str, labels: Labels, name: str = "labels") -> None:
    """Refuse a batch of integers where strings were given before, zeros and ones of other labels, and so on.

    Raises:
        ValueError: With both forms.
    """
    if form and len(labels):
        refuse_other_forms(call, {f"the {name} so far": form, "those of this batch": labels.form})


@dataclass(frozen=True)
class _Batch:
    embeddings: Tensor  # (items, dim), on the CPU
    labels: Labels
    positions: Tensor  # (items,) place of each item in this rank's pass over the data
    ids: Labels | None  # what identifies items
    groups: Labels | None  # items of one group are no candidates for each other


class Shard(NamedTuple):
    """The part of a set that one process holds; each item of the set is in exactly one process."""

    embeddings: Float[Tensor, "items dim"]
    labels: Labels
    """as they were given, for `evaluate_retrieval`; `labels.tolist()` lists them"""
    places: Int[Tensor, "items"]
    """index of each item among those of all processes, for `Share`"""
    dropped: int
    """number of items of all processes that were dropped as repetitions"""
    positions: Int[Tensor, "items"]
    """index of each item in the pass of all processes over their data, in which dropped items count, too"""
    note: str | None = None
    """what is wrong with the ids, where items were dropped that are not the one that was kept"""
    groups: Labels | None = None
    """group of each item, as it was given; None if none were given"""
    ids: Labels | None = None
    """id of each item, as it was given; None if none were given"""

    @default_mode()
    def some_of_each_class(self, items: int, seed: int) -> Shard:
        """Draw at most this number of items of each class, from all in the order of the data set. Collective."""
        processes = all_processes()
        length = sum(processes.gather(len(self.labels)))
        [codes], _ = encode("Shard", {"labels": self.labels}, processes)
        labels = processes.placed(codes, self.places, length)
        some = class_subset(labels, None, items, seed).sort().values
        mine = torch.isin(self.places, some)
        places = torch.searchsorted(some, self.places[mine])
        held = {name: getattr(self, name)[mine] for name in ("embeddings", "labels", "positions")}
        for name in ("groups", "ids"):
            codes = getattr(self, name)
            held[name] = None if codes is None else codes[mine]
        return self._replace(places=places, **held)


class EmbeddingStore:
    """Collects embeddings and labels batch by batch on the CPU, and returns the whole set.

    It stores a detached copy in the dtype of the model (half precision stays half the size), never a view that would
    keep a larger tensor in memory. From a CUDA device, embeddings are copied through pinned memory without stalling the
    device, and the copy is read one batch later.

    Args:
        spill_to: A folder: embeddings are written to a file in it, and read from there as they are needed. The file has no
            name, so that it vanishes with the store, and with the process however that ends.

    Raises:
        ValueError: There is no such folder, or its disk is full.

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

    def __init__(self, spill_to: str | os.PathLike[str] | None = None) -> None:
        self._folder = spill_to
        self.clear()

    def clear(self) -> None:
        """Drop all stored items."""
        self._spilled = None if self._folder is None else _SpilledRows(self._folder)
        self._batches: list[_Batch] = []
        self._arriving: list[tuple[torch.cuda.Event, _Batch]] = []
        self._items = 0
        self._dim: int | None = None
        # of what has been given, by name, see `Labels.form`
        self._forms: dict[str, str] = {}

    def __len__(self) -> int:
        """Return the number of items that this process holds."""
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
        """Copy one batch to the CPU.

        Args:
            embeddings: (items, dim), any floating dtype, any device.
            labels: (items,) integers or strings, or (items, labels) zeros and ones, any device.
            positions: (items,) index of each item in this process's pass over its data; by default the next ones.
                Needed only if the items of one loader go to two stores.
            ids: (items,) integers or strings that identify each item, so that repeated items can be dropped; in each
                batch, or in none.
            groups: (items,) integers or strings; items of one group are no candidates for each other; in each batch, or in
                none.

        Raises:
            ValueError: If the shapes do not fit each other or earlier batches, labels are neither integers nor strings,
                or labels, ids or groups have another form than those of earlier batches.
        """
        call = "EmbeddingStore"
        embeddings, read = read_batch(embeddings, labels, f"{call}.append", self._form("labels"), self._dim, sets=True)
        given = {"labels": read}
        for name, value in (("ids", ids), ("groups", groups)):
            if value is not None:
                given[name] = read_ids(value, len(embeddings), call, name)
                refuse_another_form(f"{call}.append", self._form(name), given[name], name)
        self._settle(keep=1)
        if positions is None:
            positions = torch.arange(self._items, self._items + len(embeddings))
        elif positions.shape != embeddings.shape[:1]:
            raise ValueError(
                f"EmbeddingStore needs one position for each of the {len(embeddings)} embeddings; got positions of shape "
                f"{tuple(positions.shape)}."
            )
        batch = _Batch(
            embeddings=_to_host(embeddings),
            labels=_to_host_labels(read),
            positions=positions.to("cpu", copy=True),
            ids=given.get("ids"),
            groups=given.get("groups"),
        )
        if len(read):
            self._forms |= {name: labels.form for name, labels in given.items()}
        self._dim = embeddings.shape[1]
        self._items += len(embeddings)
        tensors = (embeddings, read.values)
        on_cuda = [part.device for part in tensors if isinstance(part, Tensor) and part.device.type == "cuda"]
        if on_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(on_cuda[0]))
            self._arriving.append((arrived, batch))
        else:
            self._keep(batch)

    def _form(self, name: str) -> str:
        """Return the form of the labels, ids or groups so far; empty before the first item."""
        return self._forms.get(name, "")

    def _keep(self, batch: _Batch) -> None:
        if self._spilled is not None:
            self._spilled.append(batch.embeddings)
            batch = replace(batch, embeddings=batch.embeddings[:0].clone())
        self._batches.append(batch)

    def _settle(self, keep: int = 0) -> None:
        """Move what has arrived from pinned into ordinary memory, but for the newest `keep` batches."""
        while len(self._arriving) > keep:
            arrived, batch = self._arriving.pop(0)
            arrived.synchronize()
            self._keep(replace(batch, embeddings=batch.embeddings.clone(), labels=_copied(batch.labels)))

    @default_mode()
    def shard(self, dataset_size: int | None = None) -> Shard:
        """Return the items of this process without repeated items. Collective.

        Args:
            dataset_size: The number of items of the data set, if a `DistributedSampler` has distributed them. The i-th
                item of a rank is then item `i * ranks + rank` of the data set. The sampler repeats the first items to
                give all ranks the same number; these repetitions lie past the end and are dropped.

        Returns:
            The items of this process, with their places in the order of the data set. If ids were given, only the first
            item of each id is kept. If nothing is stored, all tensors are empty: (0, 0) and (0,).

        Raises:
            ValueError: In all processes, if some batches or some processes alone gave ids or groups, or if the processes
                were given different sizes of the data set.
        """
        self._settle()
        embeddings = torch.cat([batch.embeddings for batch in self._batches] or [torch.empty(0, 0)])
        if self._spilled is not None and self._items:
            embeddings = self._spilled.rows()
        labels = join("EmbeddingStore", [batch.labels for batch in self._batches])
        positions = torch.cat([batch.positions for batch in self._batches] or [torch.empty(0, dtype=torch.int64)])
        processes = all_processes()
        places = positions * processes.count + processes.rank
        calls = processes.gather(_Call.of(self._batches, dataset_size))
        refuse_different_calls(calls)
        ids = _joined("ids", [batch.ids for batch in self._batches if len(batch.labels)])
        groups = _joined("groups", [batch.groups for batch in self._batches if len(batch.labels)])
        items = sum(call.items for call in calls)
        stays = torch.ones(len(places), dtype=torch.bool)
        if dataset_size is not None:
            stays &= places < dataset_size
        note = None
        if any(True in call.ids for call in calls):
            of_items = no_labels() if ids is None else ids  # a process without items was given none
            named = _Named(of_items[stays], labels[stays], sketches(embeddings)[stays])
            first, note = _first_places(processes, places[stays], named)
            stays &= torch.isin(places, first)
        left = torch.cat(processes.gather(places[stays])).sort().values
        if not bool(stays.all()):
            labels, places = labels[stays], places[stays]
            embeddings = embeddings[stays] if self._spilled is None else self._spilled.some(embeddings, stays)
            groups = None if groups is None else groups[stays]
            ids = None if ids is None else ids[stays]
        index = torch.searchsorted(left, places)
        return Shard(embeddings, labels, index, items - len(left), places, note, groups, ids)

    @default_mode()
    def gather(self, dataset_size: int | None = None) -> tuple[Tensor, Tensor]:
        """Gather the items of all processes on every rank, in the order of the data set. Collective.

        Args:
            dataset_size: See `shard`.

        Returns:
            Embeddings (items, dim) and labels (items,); words are replaced by their indices in sorted order. If no rank
            has stored anything, both are empty: (0, 0) and (0,).
        """
        mine = self.shard(dataset_size)
        if process_count() == 1:
            return mine.embeddings, mine.labels.codes
        shards = gather_objects(mine)
        labels, _ = encode("EmbeddingStore", {f"labels of process {i}": s.labels for i, s in enumerate(shards)})
        order = torch.cat([shard.places for shard in shards]).argsort()
        filled = [shard.embeddings for shard in shards if len(shard.embeddings)] or [shards[0].embeddings]
        return torch.cat(filled)[order], torch.cat(labels)[order]


class _SpilledRows:
    """Rows in a file without a name, in the type of the first of them."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder, self._form = folder, (0, 0)
        self._dtype: torch.dtype | None = None
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the rows
        except OSError as error:
            raise ValueError(
                f"spill_to={os.fspath(folder)!r} cannot be written to: {error.strerror}. Pass a folder on a disk with room "
                "for the embeddings of a validation."
            ) from error
        weakref.finalize(self, self._file.close)

    def append(self, rows: Tensor) -> None:
        """Write some rows."""
        self._dtype = self._dtype or rows.dtype
        self._form = self._form[0] + len(rows), rows.shape[1]
        try:
            self._file.write(rows.to(self._dtype).contiguous().view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            raise ValueError(
                f"the embeddings could not be written to spill_to={os.fspath(self._folder)!r}: {error.strerror}. Make room, "
                "or pass a folder on another disk."
            ) from error

    def rows(self) -> Tensor:
        """Map all rows: the operating system keeps of them in memory what there is room for."""
        assert self._dtype is not None
        numbers = np.memmap(self._file, np.uint8, "r+", shape=(math.prod(self._form) * self._dtype.itemsize,))
        return torch.from_numpy(numbers).view(self._dtype).view(self._form)

    def some(self, rows: Tensor, stays: Bool[Tensor, "items"]) -> Tensor:
        """Return the rows that stay, from a file of their own."""
        kept = _SpilledRows(self._folder)
        for part, staying in zip(rows.split(4096), stays.split(4096), strict=True):
            kept.append(part[staying])
        return kept.rows()


@dataclass(frozen=True)
class _Call:
    """What one process was given, for a comparison with the others."""

    items: int
    dataset_size: int | None
    # Whether each batch that holds an item came with them.
    ids: tuple[bool, ...]
    groups: tuple[bool, ...]

    @classmethod
    def of(cls, batches: Sequence[_Batch], dataset_size: int | None) -> _Call:
        filled = [batch for batch in batches if len(batch.labels)]
        return cls(
            items=sum(len(batch.labels) for batch in filled),
            dataset_size=dataset_size,
            ids=tuple({batch.ids is not None for batch in filled}),
            groups=tuple({batch.groups is not None for batch in filled}),
        )


def refuse_different_calls(calls: Sequence[_Call]) -> None:
    """Refuse ids, groups or sizes that only some batches or some processes were given.

    Args:
        calls: What each process was given, by rank; the same in each.

    Raises:
        ValueError: The same in every process.
    """
    several = len(calls) > 1
    where = "each batch of every process" if several else "each batch"
    for name in ("ids", "groups"):
        fix = f"Pass them with {where}, or with none."
        # A process without an item was given nothing.
        given = {rank: getattr(call, name) for rank, call in enumerate(calls) if getattr(call, name)}
        mixed = [rank for rank, kinds in given.items() if len(kinds) > 1]
        if mixed:
            batches = f"some batches of process {mixed[0]}" if several else "some batches"
            raise ValueError(f"EmbeddingStore: {name} are given in {batches} alone. {fix}")
        words = {rank: "given" if kinds[0] else "left out" for rank, kinds in given.items()}
        if len(set(words.values())) > 1:
            raise ValueError(f"EmbeddingStore: {name} are {_first_two(words)}. {fix}")
    sizes = {rank: str(call.dataset_size) for rank, call in enumerate(calls)}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"EmbeddingStore: dataset_size is {_first_two(sizes)}. Pass the number of items of the whole data set in every "
            "process."
        )


def _first_two(words: dict[int, str]) -> str:
    """Name the words of the first process, and of the next one whose words are others."""
    (first, word), *others = words.items()
    other = next(rank for rank, different in others if different != word)
    return f"{word} in process {first}, {words[other]} in process {other}"


def _joined(name: str, batches: Sequence[Labels | None]) -> Labels | None:
    """Return the ids or groups of all batches; None if none were given."""
    given = [batch for batch in batches if batch is not None]
    return join("EmbeddingStore", given, name) if given else None


class _Named(NamedTuple):
    """The ids of some items, and what tells whether items of one id are the same item."""

    ids: Labels
    labels: Labels
    sketch: Float[Tensor, "items numbers"]


def _first_places(
    processes: Processes, places: Int[Tensor, "items"], named: _Named
) -> tuple[Int[Tensor, "kept"], str | None]:
    """Return the place of the first item of each id in all processes, and what is wrong with the ids. *Collective*."""
    [ids] = encode_ids("EmbeddingStore", {"ids": named.ids}, processes)
    [labels], _ = encode("EmbeddingStore", {"labels": named.labels}, processes)
    everyone = [part for part in processes.gather((places, ids, labels, named.sketch)) if len(part[0])]
    if not everyone:
        return places, None
    all_places, all_ids, all_labels, all_sketches = (torch.cat(parts) for parts in zip(*everyone, strict=True))
    order = all_places.argsort()
    note = note_on_ids(all_ids[order], all_labels[order], all_sketches[order])
    return all_places[order][first_of_each(all_ids[order])], note


def read_ids(ids: Any, items: int, call: str = "EmbeddingStore", name: str = "ids") -> Labels:
    """Return ids or groups on the CPU; what else is in a list, such as a path, is the word that it is printed as."""
    if isinstance(ids, list | tuple) and not all(isinstance(entry, WHOLE) for entry in ids):
        ids = list(map(str, ids))
    return _copied(read_labels(ids, items, name, "embeddings", call))


def _copied(labels: Labels) -> Labels:
    """Return labels that nobody else can change."""
    return Labels(labels.values.clone()) if isinstance(labels.values, Tensor) else labels


def _to_host_labels(labels: Labels) -> Labels:
    return Labels(_to_host(labels.values)) if isinstance(labels.values, Tensor) else labels


def _to_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
