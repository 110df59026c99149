"""Reads the batches of an epoch, collects their embeddings, and gathers them from all processes."""

from __future__ import annotations

import json
import math
import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from fewshot_callbacks.distributed.torch_distributed import all_processes, cpu_group, gather_objects, process_count
from fewshot_callbacks.functional._reading import (
    CodeBook,
    Labels,
    as_tensor,
    book_of,
    check_labels,
    default_mode,
    labels_of_each,
    merged_books,
    numbered,
)
from fewshot_callbacks.functional._repeated import first_of_each, note_on_ids, sketches
from fewshot_callbacks.functional.class_subset import class_subset


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


def as_state(book: CodeBook) -> UInt8[Tensor, "bytes"]:
    """Encode the words of a code book as bytes, which can be joined to those of other batches and processes."""
    return torch.frombuffer(bytearray(json.dumps(sorted(book.values())).encode() + b"\n"), dtype=torch.uint8)


def words_held(states: Sequence[Tensor] | Tensor) -> CodeBook | None:
    """Decode the code book of what `as_state` made, of one batch or joined; None where there is none."""
    joined = states if isinstance(states, Tensor) else torch.cat(list(states)) if states else torch.empty(0)
    if not joined.numel():
        return None
    lines = joined.cpu().numpy().tobytes().decode().splitlines()
    return book_of((word for line in lines for word in json.loads(line)), "words_held")


def read_batch(
    embeddings: Any, labels: Any, method: str, form: str = "", dim: int | None = None, *, sets: bool = False
) -> tuple[Tensor, Labels]:
    """Read a batch as (items, dim) embeddings and one label for each, on the devices where they are; see `as_labels`.

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


def refuse_another_form(call: str, form: str, labels: Labels) -> None:
    """Refuse a batch of integers where words were given before, zeros and ones of other labels, and so on.

    Raises:
        ValueError: With both forms.
    """
    if form and len(labels) and form != labels.form:
        raise ValueError(
            f"{call}: the labels so far are {form}, those of this batch {labels.form}. Pass the same kind in every batch."
        )


def refuse_other_codes(call: str, codes: Int[Tensor, "_"], book: CodeBook) -> None:
    """Refuse labels of which some are in the code book, and others are not: those of a process that was given integers.

    Raises:
        ValueError: If there are any.
    """
    if not bool(torch.isin(codes.cpu(), torch.tensor(list(book), device="cpu")).all()):
        raise ValueError(f"{call}: some labels are strings, others integers. Pass the same kind in every process.")


@dataclass(frozen=True)
class _Batch:
    embeddings: Tensor  # (items, dim), on the CPU
    labels: Tensor  # (items,)
    positions: Tensor  # (items,) place of each item in this rank's pass over the data
    ids: Tensor | None  # (items,) numbers that identify items
    groups: Tensor | None  # (items,) numbers; items of one number are no candidates for each other


class Shard(NamedTuple):
    """The part of a set that one process holds; each item of the set is in exactly one process."""

    embeddings: Float[Tensor, "items dim"]
    labels: Int[Tensor, "items"]
    places: Int[Tensor, "items"]
    """index of each item among those of all processes, for `Share`"""
    dropped: int
    """number of items of all processes that were dropped as repetitions"""
    words: CodeBook | None
    """the words of the labels of this process; None if labels are integers"""
    positions: Int[Tensor, "items"]
    """index of each item in the pass of all processes over their data, in which dropped items count, too"""
    note: str | None = None
    """what is wrong with the ids, where items were dropped that are not the one that was kept"""
    groups: Int[Tensor, "items"] | None = None
    """group of each item; None if none were given"""
    ids: Int[Tensor, "items"] | None = None
    """id of each item; None if none were given"""

    @property
    def named_labels(self) -> Labels:
        """The labels with their words, for `evaluate_retrieval`."""
        return Labels(self.labels, self.words)

    @default_mode()
    def some_of_each_class(self, items: int, seed: int) -> Shard:
        """Draw at most this number of items of each class, from all in the order of the data set. Collective."""
        processes = all_processes()
        length = sum(processes.gather(len(self.labels)))
        labels = processes.placed(self.labels, self.places, length)  # codes: their order does not matter here
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
        self._words: CodeBook | None = None
        self._form = ""

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
                or strings and integers are mixed.
        """
        call = "EmbeddingStore"
        embeddings, read = read_batch(embeddings, labels, f"{call}.append", self._form, self._dim, sets=True)
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
            labels=_to_host(read.codes),
            positions=positions.to("cpu", copy=True),
            ids=None if ids is None else id_numbers(ids, len(embeddings)),
            groups=None if groups is None else id_numbers(groups, len(embeddings), call, "groups"),
        )
        self._words, self._form = merged_books((self._words, read.words), call), read.form if len(read) else self._form
        self._dim = embeddings.shape[1]
        self._items += len(embeddings)
        if on_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(embeddings.device))
            self._arriving.append((arrived, batch))
        else:
            self._keep(batch)

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
            self._keep(replace(batch, embeddings=batch.embeddings.clone(), labels=batch.labels.clone()))

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
        nothing = torch.empty(0, dtype=torch.int64)
        labels = torch.cat([batch.labels for batch in self._batches] or [nothing])
        positions = torch.cat([batch.positions for batch in self._batches] or [nothing])
        processes = all_processes()
        places = positions * processes.count + processes.rank
        calls = processes.gather(_Call.of(self._batches, dataset_size))
        refuse_different_calls(calls)
        ids = _joined([batch.ids for batch in self._batches if len(batch.labels)])
        groups = _joined([batch.groups for batch in self._batches if len(batch.labels)])
        items = sum(call.items for call in calls)
        stays = torch.ones(len(places), dtype=torch.bool)
        if dataset_size is not None:
            stays &= places < dataset_size
        own = None if ids is None else _Named(ids[stays], labels[stays], sketches(embeddings)[stays])
        everyone, note = processes.gather((places[stays], own, len(labels))), None
        if items and all(named is not None for _, named, length in everyone if length):
            named = [(part, of_part) for part, of_part, _ in everyone if of_part is not None]
            order = torch.cat([part for part, _ in named]).argsort()
            all_items = _Named(
                *(torch.cat(parts)[order] for parts in zip(*(of_part for _, of_part in named), strict=True))
            )
            first = torch.cat([part for part, _ in named])[order][first_of_each(all_items.ids)]
            stays &= torch.isin(places, first)
            everyone, note = [(part, None, 0) for part in processes.gather(places[stays])], note_on_ids(*all_items)
        left = torch.cat([part for part, *_ in everyone]).sort().values
        if not bool(stays.all()):
            labels, places = labels[stays], places[stays]
            embeddings = embeddings[stays] if self._spilled is None else self._spilled.some(embeddings, stays)
            groups = None if groups is None else groups[stays]
            ids = None if ids is None else ids[stays]
        index = torch.searchsorted(left, places)
        return Shard(embeddings, labels, index, items - len(left), self._words, places, note, groups, ids)

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
            return mine.embeddings, mine.named_labels.numbered()[0]
        shards = gather_objects(mine)
        labels = numbered("EmbeddingStore", {f"labels of process {i}": s.named_labels for i, s in enumerate(shards)})[0]
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


def _joined(batches: Sequence[Tensor | None]) -> Tensor | None:
    """Join what all batches have, or none."""
    given = [batch for batch in batches if batch is not None]
    return torch.cat(given) if given else None


class _Named(NamedTuple):
    """The ids of some items, and what tells whether items of one id are the same item."""

    ids: Int[Tensor, "items"]
    labels: Int[Tensor, "items"]
    sketch: Float[Tensor, "items numbers"]


def id_numbers(ids: Any, items: int, call: str = "EmbeddingStore", name: str = "ids") -> Int[Tensor, "items"]:
    """Return ids as integers; what else is in a list, such as a path, counts as the word that it is printed as."""
    if isinstance(ids, list | tuple):
        whole = all(isinstance(one, int | np.integer | Tensor | np.ndarray) for one in ids)
        ids = ids if whole else list(map(str, ids))
    return check_labels(ids, items, name, "embeddings", call).clone()


def _to_host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
