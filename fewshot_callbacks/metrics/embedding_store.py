"""Reads the batches of an epoch, collects their embeddings, and gathers them from all processes.

A store owns copies of all batches until it is cleared or dropped. Nothing travels between processes before `shard` or
`gather`, which every process must call.
"""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
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
from fewshot_callbacks.functional._reading import as_floats, as_tensor, default_mode, matrix_from, needs, tensor_code
from fewshot_callbacks.functional._repeated import first_of_each, note_on_ids, sketches
from fewshot_callbacks.functional.class_subset import class_subset
from fewshot_callbacks.system.words import counted

# Types of integers in a list of ids; a tensor or array in it holds one integer.
INTEGERS = (int, np.integer, Tensor, np.ndarray)


def gather_tensors(tensor: Tensor, group: Any | None = None) -> list[Tensor]:
    """Gather the tensors of all processes, by rank, without empty ones: `dist_sync_fn` of `torchmetrics.Metric`.

    Unlike the function of torchmetrics, it accepts a process without a single batch, whose state has no shape and no
    dtype yet, and tensors on the CPU under a backend that supports only CUDA.
    """
    if group is None or group is torch.distributed.group.WORLD:
        group = cpu_group()
    by_rank: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(by_rank, tensor.detach().cpu(), group=group)
    dims = {rank: values.shape[1] for rank, values in enumerate(by_rank) if values.numel() and values.ndim == 2}
    if len(set(dims.values())) > 1:
        listed = ", ".join(f"{dim} in process {rank}" for rank, dim in dims.items())
        raise ValueError(f"embeddings have dimension {listed}. All must come from the same model.")
    gathered = [values.to(tensor.device) for values in by_rank if values.numel()]
    return gathered or [tensor]


def read_batch(
    embeddings: Any,
    labels: Any,
    method: str,
    form: str = "",
    dim: int | None = None,
    *,
    sets: bool = False,
    floats: bool = False,
) -> tuple[Tensor, Labels]:
    """Return a batch as (items, dim) embeddings and one label for each, on the devices where they are; see `as_labels`.

    Args:
        embeddings: An argument of a public method.
        labels: An argument of the same method.
        method: This method, for messages, such as `EmbeddingStore.append`.
        form: Form of the labels so far (see `Labels.form`); empty before the first.
        dim: Dimension of the embeddings so far; None before the first.
        sets: See `as_labels`.
        floats: Refuse embeddings that are no floating-point numbers.

    Raises:
        ValueError: If shapes or types do not fit each other or the batches before: integers where these were words,
            zeros and ones of other labels, and so on.
    """
    call = method.partition(".")[0]
    code = tensor_code("embeddings", embeddings)
    embeddings = as_tensor(embeddings, "embeddings", call)
    if embeddings.ndim != 2:
        raise ValueError(
            f"{needs(call)} embeddings of shape (items, dim); got shape {tuple(embeddings.shape)}. "
            f"{matrix_from(code, embeddings.ndim)}"
        )
    if floats and len(embeddings) and not embeddings.is_floating_point():
        fix = as_floats(code, embeddings.dtype)
        raise ValueError(f"{needs(call)} floating-point embeddings; got {embeddings.dtype}. {fix}")
    item_labels = labels_of_each(labels, len(embeddings), "labels", "embeddings", call, sets=sets)
    refuse_another_form(method, form, item_labels)
    if dim not in (None, embeddings.shape[1]):
        raise ValueError(
            f"{method}: the embeddings so far have dimension {dim}, those of this batch {embeddings.shape[1]}. Every batch "
            "must come from the same layer."
        )
    return embeddings, item_labels


def refuse_another_form(call: str, form: str, labels: Labels, name: str = "labels") -> None:
    """Refuse a batch of integers where earlier batches had strings, zeros and ones of other labels, and so on.

    Args:
        call: The public method, for messages.
        form: Form of the labels so far (see `Labels.form`); empty before the first.
        labels: Those of the batch. A batch without items is never refused.
        name: What messages call them: labels, ids or groups.

    Raises:
        ValueError: With both forms.
    """
    if form and len(labels):
        refuse_other_forms(call, {f"the {name} so far": form, "those of this batch": labels.form}, name)


@dataclass(frozen=True)
class _Columns:
    """Items without their embeddings."""

    labels: Labels
    # (items,) index of each item in this rank's pass over the data, in which items that are dropped later count, too
    positions: Tensor
    ids: Labels | None
    groups: Labels | None

    def rows(self, mask: Bool[Tensor, "items"]) -> _Columns:
        """Return the items that a mask selects."""
        return _Columns(self.labels[mask], self.positions[mask], _rows_of(self.ids, mask), _rows_of(self.groups, mask))


@dataclass(frozen=True)
class _Batch:
    embeddings: Tensor  # (items, dim), on the CPU; (0, dim) if the rows are in a file
    columns: _Columns


class Shard(NamedTuple):
    """The items of a set that one process holds; each item of the set is in exactly one process.

    `places` and `positions` are both indices of the items. They differ once items were dropped as repetitions:

        read by all processes   a  b  a  c
        positions               0  1     3   the dropped item has kept its number
        places                  0  1     2   no gaps: what `Share` takes
    """

    embeddings: Float[Tensor, "items dim"]
    labels: Labels
    """as they were given, for `evaluate_retrieval`; `labels.tolist()` lists them"""
    places: Int[Tensor, "items"]
    """index of each item among the items of all processes, without dropped items: for `Share`"""
    dropped: int
    """number of items of all processes that were dropped as repetitions"""
    positions: Int[Tensor, "items"]
    """index of each item in the pass of all processes over their data, in which dropped items count, too"""
    note: str | None = None
    """a warning if a dropped item differs from the first item of its id; None if none does"""
    groups: Labels | None = None
    """group of each item, as it was given; None if none were given"""
    ids: Labels | None = None
    """id of each item, as it was given; None if none were given"""

    @default_mode()
    def some_of_each_class(self, items: int, seed: int) -> Shard:
        """Draw at most this number of items of each class, from all in the order of the data set. *Collective*."""
        processes = all_processes()
        length = sum(processes.gather(len(self.labels)))
        [codes], _ = encode("Shard", {"labels": self.labels}, processes)
        all_labels = processes.placed(codes, self.places, length)
        drawn_places = class_subset(all_labels, None, items, seed).sort().values
        is_drawn = torch.isin(self.places, drawn_places)
        return self._replace(
            embeddings=self.embeddings[is_drawn],
            labels=self.labels[is_drawn],
            places=torch.searchsorted(drawn_places, self.places[is_drawn]),
            positions=self.positions[is_drawn],
            groups=_rows_of(self.groups, is_drawn),
            ids=_rows_of(self.ids, is_drawn),
        )


def rows_of_shard(
    shard: Shard,
    is_kept: Bool[Tensor, "items"],
    spill_to: str | os.PathLike[str] | None = None,
    call: str = "EmbeddingStore",
) -> Shard:
    """Return some items of a shard; their places count the items that all processes keep. *Collective*.

    Args:
        shard: The items of this process.
        is_kept: Whether each of them is kept.
        spill_to: A folder in which the rows of the new shard are written to a file, see `EmbeddingStore`; None keeps them in
            memory.
        call: See there.
    """
    processes = all_processes()
    positions = shard.positions[is_kept]
    all_positions = torch.cat(processes.gather(positions)).sort().values
    # An empty file cannot be mapped.
    if spill_to is None or not bool(is_kept.any()):
        embeddings = shard.embeddings[is_kept]
    else:
        embeddings = _rows_in_file(shard.embeddings, is_kept, spill_to, call)
    return Shard(
        embeddings,
        shard.labels[is_kept],
        torch.searchsorted(all_positions, positions),
        shard.dropped,
        positions,
        shard.note,
        _rows_of(shard.groups, is_kept),
        _rows_of(shard.ids, is_kept),
    )


class EmbeddingStore:
    """Collects embeddings and labels batch by batch on the CPU, and returns the whole set.

    It stores a detached copy in the dtype of the model (half precision stays half the size), never a view that would
    keep a larger tensor in memory. From a CUDA device, embeddings are copied through pinned memory without stalling the
    device, and the copy is read one batch later. The copies are freed by `clear`, or with the store.

    Args:
        spill_to: A folder: embeddings are written to a file in it, and read from there as they are needed. The file has no
            name, so that it vanishes with the store, and with the process however that ends.
        call: Name of this class, or of the callback that owns the store, for messages.

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

    def __init__(self, spill_to: str | os.PathLike[str] | None = None, call: str = "EmbeddingStore") -> None:
        self._folder = spill_to
        self._call = call
        self.clear()

    def clear(self) -> None:
        """Drop all stored items."""
        self._spilled = None if self._folder is None else _SpilledRows(self._folder, self._call)
        self._batches: list[_Batch] = []
        # batches in pinned memory, each with the event that its copy from the device is complete
        self._arriving: list[tuple[torch.cuda.Event, _Batch]] = []
        self._items = 0
        self._dim: int | None = None
        # form of the labels, ids and groups so far, by name (see `Labels.form`)
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
            positions: (items,) index of each item in this process's pass over its data, repeated items included; by
                default the next indices. Needed only if the items of one loader go to two stores. `Shard.positions` are
                the same indices over all processes, and `Shard.places` those without dropped items.
            ids: (items,) integers or strings that identify each item, so that repeated items can be dropped; in each
                batch, or in none.
            groups: (items,) integers or strings; items of one group are no candidates for each other; in each batch, or in
                none.

        Raises:
            ValueError: If the shapes do not fit each other or earlier batches, labels are neither integers nor strings,
                or labels, ids or groups have another form than those of earlier batches.
        """
        call = self._call
        # The user of a callback has called no method.
        method = f"{call}.append" if call == type(self).__name__ else call
        embeddings, item_labels = read_batch(embeddings, labels, method, self._form("labels"), self._dim, sets=True)
        columns = {"labels": item_labels}
        for name, argument in (("ids", ids), ("groups", groups)):
            if argument is not None:
                columns[name] = read_ids(argument, len(embeddings), call, name)
                refuse_another_form(method, self._form(name), columns[name], name)
        # Before the next copy begins: no more than two batches are in pinned memory.
        self._move_arrived(waiting=1)
        if positions is None:
            positions = torch.arange(self._items, self._items + len(embeddings))
        elif positions.shape != embeddings.shape[:1]:
            raise ValueError(
                f"{needs(call)} one position for each of the {counted(len(embeddings), 'embedding')}; got positions of "
                f"shape {tuple(positions.shape)}."
            )
        batch = _Batch(
            embeddings=_to_host(embeddings),
            columns=_Columns(
                labels=_to_host_labels(item_labels),
                positions=positions.to("cpu", copy=True),
                ids=columns.get("ids"),
                groups=columns.get("groups"),
            ),
        )
        if len(item_labels):
            self._forms |= {name: column.form for name, column in columns.items()}
        self._dim = embeddings.shape[1]
        self._items += len(embeddings)
        device = _cuda_device(embeddings, item_labels.values)
        if device is None:
            self._add(batch)
        else:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(device))
            self._arriving.append((arrived, batch))

    def _form(self, name: str) -> str:
        """Return the form of the labels, ids or groups of earlier batches; empty before the first item."""
        return self._forms.get(name, "")

    def _add(self, batch: _Batch) -> None:
        """Add a batch that is in ordinary memory; with a folder its rows go to the file."""
        if self._spilled is not None:
            self._spilled.append(batch.embeddings)
            batch = replace(batch, embeddings=batch.embeddings[:0].clone())
        self._batches.append(batch)

    def _move_arrived(self, waiting: int = 0) -> None:
        """Move batches from pinned into ordinary memory, the oldest first, until only `waiting` batches are pinned."""
        while len(self._arriving) > waiting:
            arrived, batch = self._arriving.pop(0)
            arrived.synchronize()
            columns = replace(batch.columns, labels=_copied(batch.columns.labels))
            self._add(_Batch(batch.embeddings.clone(), columns))

    @default_mode()
    def shard(self, dataset_size: int | None = None, part: tuple[int, int] | None = None) -> Shard:
        """Return the items of this process without repeated items. *Collective*.

        The shard is a copy: with the batches of the store it takes twice the memory of the embeddings, and no third time
        while it is made. Clear or drop the store to free the batches. With `spill_to` the rows of both are in files.

        Args:
            dataset_size: The number of items of the data set, if a `DistributedSampler` has distributed them. The i-th
                item of a rank is then item `i * ranks + rank` of the data set. The sampler repeats the first items to
                give all ranks the same number; these repetitions lie past the end and are dropped.
            part: Number of the part of the data set that this process has, and how many parts there are, where they are not
                the rank and the number of processes: the processes of a tensor-parallel group have the same part, and only
                one of them has stored it.

        Returns:
            The items of this process. If ids were given, only the first item of each id is kept. `places` are the indices
            of the items in the order of the data set without dropped items, `positions` those with them. If nothing is
            stored, all tensors are empty: (0, 0) and (0,).

        Raises:
            ValueError: In all processes, if some batches or some processes alone gave ids or groups, or if the processes
                were given different sizes of the data set.
        """
        self._move_arrived()
        processes = all_processes()
        calls = processes.gather(_Call.of(self._batches, dataset_size))
        refuse_different_calls(calls, self._call)

        columns = self._joined_columns()
        # A sampler deals items to the ranks in turn.
        number, parts = (processes.rank, processes.count) if part is None else part
        positions = columns.positions * parts + number
        is_kept = torch.ones(len(positions), dtype=torch.bool)
        if dataset_size is not None:
            is_kept &= positions < dataset_size
        note = None
        if any(True in call.ids for call in calls):
            items = _Items(columns, positions, self._sketches())
            first_positions, note = _first_positions(processes, items, is_kept, self._call)
            is_kept &= torch.isin(positions, first_positions)

        kept_positions = positions[is_kept]
        all_positions = torch.cat(processes.gather(kept_positions)).sort().values
        kept_columns = columns.rows(is_kept)
        return Shard(
            embeddings=self._embeddings(is_kept),
            labels=kept_columns.labels,
            places=torch.searchsorted(all_positions, kept_positions),
            dropped=sum(call.items for call in calls) - len(all_positions),
            positions=kept_positions,
            note=note,
            groups=kept_columns.groups,
            ids=kept_columns.ids,
        )

    def _joined_columns(self) -> _Columns:
        """Return the items of all batches without their embeddings."""
        batches = [batch.columns for batch in self._batches]
        # A batch without items says nothing of ids and groups.
        filled = [batch for batch in batches if len(batch.labels)]
        return _Columns(
            labels=join(self._call, [batch.labels for batch in batches]),
            positions=torch.cat([batch.positions for batch in batches] or [torch.empty(0, dtype=torch.int64)]),
            ids=_joined_column(self._call, "ids", [batch.ids for batch in filled]),
            groups=_joined_column(self._call, "groups", [batch.groups for batch in filled]),
        )

    def _embeddings(self, is_kept: Bool[Tensor, "items"]) -> Tensor:
        """Return the embeddings of the items that are kept, as a copy; rows in a file as a map of this or another file."""
        # An empty file cannot be mapped: without a row, the batches say the dim.
        if self._spilled is not None and bool(is_kept.any()):
            return self._spilled.rows() if bool(is_kept.all()) else self._spilled.kept_rows(is_kept)
        batches = [batch.embeddings for batch in self._batches] or [torch.empty(0, 0)]
        if bool(is_kept.all()):
            return torch.cat(batches)
        dtype = reduce(torch.promote_types, (embeddings.dtype for embeddings in batches))
        result = torch.empty(int(is_kept.sum()), batches[0].shape[1], dtype=dtype)
        # One batch at a time: all batches joined, and then without the dropped items, would be a third copy of the set.
        item = 0
        row = 0
        for embeddings in batches:
            kept_rows = embeddings[is_kept[item : item + len(embeddings)]]
            result[row : row + len(kept_rows)] = kept_rows
            item += len(embeddings)
            row += len(kept_rows)
        return result

    def _sketches(self) -> Float[Tensor, "items numbers"]:
        """Return a sketch of each embedding, see `sketches`."""
        if self._spilled is not None and self._items:
            return sketches(self._spilled.rows())
        batches = [batch.embeddings for batch in self._batches] or [torch.empty(0, 0)]
        return torch.cat([sketches(embeddings) for embeddings in batches])

    @default_mode()
    def gather(self, dataset_size: int | None = None) -> tuple[Tensor, Tensor]:
        """Gather the items of all processes on every rank, in the order of the data set. *Collective*.

        Args:
            dataset_size: See `shard`.

        Returns:
            Embeddings (items, dim) and labels (items,); words are replaced by their indices in sorted order. If no rank
            has stored anything, both are empty: (0, 0) and (0,).
        """
        shard_here = self.shard(dataset_size)
        if process_count() == 1:
            return shard_here.embeddings, shard_here.labels.codes
        shards = gather_objects(shard_here)
        codes, _ = encode(self._call, {f"labels of process {rank}": shard.labels for rank, shard in enumerate(shards)})
        order = torch.cat([shard.places for shard in shards]).argsort()
        # A process without items does not know the dimension.
        embeddings = [shard.embeddings for shard in shards if len(shard.embeddings)] or [shards[0].embeddings]
        return torch.cat(embeddings)[order], torch.cat(codes)[order]


class _SpilledRows:
    """Rows in a file without a name, in the type of the first batch. The file is closed, and so freed, with this object."""

    def __init__(self, folder: str | os.PathLike[str], call: str) -> None:
        self._folder = folder
        self._call = call
        self._count = 0
        self._dim = 0
        self._dtype: torch.dtype | None = None
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the rows
        except OSError as error:
            raise ValueError(
                f"{call}: spill_to={os.fspath(folder)!r} cannot be written to: {error.strerror}. Pass a folder on a disk "
                "with room for the embeddings of a validation."
            ) from error
        weakref.finalize(self, self._file.close)

    def append(self, rows: Tensor) -> None:
        """Write rows behind those that are in the file."""
        self._dtype = self._dtype or rows.dtype
        self._count += len(rows)
        self._dim = rows.shape[1]
        try:
            self._file.write(rows.to(self._dtype).contiguous().view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            raise ValueError(
                f"{self._call}: the embeddings could not be written to spill_to={os.fspath(self._folder)!r}: "
                f"{error.strerror}. Make room, or pass a folder on another disk."
            ) from error

    def rows(self) -> Tensor:
        """Map all rows into memory: the operating system caches what there is room for.

        The map stays valid when the file is closed.
        """
        assert self._dtype is not None
        file_bytes = np.memmap(self._file, np.uint8, "r+", shape=(self._count * self._dim * self._dtype.itemsize,))
        return torch.from_numpy(file_bytes).view(self._dtype).view(self._count, self._dim)

    def kept_rows(self, is_kept: Bool[Tensor, "items"]) -> Tensor:
        """Copy the rows that are kept to another file in the same folder, and map them into memory."""
        return _rows_in_file(self.rows(), is_kept, self._folder, self._call)


def _rows_in_file(rows: Tensor, is_kept: Bool[Tensor, "items"], folder: str | os.PathLike[str], call: str) -> Tensor:
    """Copy the rows that are kept, at least one, to a file in a folder, and map them into memory."""
    copy = _SpilledRows(folder, call)
    for block, is_kept_in_block in zip(rows.split(4096), is_kept.split(4096), strict=True):
        copy.append(block[is_kept_in_block])
    return copy.rows()


@dataclass(frozen=True)
class _Call:
    """The arguments of one process, to be compared with the arguments of the other processes."""

    items: int
    dataset_size: int | None
    # Whether batches with items had ids: (True,), (False,), both if the batches differ, or () without items.
    ids: tuple[bool, ...]
    # the same of groups
    groups: tuple[bool, ...]

    @classmethod
    def of(cls, batches: Sequence[_Batch], dataset_size: int | None) -> _Call:
        filled = [batch.columns for batch in batches if len(batch.columns.labels)]
        return cls(
            items=sum(len(batch.labels) for batch in filled),
            dataset_size=dataset_size,
            ids=tuple({batch.ids is not None for batch in filled}),
            groups=tuple({batch.groups is not None for batch in filled}),
        )


def refuse_different_calls(calls: Sequence[_Call], call: str) -> None:
    """Refuse ids, groups or sizes that only some batches or only some processes have.

    Args:
        calls: The arguments of each process, by rank; every process passes the same list.
        call: Name of the class, or of the callback that owns the store, for messages.

    Raises:
        ValueError: The same in every process.
    """
    has_several = len(calls) > 1
    which_batches = "each batch of every process" if has_several else "each batch"
    for name in ("ids", "groups"):
        fix = f"Pass them with {which_batches}, or with none."
        # A process without items has no part in the comparison.
        presence = {rank: getattr(call, name) for rank, call in enumerate(calls) if getattr(call, name)}
        mixed_ranks = [rank for rank, values in presence.items() if len(values) > 1]
        if mixed_ranks:
            batches = f"some batches of process {mixed_ranks[0]}" if has_several else "some batches"
            raise ValueError(f"{call}: {name} are given in {batches} alone. {fix}")
        words = {rank: "given" if values[0] else "left out" for rank, values in presence.items()}
        if len(set(words.values())) > 1:
            raise ValueError(f"{call}: {name} are {_two_that_differ(words)}. {fix}")
    sizes = {rank: str(call.dataset_size) for rank, call in enumerate(calls)}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{call}: dataset_size is {_two_that_differ(sizes)}. Pass the number of items of the whole data set in "
            "every process."
        )


def _two_that_differ(words: dict[int, str]) -> str:
    """Return the word of the first process beside the first other word, each with its rank; `words` is by rank."""
    first_rank = next(iter(words))
    other_rank = next(rank for rank, word in words.items() if word != words[first_rank])
    return f"{words[first_rank]} in process {first_rank}, {words[other_rank]} in process {other_rank}"


def _joined_column(call: str, name: str, batches: Sequence[Labels | None]) -> Labels | None:
    """Return the ids or groups of all batches; None if no batch has any."""
    columns = [batch for batch in batches if batch is not None]
    return join(call, columns, name) if columns else None


def _rows_of(column: Labels | None, is_kept: Bool[Tensor, "items"]) -> Labels | None:
    """Return the ids or groups of the items that are kept; None if there are none."""
    return None if column is None else column[is_kept]


class _Items(NamedTuple):
    """Items of one process, as they are compared with the items of others."""

    columns: _Columns
    # index of each item in the pass of all processes
    positions: Int[Tensor, "items"]
    # see `sketches`
    sketches: Float[Tensor, "items numbers"]


def _first_positions(
    processes: Processes, items: _Items, is_kept: Bool[Tensor, "items"], call: str
) -> tuple[Int[Tensor, "first"], str | None]:
    """Return the position of the first item of each id in all processes, and a note on ids of different items. *Collective*.

    Args:
        processes: All processes.
        items: The items of this process. Without items it may have no ids.
        is_kept: Whether each item takes part.
        call: Name of the class, or of the callback that owns the store, for messages.
    """
    ids = no_labels() if items.columns.ids is None else items.columns.ids
    [id_codes] = encode_ids(call, {"ids": ids[is_kept]}, processes)
    [label_codes], _ = encode(call, {"labels": items.columns.labels[is_kept]}, processes)
    # All rows would be too much to send: sketches tell whether items of one id have different embeddings.
    columns = (items.positions[is_kept], id_codes, label_codes, items.sketches[is_kept])
    by_rank = [columns for columns in processes.gather(columns) if len(columns[0])]
    if not by_rank:
        return items.positions[is_kept], None
    all_positions, all_ids, all_labels, all_sketches = (torch.cat(tensors) for tensors in zip(*by_rank, strict=True))
    order = all_positions.argsort()
    note = note_on_ids(all_ids[order], all_labels[order], all_sketches[order])
    return all_positions[order][first_of_each(all_ids[order])], note


def read_ids(ids: Any, items: int, call: str = "EmbeddingStore", name: str = "ids") -> Labels:
    """Return ids or groups on the CPU: integers or strings; other entries of a list, such as paths, become strings."""
    if isinstance(ids, list | tuple) and not all(isinstance(entry, INTEGERS) for entry in ids):
        ids = list(map(str, ids))
    return _copied(read_labels(ids, items, name, "embeddings", call))


def first_rows(embeddings: Tensor, labels: Labels, ids: Labels, call: str) -> Int[Tensor, "first"]:
    """Return the index of the first item of each id; warn of dropped items that differ from it in embedding or label."""
    codes = ids.codes
    note = note_on_ids(codes, labels.codes, sketches(embeddings.cpu()))
    if note is not None:
        warnings.warn(f"{call}: {note}", stacklevel=3)
    return first_of_each(codes)


def _copied(labels: Labels) -> Labels:
    """Return labels that nobody else can change; only tensors can be changed in place."""
    return Labels(labels.values.clone()) if isinstance(labels.values, Tensor) else labels


def _cuda_device(*columns: Any) -> torch.device | None:
    """Return the device of the first tensor that is on a CUDA device; None if none is."""
    devices = (column.device for column in columns if isinstance(column, Tensor))
    return next((device for device in devices if device.type == "cuda"), None)


def _to_host_labels(labels: Labels) -> Labels:
    """Return labels on the CPU, see `_to_host`."""
    return Labels(_to_host(labels.values)) if isinstance(labels.values, Tensor) else labels


def _to_host(tensor: Tensor) -> Tensor:
    """Return a detached copy on the CPU. From a CUDA device it is in pinned memory, and complete only after an event."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
