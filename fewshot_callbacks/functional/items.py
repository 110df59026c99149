"""The items of a call: its queries and its gallery, which every function reads in one way.

    arrays, files -> read_items -> ItemSets -> vectors, rules, columns -> the computation of the function

Rows are vectors. Each process has its own rows, in memory or in files, and never the rows of all processes. Columns are
labels, ids, groups, and anything else that is known of each item. Every process has the columns of all items as codes: a
code takes 8 bytes, little compared with a vector. All functions take the same arguments, except for what `TAKES` says.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes, presence
from fewshot_callbacks.engine.chunks import gather_in_item_order
from fewshot_callbacks.engine.duplicates import first_duplicates
from fewshot_callbacks.engine.relevance import Ints, Lists, PairRelevance
from fewshot_callbacks.engine.scale import check_similarity
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._labels import Labels, check_labels, encode, encode_ids, read_labels
from fewshot_callbacks.functional._reading import (
    as_tensor,
    check_matrix,
    computable,
    non_finite_rows,
    refuse_non_finite,
    signs,
    tensor_code,
)
from fewshot_callbacks.functional._repeated import (
    SKETCH,
    Copies,
    HashedRows,
    count_equal_candidates,
    first_of_each,
    hashes_of,
    note_on_ids,
    sketches,
)
from fewshot_callbacks.settings import Similarity
from fewshot_callbacks.storage import RowSubset, Shards
from fewshot_callbacks.storage.stored_rows import StoredRows, as_one_tensor, is_read_by_slices, rows_of
from fewshot_callbacks.system.words import counted, verb

# Rows in files are loaded if, as float32, they take at most this share of the budget.
LOADED_SHARE = 0.25
# A gallery in memory is converted as a whole if, as float32, it takes at most this share of the budget. A larger one is
# converted in chunks, each of them once for all queries.
COPIED_SHARE = 0.8
# Columns that exclude: an item is not a candidate of a query with the same code.
EXCLUDING = ("ids", "groups")
# Those of them in which a query may share its code with several items. An id is the id of one item.
GROUPING = tuple(kind for kind in EXCLUDING if kind != "ids")
# All columns that arguments and files may have. Add a new kind here: processes compare which of these kinds they were given.
_KINDS = ("labels", *EXCLUDING)
# The arguments that are columns, in the order in which they are read.
_COLUMNS = tuple(f"{prefix}_{kind}" for kind in _KINDS for prefix in ("query", "gallery"))


class Takes(NamedTuple):
    """Which arguments a function takes, where functions differ.

    All functions take files, shares, ids and groups, but for `embedding_health`, which takes no groups.
    """

    labels: bool = True
    """whether the function needs labels; otherwise they may be left out"""
    label_sets: bool = False
    """whether an item may have several labels"""
    query_ids_alone: bool = False
    """whether the queries may have ids although the gallery has none; the first query of each id is counted"""
    notes: bool = True
    """whether the result has notes on ids and copies; only then are ids checked, and rows hashed while they are read"""
    one_set: bool = False
    """whether the arguments are `embeddings`, `labels`, `ids` and `groups` of one set, and no queries and gallery"""
    excludes: bool = True
    """whether ids and groups exclude candidates, so that both of two sets need them"""
    needs_gallery: bool = False
    """whether one set is not enough"""

    def argument(self, name: str) -> str:
        """Return the name of an argument such as `queries` or `query_ids` in messages."""
        if not self.one_set:
            return name
        return "embeddings" if name == "queries" else name.removeprefix("query_")


# Function -> the arguments that it takes.
TAKES = {
    "embedding_health": Takes(labels=False, notes=False, one_set=True, excludes=False),
    "evaluate_identification": Takes(),
    "evaluate_retrieval": Takes(label_sets=True),
    "grouped_recall": Takes(),
    "knn_accuracy": Takes(query_ids_alone=True),
    "linear_probe": Takes(excludes=False, needs_gallery=True),
    "near_duplicates": Takes(labels=False, notes=False),
    "nearest": Takes(labels=False, notes=False),
    "suspects": Takes(notes=False, one_set=True),
}


@dataclass(frozen=True, eq=False)
class Share:
    """Which share of the queries and of the gallery this process holds, where several make a call together.

    A share may be empty. Each process returns the report of the whole sets, the same as a single process would.
    Functions exchange the shares of the gallery in chunks, so that no process ever holds the whole gallery. Only
    `embedding_health` with `k` joins the rows of all in each process.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]])
        >>> shuffled = Share(query_places=[0, 2, 1])  # the second row is the last of the data set
        >>> evaluate_retrieval(points, [0, 1, 0], share=shuffled, metrics="mAP").query_labels
        tensor([0, 0, 1])
    """

    processes: Processes = ALONE
    """the processes that make the call together, see `metrics.TorchProcesses`"""
    query_places: Any | None = None
    """(queries,) index of each query among the queries that all processes pass, from 0 to their number - 1. It determines
    the order of `per_query` and the random draws. By default, the queries of each process follow the queries of the previous
    process. Rows that you left out yourself have no place; rows that repeat an id have one."""
    gallery_places: Any | None = None
    """(gallery,) index of each gallery item in the whole gallery"""

    def refuse_other_settings(self, call: str, settings: Mapping[str, object]) -> None:
        """Refuse processes that were called with other settings, or of which only some have places. *Collective*."""
        places = {"query_places": self.query_places, "gallery_places": self.gallery_places}
        present = {name: presence(array) for name, array in places.items()}
        self.processes.refuse_other_calls(call, {**settings, **present})


EVERYTHING = Share()


@dataclass(frozen=True, eq=False)
class Items:
    """The queries, or the gallery: the rows of this process, and the columns of all items.

    The place of an item is its index among the items of all processes. Inside the package, items are named by their places.
    `to_origins` turns places into indices of the caller. `take` numbers the places anew.
    """

    rows: Tensor | StoredRows
    """rows of this process: float32 or float64; binary codes are int8 of -1 and +1"""
    places: Int[Tensor, "rows"]
    """place of each row of this process; over all processes, each of 0 to length - 1 once"""
    length: int
    """number of items of all processes"""
    columns: Mapping[str, Int[Tensor, "items"]] = field(default_factory=dict)
    """name -> code of each item of all processes, by place; equal values of queries and gallery have equal codes"""
    origins: Int[Tensor, "items"] | None = None
    """index of each item among the items that the caller passed, ascending; None if no item was left out"""
    given: int = 0
    """number of items that the caller passed, in all processes"""
    hashes: Int[np.ndarray, "rows"] | None = None
    """hash of each row of this process, see `row_hashes`; None before they are computed"""

    @property
    def labels(self) -> Int[Tensor, "items"]:
        """Label code of each item of all processes, by place."""
        return self.columns["labels"]

    def of_rows(self, column: str) -> Int[Tensor, "rows"]:
        """Return the codes of the rows of this process in a column."""
        return self.columns[column][self.places]

    def of_all(self, processes: Processes, values: Shaped[Tensor, "*shape rows"]) -> Shaped[Tensor, "*shape items"]:
        """Return the values of the items of all processes, by place, given those of the rows of this one. *Collective*."""
        return processes.placed(values, self.places, self.length)

    def is_row_of(self, index: Int[Tensor, "chosen"]) -> Bool[Tensor, "rows"]:
        """Return whether each row of this process has one of these places."""
        return torch.isin(self.places, index)

    def take(self, index: Int[Tensor, "chosen"], memory: float | None) -> Items:
        """Return the items with these places. They are numbered anew: the first has place 0.

        Args:
            index: Places of the items, ascending.
            memory: Budget in bytes for rows that stay in their files; None to load them.
        """
        is_chosen = self.is_row_of(index)
        rows = self.rows
        if isinstance(rows, StoredRows) and memory is not None:
            rows = StoredRows(_ChosenRows(rows, is_chosen.numpy()), memory)
        else:
            rows = rows[is_chosen]
        return replace(
            self,
            rows=rows,
            places=torch.searchsorted(index, self.places[is_chosen]),
            length=len(index),
            columns={name: column[index] for name, column in self.columns.items()},
            origins=index if self.origins is None else self.origins[index],
            hashes=None if self.hashes is None else self.hashes[is_chosen.numpy()],
        )

    def with_columns(self, **columns: Int[Tensor, "items"]) -> Items:
        """Return the same items with more columns."""
        return replace(self, columns={**self.columns, **columns})

    def without(self, *names: str) -> Items:
        """Return the same items without some columns."""
        return replace(self, columns={name: codes for name, codes in self.columns.items() if name not in names})

    def to_origins(self, places: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return the indices of items among those that the caller passed, given their places; -1 stays -1."""
        return places if self.origins is None else torch.where(places >= 0, self.origins[places], -1)


class Rules(NamedTuple):
    """Which items are no candidates of the queries of this process, as the engine takes it.

    Items are numbered as in the engine: the first numbers are those of the items of this process, see `engine.chunks`.
    """

    places: Int[np.ndarray, "items"]
    """place of each item of all processes"""
    self_match: NDArray[np.int32]
    """(queries,) number of the item that each query is; -1 for none"""
    codes: list[tuple[Ints, Ints]]
    """codes of the queries and of the items, for each reason to exclude: a pair with equal codes is not compared"""


@dataclass(frozen=True, eq=False)
class ItemSets:
    """The queries and the gallery of a call, checked, without repeated ids, and ready to be compared. It never changes.

    With one set, the rows of the gallery are those of the queries, or the queries are some of them.
    """

    queries: Items
    gallery: Items
    self_match: Int[Tensor, "queries"] | None
    """with one set, the place in the gallery of each query of all processes, and -1 for none; None for two sets"""
    similarity: Similarity
    processes: Processes
    memory: float
    """budget in bytes"""
    label_names: tuple[Any, ...] | None = None
    """the string, or the set of labels, of each label code, ascending; None for labels that are integers"""
    notes_on_ids: tuple[str, ...] = ()
    """notes on ids that different items share"""

    @property
    def same_set(self) -> bool:
        """Whether the queries are items of the gallery."""
        return self.self_match is not None

    @property
    def is_one_set(self) -> bool:
        """Whether the queries are the whole gallery, in memory, so that each score serves both items of a pair."""
        has_same_rows = self.same_set and self.queries.rows is self.gallery.rows
        return has_same_rows and not isinstance(self.gallery.rows, StoredRows)

    @property
    def as_codes(self) -> bool:
        """Whether rows are binary codes."""
        return self.similarity == "hamming"

    # --------------------------------------------------------------------------------------- what the engine is given

    def vectors(self, threads: int) -> Vectors:
        """Return the queries and the gallery as they are compared. *Collective*."""
        gallery = None if self.is_one_set else self.gallery.rows
        hashes = (self.queries.hashes, self.gallery.hashes)
        rows = as_one_tensor(self.queries.rows)
        return Vectors.of(rows, gallery, self.similarity, threads=threads, processes=self.processes, hashes=hashes)

    def rules(self) -> Rules:
        """Return which items are no candidates of the queries of this process. *Collective*."""
        places = gather_in_item_order(self.processes, self.gallery.places.numpy())
        self_match = np.full(len(self.queries.places), -1, np.int32)
        if self.self_match is not None:
            number_of_place = np.empty(len(places), np.int32)
            number_of_place[places] = np.arange(len(places), dtype=np.int32)
            item = self.self_match[self.queries.places].numpy()
            self_match = np.where(item >= 0, number_of_place[item], np.int32(-1))
        codes = [
            (of_queries[self.queries.places.numpy()], of_items[places]) for of_queries, of_items in self.exclusions()
        ]
        return Rules(places, self_match, codes)

    def relevance_of_labels(self, rules: Rules) -> PairRelevance:
        """Return which items have the label of each query of this process, given which are no candidates."""
        lists = Lists.of_labels(self.queries.of_rows("labels").numpy(), self.gallery.labels.numpy()[rules.places])
        return PairRelevance(lists, rules.self_match, rules.codes, symmetric=self.is_one_set)

    def exclusions(self, *names: str) -> list[tuple[Ints, Ints]]:
        """Return the codes of all queries and of all gallery items, for each column that excludes and that both have.

        Args:
            *names: Some of these columns; all if there are none.
        """
        in_both = self.queries.columns.keys() & self.gallery.columns.keys()
        return [
            (self.queries.columns[name].numpy(), self.gallery.columns[name].numpy())
            for name in names or EXCLUDING
            if name in in_both
        ]

    # ------------------------------------------------------------------------------------------- candidates and copies

    def items_of_queries(self) -> Int[Tensor, "queries"]:
        """Return the place of the gallery item that each query is, in one set or by its id; -1 for none."""
        if self.self_match is not None:
            return self.self_match
        if not {"ids"} <= self.queries.columns.keys() & self.gallery.columns.keys():
            return torch.full((self.queries.length,), -1)
        return places_of(self.queries.columns["ids"], self.gallery.columns["ids"])

    def count_candidates_with(self, column: str) -> Int[np.ndarray, "queries"]:
        """Return how many candidates of each query have its code in a column."""
        of_queries = self.queries.columns[column].numpy()
        of_items = self.gallery.columns[column].numpy()
        groups = self.exclusions(*GROUPING)
        counts = count_equal_candidates([(of_queries, of_items)], groups)
        # Ids exclude one item at most: the query itself. If its group has excluded it as well, it is not subtracted twice.
        item = self.items_of_queries().numpy()
        is_counted = (item >= 0) & (of_items[item] == of_queries)
        for groups_of_queries, groups_of_items in groups:
            is_counted &= groups_of_items[item] != groups_of_queries
        candidates: Int[np.ndarray, "queries"] = counts - is_counted
        return candidates

    def hashed(self) -> ItemSets:
        """Return the same sets with the hash of each row, in the type in which rows are compared. *Collective*."""
        has_doubles = torch.float64 in (self.queries.rows.dtype, self.gallery.rows.dtype)
        dtype = torch.float64 if any(self.processes.gather(has_doubles)) else torch.float32
        if self.as_codes:
            dtype = torch.int8
        queries = _hashed(self.queries, dtype)
        if self.gallery.rows is self.queries.rows:
            return replace(self, queries=queries, gallery=replace(self.gallery, hashes=queries.hashes))
        return replace(self, queries=queries, gallery=_hashed(self.gallery, dtype))

    def copies(self) -> Copies:
        """Return the copies of each query among its candidates. The sets have hashes and labels. *Collective*."""
        queries = self._hashed_rows(self.queries)
        gallery = queries if self.is_one_set else self._hashed_rows(self.gallery)
        return Copies.among(
            queries,
            gallery,
            None if self.self_match is None else self.self_match.numpy(),
            self.exclusions(),
            (self.gallery.rows, self.gallery.places.numpy()),
            self.processes,
            as_codes=self.as_codes,
        )

    def _hashed_rows(self, items: Items) -> HashedRows:
        """Return the hashes and labels of all queries, or of all gallery items. *Collective*."""
        assert items.hashes is not None
        return HashedRows(items.of_all(self.processes, torch.from_numpy(items.hashes)).numpy(), items.labels.numpy())

    def notes_on_copies(self, copies: Copies | None, effect: str = "A copy is a perfect neighbour") -> list[str]:
        """Return the notes on ids that different items share, and on copies.

        Args:
            copies: See `copies`; None if they were not counted.
            effect: What copies do to the values.
        """
        notes = [*self.notes_on_ids]
        if copies is not None and copies.is_noted and copies.queries:
            notes.append(copies.note(effect, _CURES[self.same_set]))
        return notes

    # ------------------------------------------------------------------------------------------------ two sets as one

    def as_one_set(self) -> ItemSets:
        """Return two sets as one set, if that changes no rank; else the same sets. *Collective*.

        Both must have the same items in the same order, and ids or groups must exclude each item from its own candidates.
        With one set, each score serves both items of a pair.
        """
        exclusions = self.exclusions()
        queries = self.queries
        gallery = self.gallery
        if (
            self.same_set
            or not exclusions
            or isinstance(queries.rows, StoredRows)
            or isinstance(gallery.rows, StoredRows)
        ):
            return self
        if not torch.equal(queries.labels, gallery.labels):
            return self
        if not all(np.array_equal(of_queries, of_items) for of_queries, of_items in exclusions):
            return self
        differ = not torch.equal(queries.rows, gallery.rows) or not torch.equal(queries.places, gallery.places)
        if self.processes.largest([float(differ)])[0]:
            return self
        # A column in which no two items have the same code excludes nothing but the query itself.
        codes = {name: queries.columns[name] for name in EXCLUDING if name in queries.columns}
        queries = queries.without(*(name for name, code in codes.items() if len(code.unique()) == len(code)))
        return replace(self, queries=queries, gallery=queries, self_match=torch.arange(queries.length))


# Whether queries and gallery are one set -> what to do about items that come several times.
_CURES = {
    True: "pass query_ids= (ids of monitors, metrics and files), which names each item, and the first of each is counted "
    "(or drop what a sampler repeats before, as gather_for_metrics of Accelerate does)",
    False: "leave out the gallery if it holds the queries themselves, or pass query_ids= and gallery_ids= (ids "
    "of monitors, metrics and files), so that no query finds its own copy",
}


def _hashed(items: Items, dtype: torch.dtype) -> Items:
    """Return items with the hash of each row in a type. Rows from files may have hashes in their own type already."""
    is_known = items.hashes is not None and items.rows.dtype == dtype
    return items if is_known else replace(items, hashes=hashes_of(items.rows, dtype))


def first_equal_rows(items: Items) -> Int[np.ndarray, "rows"]:
    """Return, for each row of this process, the index of the first row that equals it bit for bit. The items have hashes.

    Rows in memory are compared. Rows in files with the same hash are read once more, for a second hash with other factors:
    two different rows have 128 equal bits with a probability of about 2^-120.
    """
    assert items.hashes is not None
    if isinstance(items.rows, Tensor):
        return first_duplicates(items.rows.contiguous().numpy(), 1, items.hashes)
    if len(np.unique(items.hashes)) == len(items.hashes):
        return np.arange(len(items.hashes))
    second_hashes = hashes_of(items.rows, items.rows.dtype, seed=1)
    both = np.stack([items.hashes, second_hashes], axis=1)
    _, first, number = np.unique(both, axis=0, return_index=True, return_inverse=True)
    equal: Int[np.ndarray, "rows"] = first[number.reshape(-1)]
    return equal


def places_of(ids: Int[Tensor, "queries"], distinct: Int[Tensor, "items"]) -> Int[Tensor, "queries"]:
    """Return the index of each id among distinct ids; -1 if it is not among them."""
    ordered, order = distinct.sort()
    position = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
    return torch.where(ordered[position] == ids, order[position], -1)


class _ChosenRows:
    """Some rows of an array, as an array.

    Args:
        rows: All rows.
        is_chosen: (rows,) whether each row is chosen.
    """

    def __init__(self, rows: StoredRows, is_chosen: Bool[np.ndarray, "rows"]) -> None:
        self._all = rows
        self._indices = np.flatnonzero(is_chosen)
        self.shape = (len(self._indices), rows.dim)
        self.dtype = rows.dtype

    def __getitem__(self, span: slice) -> Tensor:
        """Return neighbouring rows of those that are chosen. Rows between them are read, and dropped."""
        indices = self._indices[span]
        if not len(indices):
            return self._all.read(slice(0, 0))
        first = indices[0]
        return self._all.read(slice(first, indices[-1] + 1))[torch.from_numpy(indices - first)]


# ------------------------------------------------------------------------------------------------------------------ reading


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

    Args:
        call: The public function, for messages and for `TAKES`.
        queries: Queries of this process: an array, or files.
        gallery: Gallery items of this process; None for one set.
        columns: Labels, ids, groups and other columns of this process, by the name of the argument, such as `query_ids`;
            None where it was not given, in which all processes must agree.
        share: Which share of the sets this process holds.
        similarity: How queries and gallery will be compared.
        memory: Budget in bytes. Rows in files stay there if they take much of it.
        labelled: Whether labels are read. They are not if judgements say which items are relevant.
        choose: Function that returns the indices of the queries that are searched for, given the number of all queries; None
            for the first query of each id.

    Raises:
        ValueError: If a shape, type or size does not fit, rows hold NaN or Inf, or a set is empty; the same in every
            process.
    """
    check_similarity(similarity)
    takes = TAKES.get(call, Takes())
    if not labelled:
        takes = takes._replace(labels=False)
    processes = share.processes
    passed = {name for name, values in columns.items() if values is not None}
    queries, gallery, columns = with_stored_arrays(call, queries, gallery, columns, labelled=labelled, takes=takes)
    # All processes read columns in the same order. Columns from files come in another order than arguments.
    columns = {name: columns[name] for name in dict.fromkeys((*_COLUMNS, *sorted(columns))) if name in columns}
    present = {"gallery": presence(gallery), **{name: presence(columns.get(name)) for name in _COLUMNS}}
    processes.refuse_other_calls(call, {takes.argument(name): value for name, value in present.items()})
    _refuse_lone(call, gallery is None, columns, passed, takes, labelled=labelled)
    reader = _Reader(call, processes, memory, as_codes=similarity == "hamming", with_hashes=takes.notes)
    sides = {"query": reader.read(takes.argument("queries"), queries, share.query_places)}
    if gallery is None:
        sides["query"] = _stored_in_all(processes, sides["query"], memory)
    else:
        sides["gallery"] = reader.read("gallery", gallery, share.gallery_places)
        _check_dims(call, *(side.rows.shape[1] for side in sides.values()), as_codes=reader.as_codes)
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

    Only a set in memory is compared with itself as one set, and all processes must compare in the same way. Some of them may
    have no rows, or rows in memory, while the others have files.
    """
    is_stored = isinstance(items.rows, StoredRows)
    is_stored_somewhere = any(processes.gather(is_stored))
    if is_stored or not is_stored_somewhere:
        return items
    return replace(items, rows=StoredRows(items.rows, memory))


def _counted(sets: ItemSets, chosen: Int[Tensor, "chosen"] | None) -> ItemSets:
    """Return the first gallery item of each id, and the first query of each id or the queries that are chosen."""
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
    # The items of one set have different ids now. So ids exclude nothing but the query itself.
    return replace(
        sets, queries=counted_queries.without("ids"), gallery=counted_gallery.without("ids"), self_match=self_match
    )


def _first_of_repeated(items: Items) -> Int[Tensor, "counted"] | None:
    """Return the place of the first item of each id; None if no id repeats, or if there are no ids."""
    if "ids" not in items.columns:
        return None
    first = first_of_each(items.columns["ids"])
    return None if len(first) == items.length else first


def _refuse_lone(
    call: str, is_one_set: bool, columns: Mapping[str, Any], passed: Set[str], takes: Takes, *, labelled: bool
) -> None:
    """Refuse a column that only one of two sets has, and a column of a gallery that was not passed.

    Ids in the files of one of two sets are not refused. They count each of its items once, and exclude nothing.
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
        raise InputError(f"{call}: {fact}. gallery and gallery_labels belong together: pass both{or_neither}.")
    if labelled and not takes.labels and has_gallery_labels != (has_query_labels and not is_one_set):
        raise InputError(
            f"{call}: query_labels, gallery and gallery_labels do not fit together. With a gallery, pass both query_labels "
            "and gallery_labels, or neither. Without a gallery, pass query_labels alone."
        )
    for kind in EXCLUDING:
        has_query = f"query_{kind}" in present
        has_gallery = f"gallery_{kind}" in present
        if is_one_set and has_gallery:
            raise InputError(
                f"{call}: gallery_{kind} without a gallery. Pass query_{kind}= alone, which names the items of one set, or "
                "pass the gallery, too."
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
    """Return a note on ids that name a query and a gallery item that cannot be one item.

    Embeddings may differ, for two models may have made them; labels may not.
    """
    ordered, order = gallery_ids.sort(stable=True)
    position = torch.searchsorted(ordered, query_ids).clamp(max=len(ordered) - 1)
    is_in_gallery = ordered[position] == query_ids
    differing = int((is_in_gallery & (query_labels != gallery_labels[order[position]])).sum())
    if not differing:
        return []
    named = verb(differing, "names a query and a gallery item", "name queries and gallery items")
    return [
        f"{counted(differing, 'id')} {named} of different labels, which cannot be the same item, and no such item is a "
        "candidate for its query. Pass ids that mean the same in both sets, such as the path of a file, or none if no query "
        "is in the gallery."
    ]


@dataclass(frozen=True)
class _Reader:
    """Reads and checks what this process was given of each set."""

    # the public function, for messages
    call: str
    processes: Processes
    # budget in bytes
    memory: float
    # whether rows are binary codes
    as_codes: bool
    # whether rows are hashed while they are read
    with_hashes: bool

    def read(self, name: str, array: Any, places: Any) -> Items:
        """Return the queries or the gallery, without columns. *Collective*.

        Args:
            name: `queries` or `gallery`, for messages.
            array: Rows of this process.
            places: Their places; None if the rows of each process follow those of the process before.
        """
        rows = self._rows(name, array)
        items = len(rows) if rows.ndim else 0
        if items or self.processes.count == 1:  # one of several processes may hold nothing
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
        """Return both sets with their columns, and the label of each label code. *Collective*.

        Args:
            sides: The sets without columns, by the prefix of their arguments: `query` and `gallery`.
            columns: The columns of this process, by the name of the argument.
            takes: Which arguments the function takes.
        """
        read: dict[str, dict[str, Labels]] = {}
        if takes.labels and "query_labels" not in columns:
            read_labels(
                None, 0, takes.argument("query_labels"), takes.argument("queries"), self.call
            )  # refuses the call
        for argument, values in columns.items():
            prefix, _, kind = argument.partition("_")
            items = len(sides[prefix].places)
            nouns = "embeddings" if takes.one_set else _nouns(prefix, as_codes=self.as_codes and kind == "labels")
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
        return {prefix: items.with_columns(**of_sides[prefix]) for prefix, items in sides.items()}, names

    def _rows(self, name: str, array: Any) -> Tensor | StoredRows:
        """Return rows in memory; or rows that stay where they are, if they take much of the budget. *Collective*."""
        is_read = is_read_by_slices(array) and not self.as_codes
        rows = array
        if not is_read:
            rows = rows_of(array, slice(0, int(array.shape[0]))) if is_read_by_slices(array) else array
            rows = as_tensor(rows, name, self.call).cpu()
        in_memory = isinstance(array, Tensor) or type(array) is np.ndarray or not is_read
        # Queries in memory are copied block by block anyway.
        may_stay = (name == "gallery" or not in_memory) and not self.as_codes and len(rows.shape) == 2
        size = 4.0 * math.prod(rows.shape) if may_stay else 0.0
        limit = (LOADED_SHARE if is_read else COPIED_SHARE) * self.memory
        stays = any(self.processes.gather(size > limit)) and size > 0
        if stays:
            return StoredRows(rows, self.memory) if is_read or rows.is_floating_point() else rows
        if is_read:
            stored = StoredRows(rows, self.memory)  # an array need not have a length
            return stored.read(slice(0, len(stored)))
        resident: Tensor = rows
        return resident

    def _checked(self, name: str, rows: Tensor | StoredRows, code: str) -> Tensor | StoredRows:
        """Return codes of -1 and +1, or vectors that can be compared; half precision becomes float32 in memory.

        Args:
            name: See `read`.
            rows: The rows of this process.
            code: What the caller writes for a tensor of them.
        """
        if self.as_codes:
            assert isinstance(rows, Tensor)
            return signs(rows, name, self.call, code)
        check_matrix(rows, name, self.call, code)
        return rows if isinstance(rows, StoredRows) else computable(rows)

    def _checked_rows(self, rows: Tensor | StoredRows) -> tuple[Int[Tensor, "bad"], NDArray[np.int64] | None]:
        """Return the indices of rows with NaN or Inf, and the hash of each row that is read for it; None for other rows."""
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
        """Return the number of items of each process, and the rows in the type that all processes use. *Collective*."""
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
    """Return queries and gallery with the same type of rows, if both are in memory; one set is its own gallery."""
    if gallery is None:
        return queries, queries
    if isinstance(queries.rows, StoredRows) or isinstance(gallery.rows, StoredRows):
        return queries, gallery
    common = torch.promote_types(queries.rows.dtype, gallery.rows.dtype)
    return replace(queries, rows=queries.rows.to(common)), replace(gallery, rows=gallery.rows.to(common))


def _nouns(prefix: str, *, as_codes: bool) -> str:
    """Name the items of one side in messages."""
    if prefix == "gallery":
        return "gallery codes" if as_codes else "gallery items"
    return "query codes" if as_codes else "queries"


def _check_dims(call: str, queries: int, gallery: int, *, as_codes: bool) -> None:
    if queries != gallery:
        fact = f"queries have dimension {queries}, the gallery has {gallery}"
        if as_codes:
            fact = f"codes of {queries} bits cannot be compared with a gallery of {gallery} bits"
        raise InputError(f"{call}: {fact}. Both must come from the same model.")


def refuse_other_dims(call: str, name: str, dims: Mapping[int, int]) -> None:
    """Refuse vectors of different dimensions, given rank -> dimension of each process with items."""
    first, dim = next(iter(dims.items()))
    for rank, dim_of_rank in dims.items():
        if dim_of_rank != dim:
            raise InputError(
                f"{call}: {name} have dimension {dim} in process {first}, {dim_of_rank} in process {rank}. All must "
                "come from the same model."
            )


def check_places(call: str, name: str, places: Int[Tensor, "items"]) -> None:
    """Refuse places of all items that are not each of 0, 1, 2, ... once."""
    if not torch.equal(places.sort().values, torch.arange(len(places))):
        raise InputError(
            f"{call}: the places of {name} must be 0 to {len(places) - 1}, each once over all processes. Number the rows "
            "that you pass, without those that you left out."
        )


# -------------------------------------------------------------------------------------------------------------------- files


def with_stored_arrays(
    call: str, queries: Any, gallery: Any, arrays: Mapping[str, Any], *, labelled: bool, takes: Takes | None = None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return queries, gallery, and their labels, ids and groups: those that are passed, else those in the files.

    Labels that only the files of one of two sets hold are left out, if the function does not need labels.

    Args:
        call: The public function, for messages.
        queries: Rows of the queries; `Shards` with `is_gallery` are divided into queries and gallery.
        gallery: Rows of the gallery; None for one set.
        arrays: Labels, ids and groups by the name of the argument, such as `query_ids`; None where none are passed.
        labelled: Whether labels are used.
        takes: Which arguments the function takes.

    Raises:
        ValueError: If the files of one of two sets hold groups, and the other set has none.
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
            stored = {f"{prefix}_{kind}": getattr(rows, kind) for kind in _KINDS if labelled or kind != "labels"}
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
    """Refuse groups that the files of one of two sets hold, if the other set has none."""
    prefixes = {"query", "gallery"}
    with_groups = {prefix for prefix in prefixes if merged.get(f"{prefix}_{kind}") is not None}
    if len(with_groups) != 1:
        return
    [grouped] = with_groups
    [other_prefix] = prefixes - with_groups
    if f"{grouped}_{kind}" not in passed:
        names = {"query": "queries", "gallery": "gallery"}
        raise InputError(
            f"{call}: only the files of the {names[grouped]} hold {kind}, which would exclude nothing. Pass {kind}= to the "
            f"Shards of both sets, or {other_prefix}_{kind}=."
        )
