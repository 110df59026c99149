"""Reads the items of a call: arrays or files, with labels, ids, groups and other columns."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes, presence
from fewshot_callbacks.engine.scale import check_similarity
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._arrow import without_arrow
from fewshot_callbacks.functional._labels import Labels, check_labels, encode, encode_ids, hashes_of_labels, read_labels
from fewshot_callbacks.functional._reading import (
    as_tensor,
    check_matrix,
    computable,
    non_finite_rows,
    refuse_non_finite,
    signs,
    tensor_code,
)
from fewshot_callbacks.functional._repeated import SKETCH, first_of_each, hashes_of, note_on_ids, sketches
from fewshot_callbacks.functional.items import EVERYTHING, EXCLUDING, GROUPING, KINDS, Items, ItemSets, Share, places_of
from fewshot_callbacks.settings import Similarity
from fewshot_callbacks.storage import RowSubset, Shards
from fewshot_callbacks.storage.stored_rows import StoredRows, is_read_by_slices, rows_of
from fewshot_callbacks.system.words import counted, verb

# Rows in files are loaded if, as float32, they take at most this share of the budget.
LOADED_SHARE = 0.25
# A gallery in memory is converted as a whole if, as float32, it takes at most this share of the budget. A larger gallery is
# converted in chunks, each chunk once for all queries.
COPIED_SHARE = 0.8
# The arguments that are columns, in the order in which they are read.
_COLUMNS = tuple(f"{prefix}_{kind}" for kind in KINDS for prefix in ("query", "gallery"))


class Takes(NamedTuple):
    """The arguments in which functions differ.

    All functions take files, shares, ids and groups, except that `embedding_health` does not take groups.
    """

    labels: bool = True
    """whether the function needs labels; otherwise they are optional"""
    label_sets: bool = False
    """whether an item may have several labels"""
    query_ids_alone: bool = False
    """whether the queries may have ids if the gallery has none; the first query of each id counts"""
    notes: bool = True
    """whether the result has notes on ids and copies, which need checks of ids and hashes of rows"""
    one_set: bool = False
    """whether the arguments are `embeddings`, `labels`, `ids` and `groups`, instead of queries and gallery"""
    excludes: bool = True
    """whether ids and groups exclude candidates, so that both sets need them"""
    needs_gallery: bool = False
    """whether a gallery is required"""
    second: str = "gallery"
    """name of the second set, with which its columns begin"""
    id_hashes: bool = False
    """whether the result has a digest of the ids, from the column `id_hashes`"""

    def argument(self, name: str) -> str:
        """Return the user's name of an argument such as `queries` or `query_ids`."""
        if not self.one_set:
            return name.replace("gallery", self.second).replace("query_slices", "slices")  # only queries have slices
        return "embeddings" if name == "queries" else name.removeprefix("query_")


TAKES = {
    "embedding_health": Takes(labels=False, notes=False, one_set=True, excludes=False),
    "evaluate_identification": Takes(),
    "evaluate_retrieval": Takes(label_sets=True, id_hashes=True),
    "grouped_recall": Takes(),
    "knn_accuracy": Takes(query_ids_alone=True),
    "leakage": Takes(labels=False, notes=False, excludes=False, needs_gallery=True, second="train"),
    "linear_probe": Takes(excludes=False, needs_gallery=True),
    "near_duplicates": Takes(labels=False, notes=False),
    "nearest": Takes(labels=False, notes=False),
    "search_quality": Takes(labels=False, notes=False),
    "suspects": Takes(notes=False, one_set=True),
}


def read_items(
    call: str,
    queries: Any,
    gallery: Any,
    columns: Mapping[str, Any],
    *,
    share: Share = EVERYTHING,
    similarity: Similarity = "cosine",
    memory: float = math.inf,
    labelled: bool = True,
    choose: Callable[[int], Int[Tensor, "chosen"]] | None = None,
) -> ItemSets:
    """Return the queries and the gallery of a call, with the first item of each id. *Collective*.

    Arguments are for this process, and `queries` may be files. A column is None if it was not passed, in all processes
    or in none. Rows stay in their files if they would take much of `memory`, in bytes. Labels are not read if
    judgements define the relevant items. `choose` returns the queries to search for, given the number of all queries;
    None chooses the first query of each id.
    """
    check_similarity(similarity)
    takes = TAKES.get(call, Takes())
    if not labelled:
        takes = takes._replace(labels=False)
    processes = share.processes
    passed = {name for name, values in columns.items() if values is not None}
    queries, gallery, columns = with_stored_arrays(call, queries, gallery, columns, labelled=labelled, takes=takes)
    # All processes read columns in the same order. (Columns from files are in another order than arguments.)
    columns = {name: columns[name] for name in dict.fromkeys((*_COLUMNS, *sorted(columns))) if name in columns}
    present = {"gallery": presence(gallery), **{name: presence(columns.get(name)) for name in _COLUMNS}}
    processes.refuse_other_calls(call, {takes.argument(name): value for name, value in present.items()})
    _refuse_lone(call, gallery is None, columns, passed, takes, labelled=labelled)
    reader = _Reader(call, processes, memory, as_codes=similarity == "hamming", with_hashes=takes.notes)
    sides = {"query": reader.read(takes.argument("queries"), queries, share.query_places)}
    if gallery is None:
        sides["query"] = _stored_in_all(processes, sides["query"], memory)
    else:
        sides["gallery"] = reader.read(takes.second, gallery, share.gallery_places, is_gallery=True)
        _check_dims(call, takes, *(side.rows.shape[1] for side in sides.values()), as_codes=reader.as_codes)
    sides, names = reader.with_columns(sides, columns, takes)
    notes = _notes_on_ids(processes, sides) if takes.notes and "labels" in sides["query"].columns else []
    self_match = None if gallery is not None else torch.arange(sides["query"].length)
    sets = ItemSets(
        *_of_one_type(sides["query"], sides.get("gallery")),
        self_match,
        similarity,
        processes,
        memory,
        names,
        tuple(notes),
    )
    return _counted(sets, None if choose is None else choose(sets.queries.length).unique())


def _stored_in_all(processes: Processes, items: Items, memory: float) -> Items:
    """Return the items of one set, whose rows are in memory in every process or in none. *Collective*.

    A set is only compared with itself as one set if it is in memory, and all processes must compare in the same way. Some
    processes may have files while others have rows in memory or no rows.
    """
    is_stored = isinstance(items.rows, StoredRows)
    is_stored_somewhere = any(processes.gather(is_stored))
    if is_stored or not is_stored_somewhere:
        return items
    return replace(items, rows=StoredRows(items.rows, memory))


def _counted(sets: ItemSets, chosen: Int[Tensor, "chosen"] | None) -> ItemSets:
    """Return the sets with the first gallery item of each id, and the first query of each id or the chosen queries."""
    queries = sets.queries
    gallery = sets.gallery
    first_items = _first_of_repeated(gallery)
    counted_gallery = gallery if first_items is None else gallery.take(first_items, sets.memory)
    if chosen is not None:
        counted_queries = queries.take(chosen, None)
    elif sets.same_set:
        counted_queries = counted_gallery
    else:
        first_queries = _first_of_repeated(queries)
        counted_queries = queries if first_queries is None else queries.take(first_queries, sets.memory)
    if not sets.same_set:
        return replace(sets, queries=counted_queries, gallery=counted_gallery)
    self_match = torch.arange(counted_queries.length) if chosen is None else chosen
    if chosen is not None and "ids" in queries.columns:
        self_match = places_of(counted_queries.columns["ids"], counted_gallery.columns["ids"])
    # Ids are now unique within one set, so they only exclude the query itself.
    return replace(
        sets, queries=counted_queries.without("ids"), gallery=counted_gallery.without("ids"), self_match=self_match
    )


def _first_of_repeated(items: Items) -> Int[Tensor, "counted"] | None:
    """Return the place of the first item of each id; None if no id is repeated, or if there are no ids."""
    if "ids" not in items.columns:
        return None
    first = first_of_each(items.columns["ids"])
    return None if len(first) == items.length else first


def _refuse_lone(
    call: str, is_one_set: bool, columns: Mapping[str, Any], passed: Set[str], takes: Takes, *, labelled: bool
) -> None:
    """Refuse a column that only one of two sets has, and a gallery column without a gallery.

    Ids in the files of only one set are accepted. Each of its ids counts once, and nothing is excluded.
    """
    if takes.needs_gallery and is_one_set:
        raise InputError(
            f"{call}: gallery is missing. Pass gallery= and gallery_labels=, or Shards(..., is_gallery=...) as queries."
        )
    present = columns.keys()
    has_query_labels = "query_labels" in present
    has_gallery_labels = "gallery_labels" in present
    if takes.labels and has_gallery_labels == is_one_set:
        fact = "gallery_labels without gallery" if is_one_set else "gallery without gallery_labels"
        or_neither = "" if takes.needs_gallery else ", or neither for leave-one-out"
        raise InputError(f"{call}: {fact}. Pass both gallery and gallery_labels{or_neither}.")
    if labelled and not takes.labels and has_gallery_labels != (has_query_labels and not is_one_set):
        raise InputError(
            f"{call}: query_labels, gallery and gallery_labels do not fit together. With a gallery, pass both query_labels "
            "and gallery_labels, or neither. Without a gallery, only pass query_labels."
        )
    for kind in EXCLUDING:
        has_query = f"query_{kind}" in present
        has_gallery = f"gallery_{kind}" in present
        if is_one_set and has_gallery:
            raise InputError(
                f"{call}: gallery_{kind} without a gallery. Only pass query_{kind}=, which belongs to all items of one "
                "set, or pass the gallery, too."
            )
        if not takes.excludes:
            continue
        may_be_alone = is_one_set or (kind == "ids" and takes.query_ids_alone)
        are_in_files = kind == "ids" and not {"query_ids", "gallery_ids"} & passed
        if has_query != has_gallery and not are_in_files and not (has_query and may_be_alone):
            raise InputError(f"{call}: query_{kind} and gallery_{kind} belong together. Pass both, or neither.")


def _notes_on_ids(processes: Processes, sides: Mapping[str, Items]) -> list[str]:
    """Return notes on ids that different items share. *Collective*."""
    notes = []
    queries = sides["query"]
    gallery = sides.get("gallery")
    if gallery is not None and "ids" in queries.columns and "ids" in gallery.columns:
        notes += _notes_on_ids_of_both(queries.labels, gallery.labels, queries.columns["ids"], gallery.columns["ids"])
    for prefix, items in sides.items():
        if _first_of_repeated(items) is not None:
            sketch = sketches(items.rows) if len(items.places) else torch.empty(0, SKETCH, dtype=torch.float64)
            sketch_of_all = items.of_all(processes, sketch.T.contiguous()).T
            note = note_on_ids(items.columns["ids"], items.labels, sketch_of_all)
            beginning = "" if gallery is None else f"{prefix}_ids: "
            notes += [] if note is None else [f"{beginning}{note}"]
    return notes


def _notes_on_ids_of_both(
    query_labels: Tensor, gallery_labels: Tensor, query_ids: Tensor, gallery_ids: Tensor
) -> list[str]:
    """Return a note on ids that a query and a gallery item share although their labels differ.

    Their embeddings may differ, because the two may come from different models.
    """
    ordered, order = gallery_ids.sort(stable=True)
    position = torch.searchsorted(ordered, query_ids).clamp(max=len(ordered) - 1)
    is_in_gallery = ordered[position] == query_ids
    differing = int((is_in_gallery & (query_labels != gallery_labels[order[position]])).sum())
    if not differing:
        return []
    named = verb(differing, "belongs to a query and a gallery item", "belong to queries and gallery items")
    return [
        f"{counted(differing, 'id')} {named} with different labels, which cannot be the same item, and no such item is a "
        "candidate for its query. Pass ids that identify an item in both sets, such as file paths, or no ids if no "
        "query is in the gallery."
    ]


@dataclass(frozen=True)
class _Reader:
    """Reads and checks the part of each set that this process has."""

    # the public function, for messages
    call: str
    processes: Processes
    # budget in bytes
    memory: float
    # whether rows are binary codes
    as_codes: bool
    # whether rows are hashed while they are read
    with_hashes: bool

    def read(self, name: str, array: Any, places: Any, *, is_gallery: bool = False) -> Items:
        """Return the queries or the gallery, without columns. *Collective*.

        `places` is None if the rows of each process follow the rows of the process before.
        """
        rows = self._rows(name, without_arrow(array, name, self.call), is_gallery=is_gallery)
        items = len(rows) if rows.ndim else 0
        if items or self.processes.count == 1:  # one of several processes may have no rows
            code = name if self.as_codes and hasattr(array, "__array__") else tensor_code(name, array)
            rows = self._checked(name, rows, code)
        dim = rows.shape[1] if rows.ndim == 2 else 0
        sizes, rows = self._of_one_kind(name, rows, items, dim)
        if places is None:
            first = sum(sizes[: self.processes.rank])
            places = torch.arange(first, first + items)
        else:
            places = check_labels(places, items, "places", name, self.call)
            check_places(self.call, name, torch.cat(self.processes.gather(places)))
        non_finite, hashes = self._checked_rows(rows)
        location = ""
        if len(non_finite) and isinstance(array, Shards | RowSubset):
            location = f", which is {array.where(int(non_finite[0]))}"
        length = sum(sizes)
        non_finite_of_all = torch.cat(self.processes.gather(places[non_finite])).sort().values
        refuse_non_finite(non_finite_of_all, length, name, self.call, location, tensor_code(name, array))
        return Items(rows, places, length, given=length, hashes=hashes)

    def with_columns(
        self, sides: Mapping[str, Items], columns: Mapping[str, Any], takes: Takes
    ) -> tuple[dict[str, Items], tuple[Any, ...] | None]:
        """Return the sets with their columns, and the label of each label code. *Collective*.

        `sides` are the sets without columns, by the prefix of their arguments: `query` and `gallery`.
        """
        read: dict[str, dict[str, Labels]] = {}
        if takes.labels and "query_labels" not in columns:
            read_labels(
                None, 0, takes.argument("query_labels"), takes.argument("queries"), self.call
            )  # refuses the call
        for argument, values in columns.items():
            prefix, _, kind = argument.partition("_")
            items = len(sides[prefix].places)
            nouns = (
                "embeddings" if takes.one_set else _nouns(prefix, takes, as_codes=self.as_codes and kind == "labels")
            )
            has_sets = takes.label_sets and kind == "labels"
            labels = read_labels(values, items, takes.argument(argument), nouns, self.call, sets=has_sets)
            read.setdefault(kind, {})[argument] = labels
        names = None
        of_sides: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in sides}
        for kind, arguments in read.items():
            named = {takes.argument(argument): labels for argument, labels in arguments.items()}
            if kind == "labels":
                codes, names = encode(self.call, named, self.processes)
            else:
                codes = encode_ids(self.call, named, self.processes)
            for argument, codes_of_rows in zip(arguments, codes, strict=True):
                prefix = argument.partition("_")[0]
                of_sides[prefix][kind] = sides[prefix].of_all(self.processes, codes_of_rows)
                if kind == "ids" and takes.id_hashes:
                    hashes = hashes_of_labels(arguments[argument])
                    of_sides[prefix]["id_hashes"] = sides[prefix].of_all(self.processes, hashes)
        return {prefix: items.with_columns(**of_sides[prefix]) for prefix, items in sides.items()}, names

    def _rows(self, name: str, array: Any, *, is_gallery: bool) -> Tensor | StoredRows:
        """Return rows in memory, or rows that stay in their files if they take much of the budget. *Collective*."""
        is_read = is_read_by_slices(array) and not self.as_codes
        rows = array
        if not is_read:
            rows = rows_of(array, slice(0, int(array.shape[0]))) if is_read_by_slices(array) else array
            rows = as_tensor(rows, name, self.call).cpu()
        in_memory = isinstance(array, Tensor) or type(array) is np.ndarray or not is_read
        # Queries in memory are copied in blocks anyway.
        may_stay = (is_gallery or not in_memory) and not self.as_codes and len(rows.shape) == 2
        size = 4.0 * math.prod(rows.shape) if may_stay else 0.0
        limit = (LOADED_SHARE if is_read else COPIED_SHARE) * self.memory
        stays = any(self.processes.gather(size > limit)) and size > 0
        if stays:
            return StoredRows(rows, self.memory) if is_read or rows.is_floating_point() else rows
        if is_read:
            stored = StoredRows(rows, self.memory)  # some arrays have no length
            return stored.read(slice(0, len(stored)))
        resident: Tensor = rows
        return resident

    def _checked(self, name: str, rows: Tensor | StoredRows, code: str) -> Tensor | StoredRows:
        """Return codes of -1 and +1, or vectors in a type that can be compared. Half precision becomes float32 in memory."""
        if self.as_codes:
            assert isinstance(rows, Tensor)
            return signs(rows, name, self.call, code)
        check_matrix(rows, name, self.call, code)
        return rows if isinstance(rows, StoredRows) else computable(rows)

    def _checked_rows(self, rows: Tensor | StoredRows) -> tuple[Int[Tensor, "bad"], NDArray[np.int64] | None]:
        """Return the indices of rows with NaN or Inf, and the hashes of rows if they had to be read; else None."""
        nothing = torch.empty(0, dtype=torch.int64)
        if not isinstance(rows, StoredRows):
            return nothing if self.as_codes else non_finite_rows(rows), None
        bad = [nothing]
        hashes = [np.empty(0, np.int64)]
        for chunk, values in rows.chunks():
            bad.append(chunk.start + non_finite_rows(values))
            if self.with_hashes:
                hashes.append(hashes_of(values, rows.dtype))
        return torch.cat(bad), np.concatenate(hashes) if self.with_hashes else None

    def _of_one_kind(
        self, name: str, rows: Tensor | StoredRows, items: int, dim: int
    ) -> tuple[list[int], Tensor | StoredRows]:
        """Return the number of items of each process, and the rows in a common type. *Collective*."""
        kinds = self.processes.gather((items, dim, rows.dtype))
        holders = {rank: kind for rank, kind in enumerate(kinds) if kind[0]}
        if not holders:
            raise InputError(
                f"{self.call}: {name} is empty (shape (0, {dim})) in every process. Pass at least one item."
            )
        dims = {rank: of_rank for rank, (_, of_rank, _) in holders.items()}
        refuse_other_dims(self.call, name, dims)
        sizes = [size for size, _, _ in kinds]
        if isinstance(rows, StoredRows):
            return sizes, rows
        dtype = functools.reduce(torch.promote_types, (of_rank for _, _, of_rank in holders.values()))
        if items:
            return sizes, rows.to(dtype)
        return sizes, torch.empty(0, next(iter(dims.values())), dtype=dtype)


def _of_one_type(queries: Items, gallery: Items | None) -> tuple[Items, Items]:
    """Return queries and gallery in a common type if both are in memory. Without a gallery, the queries are the gallery."""
    if gallery is None:
        return queries, queries
    if isinstance(queries.rows, StoredRows) or isinstance(gallery.rows, StoredRows):
        return queries, gallery
    common = torch.promote_types(queries.rows.dtype, gallery.rows.dtype)
    return replace(queries, rows=queries.rows.to(common)), replace(gallery, rows=gallery.rows.to(common))


def _nouns(prefix: str, takes: Takes, *, as_codes: bool) -> str:
    """Return the noun for the items of one side in messages."""
    if prefix == "gallery":
        return f"{takes.second} codes" if as_codes else f"{takes.second} items"
    return "query codes" if as_codes else "queries"


def _check_dims(call: str, takes: Takes, queries: int, gallery: int, *, as_codes: bool) -> None:
    if queries != gallery:
        second = "the gallery" if takes.second == "gallery" else takes.second
        fact = f"queries have dimension {queries}, {second} has {gallery}"
        if as_codes:
            fact = f"the codes of the queries have {queries} bits, {second} has {gallery} bits"
        raise InputError(f"{call}: {fact}. Pass embeddings of the same model.")


def refuse_other_dims(call: str, name: str, dims: Mapping[int, int]) -> None:
    """Refuse vectors of different dimensions, given rank -> dimension of each process with items."""
    first, dim = next(iter(dims.items()))
    for rank, dim_of_rank in dims.items():
        if dim_of_rank != dim:
            raise InputError(
                f"{call}: {name} have dimension {dim} in process {first}, but {dim_of_rank} in process {rank}. Pass "
                "embeddings of the same model in all processes."
            )


def check_places(call: str, name: str, places: Int[Tensor, "items"]) -> None:
    """Refuse places that are not 0, 1, 2, ..., each once."""
    if not torch.equal(places.sort().values, torch.arange(len(places))):
        raise InputError(
            f"{call}: the places of {name} must be 0 to {len(places) - 1}, each once over all processes. Number only "
            "the rows that you pass."
        )


def with_stored_arrays(
    call: str, queries: Any, gallery: Any, arrays: Mapping[str, Any], *, labelled: bool, takes: Takes | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return queries, gallery, and their labels, ids and groups. Arguments take precedence over files.

    Labels in the files of only one of two sets are left out if the function does not need labels.

    `queries` may be `Shards` with `is_gallery`, which are divided into queries and gallery. `arrays` are labels, ids
    and groups by argument name, such as `query_ids`; None for arguments that were not passed.
    """
    passed = {name: array for name, array in arrays.items() if array is not None}
    if isinstance(queries, Shards) and queries.is_gallery is not None and gallery is None:
        shards = queries
        is_gallery = queries.is_gallery
        queries = RowSubset(shards, ~is_gallery)
        gallery = RowSubset(shards, is_gallery)
    merged = dict(passed)
    for prefix, rows in (("query", queries), ("gallery", gallery)):
        if isinstance(rows, Shards | RowSubset):
            stored = {f"{prefix}_{kind}": getattr(rows, kind) for kind in KINDS if labelled or kind != "labels"}
            merged = {name: column for name, column in stored.items() if column is not None} | merged
    if gallery is not None and (takes is None or takes.excludes):
        for kind in GROUPING:
            _refuse_groups_of_one(call, kind, merged, passed)
        if takes is not None and not takes.labels:
            pair = {"query_labels", "gallery_labels"}
            if not pair & passed.keys() and not pair <= merged.keys():
                merged = {name: array for name, array in merged.items() if name not in pair}
    return queries, gallery, merged


def _refuse_groups_of_one(call: str, kind: str, merged: Mapping[str, Any], passed: Mapping[str, Any]) -> None:
    """Refuse groups in the files of one of two sets if the other set has none."""
    prefixes = {"query", "gallery"}
    with_groups = {prefix for prefix in prefixes if merged.get(f"{prefix}_{kind}") is not None}
    if len(with_groups) != 1:
        return
    [grouped] = with_groups
    [other_prefix] = prefixes - with_groups
    if f"{grouped}_{kind}" not in passed:
        names = {"query": "queries", "gallery": "gallery"}
        raise InputError(
            f"{call}: only the files of the {names[grouped]} have {kind}, so these would not exclude anything. Pass "
            f"{kind}= to the Shards of both sets, or {other_prefix}_{kind}=."
        )
