"""The items of a call: its queries and its gallery. `item_reader` reads them for all functions in the same way.

    arrays, files -> read_items -> ItemSets -> vectors, rules, columns -> the computation of the function

Rows are vectors. Each process has only its own rows, in memory or in files. Columns are labels, ids, groups and other values
per item. Every process has the columns of all items, as codes. A code takes 8 bytes, which is little compared with a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional._repeated import Copies, HashedRows, count_equal_candidates, hashes_of
from fewshot_callbacks.settings import Similarity
from fewshot_callbacks.storage.stored_rows import StoredRows, as_one_tensor

# Columns that exclude candidates: an item is not a candidate of a query with the same code.
EXCLUDING = ("ids", "groups")
# Excluding columns in which a query may share its code with several items. An id belongs to one item.
GROUPING = tuple(kind for kind in EXCLUDING if kind != "ids")
# All columns that arguments and files may have. Processes compare which of these they got, so add a new kind here.
KINDS = ("labels", *EXCLUDING)


@dataclass(frozen=True, eq=False)
class Share:
    """The part of the queries and of the gallery that this process has, if several processes make a call together.

    A part may be empty. Every process returns the report of the whole sets, the same as a single process would. Functions
    exchange the gallery in chunks, so no process needs memory for the whole gallery. Only `embedding_health` with `k`
    gathers all rows in each process.

    Attributes:
        processes: The processes that make the call together; see `metrics.TorchProcesses`.
        query_places: (queries,) index of each query among the queries of all processes, from 0 to their number - 1. It
            decides the order of `per_query` and the random draws. By default, the queries of each process follow the
            queries of the previous process. Rows that you left out yourself have no place. Rows that repeat an id have
            a place.
        gallery_places: (gallery,) index of each gallery item in the whole gallery.

    Examples:
        >>> import torch
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]])
        >>> shuffled = Share(query_places=[0, 2, 1])  # the second row is the last of the data set
        >>> evaluate_retrieval(points, [0, 1, 0], share=shuffled, metrics="mAP").query_labels
        tensor([0, 0, 1])
    """

    processes: Processes = ALONE
    query_places: Any | None = None
    gallery_places: Any | None = None

    def refuse_other_settings(self, call: str, settings: Mapping[str, object]) -> None:
        """Refuse different settings in different processes, and places in only some of them. *Collective*."""
        places = {"query_places": self.query_places, "gallery_places": self.gallery_places}
        present = {name: presence(array) for name, array in places.items()}
        self.processes.refuse_other_calls(call, {**settings, **present})


EVERYTHING = Share()


@dataclass(frozen=True, eq=False)
class Items:
    """The queries or the gallery: the rows of this process, and the columns of all items.

    The place of an item is its index among the items of all processes. The package identifies items by their places.
    `to_origins` turns places into indices of the caller. `take` renumbers the places.
    """

    rows: Tensor | StoredRows
    """rows of this process: float32 or float64, or int8 with -1 and +1 for binary codes"""
    places: Int[Tensor, "rows"]
    """place of each row of this process; over all processes, each of 0 to length - 1 occurs once"""
    length: int
    """number of items of all processes"""
    columns: Mapping[str, Int[Tensor, "items"]] = field(default_factory=dict)
    """name -> code of each item of all processes, by place; queries and gallery share the codes"""
    origins: Int[Tensor, "items"] | None = None
    """index of each item among the items of the caller, ascending; None if no item was left out"""
    given: int = 0
    """number of items that the caller passed, in all processes"""
    hashes: Int[np.ndarray, "rows"] | None = None
    """hash of each row of this process (see `row_hashes`); None before they are computed"""

    @property
    def labels(self) -> Int[Tensor, "items"]:
        """Label code of each item of all processes, by place."""
        return self.columns["labels"]

    def of_rows(self, column: str) -> Int[Tensor, "rows"]:
        """Return the codes in a column for the rows of this process."""
        return self.columns[column][self.places]

    def of_all(self, processes: Processes, values: Shaped[Tensor, "*shape rows"]) -> Shaped[Tensor, "*shape items"]:
        """Return the values of all items by place, given the values for the rows of this process. *Collective*."""
        return processes.placed(values, self.places, self.length)

    def is_row_of(self, index: Int[Tensor, "chosen"]) -> Bool[Tensor, "rows"]:
        """Return whether each row of this process has one of these places."""
        return torch.isin(self.places, index)

    def take(self, index: Int[Tensor, "chosen"], memory: float | None) -> Items:
        """Return the items with these places, renumbered from 0.

        `index` is ascending. `memory` is the budget in bytes for rows that stay in their files; None loads them.
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
        """Return the indices among the items of the caller, given places; -1 stays -1."""
        return places if self.origins is None else torch.where(places >= 0, self.origins[places], -1)


class Rules(NamedTuple):
    """The items that are not candidates of the queries of this process, in the form that the engine needs.

    Items have the numbers of the engine. The items of this process have the first numbers (see `engine.chunks`).
    """

    places: Int[np.ndarray, "items"]
    """place of each item of all processes"""
    self_match: NDArray[np.int32]
    """(queries,) number of the item that is the query itself; -1 for none"""
    codes: list[tuple[Ints, Ints]]
    """(query codes, item codes) per reason to exclude; a pair with equal codes is not compared"""


@dataclass(frozen=True, eq=False)
class ItemSets:
    """The checked queries and gallery of a call, without repeated ids. The object never changes.

    Without a gallery, the queries are the gallery, or a part of it.
    """

    queries: Items
    gallery: Items
    self_match: Int[Tensor, "queries"] | None
    """with one set, the gallery place of each query of all processes, -1 for none; None for two sets"""
    similarity: Similarity
    processes: Processes
    memory: float
    """budget in bytes"""
    label_names: tuple[Any, ...] | None = None
    """string or set of labels of each label code, ascending; None for integer labels"""
    notes_on_ids: tuple[str, ...] = ()
    """notes on ids that different items share"""

    @property
    def same_set(self) -> bool:
        """Whether the queries are items of the gallery."""
        return self.self_match is not None

    @property
    def is_one_set(self) -> bool:
        """Whether the queries are the whole gallery in memory, so that each score serves both items of a pair."""
        has_same_rows = self.same_set and self.queries.rows is self.gallery.rows
        return has_same_rows and not isinstance(self.gallery.rows, StoredRows)

    @property
    def as_codes(self) -> bool:
        """Whether rows are binary codes."""
        return self.similarity == "hamming"

    # --------------------------------------------------------------------------------------- what the engine is given

    def vectors(self, threads: int) -> Vectors:
        """Return the queries and the gallery for the engine. *Collective*."""
        gallery = None if self.is_one_set else self.gallery.rows
        hashes = (self.queries.hashes, self.gallery.hashes)
        rows = as_one_tensor(self.queries.rows)
        return Vectors.of(rows, gallery, self.similarity, threads=threads, processes=self.processes, hashes=hashes)

    def rules(self) -> Rules:
        """Return the items that are not candidates of the queries of this process. *Collective*."""
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
        """Return the items with the label of each query of this process, given the items that are not candidates."""
        lists = Lists.of_labels(self.queries.of_rows("labels").numpy(), self.gallery.labels.numpy()[rules.places])
        return PairRelevance(lists, rules.self_match, rules.codes, symmetric=self.is_one_set)

    def exclusions(self, *names: str) -> list[tuple[Ints, Ints]]:
        """Return (query codes, item codes) for each excluding column that both sets have.

        Without names, all excluding columns are used.
        """
        in_both = self.queries.columns.keys() & self.gallery.columns.keys()
        return [
            (self.queries.columns[name].numpy(), self.gallery.columns[name].numpy())
            for name in names or EXCLUDING
            if name in in_both
        ]

    # ------------------------------------------------------------------------------------------- candidates and copies

    def items_of_queries(self) -> Int[Tensor, "queries"]:
        """Return the place of the gallery item that is the query itself, in one set or by its id; -1 for none."""
        if self.self_match is not None:
            return self.self_match
        if not {"ids"} <= self.queries.columns.keys() & self.gallery.columns.keys():
            return torch.full((self.queries.length,), -1)
        return places_of(self.queries.columns["ids"], self.gallery.columns["ids"])

    def count_candidates_with(self, column: str) -> Int[np.ndarray, "queries"]:
        """Return the number of candidates of each query that have its code in a column."""
        of_queries = self.queries.columns[column].numpy()
        of_items = self.gallery.columns[column].numpy()
        groups = self.exclusions(*GROUPING)
        counts = count_equal_candidates([(of_queries, of_items)], groups)
        # Ids exclude at most one item, the query itself. If its group also excludes it, it is not subtracted twice.
        item = self.items_of_queries().numpy()
        is_counted = (item >= 0) & (of_items[item] == of_queries)
        for groups_of_queries, groups_of_items in groups:
            is_counted &= groups_of_items[item] != groups_of_queries
        candidates: Int[np.ndarray, "queries"] = counts - is_counted
        return candidates

    def hashed(self) -> ItemSets:
        """Return the same sets with the hash of each row, in the type of the comparison. *Collective*."""
        has_doubles = torch.float64 in (self.queries.rows.dtype, self.gallery.rows.dtype)
        dtype = torch.float64 if any(self.processes.gather(has_doubles)) else torch.float32
        if self.as_codes:
            dtype = torch.int8
        queries = _hashed(self.queries, dtype)
        if self.gallery.rows is self.queries.rows:
            return replace(self, queries=queries, gallery=replace(self.gallery, hashes=queries.hashes))
        return replace(self, queries=queries, gallery=_hashed(self.gallery, dtype))

    def copies(self) -> Copies:
        """Return the copies of each query among its candidates. The sets need hashes and labels. *Collective*."""
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

        `effect` is a sentence on what copies do to the values.
        """
        notes = [*self.notes_on_ids]
        if copies is not None and copies.is_noted and copies.queries:
            notes.append(copies.note(effect, _CURES[self.same_set]))
        return notes

    # ------------------------------------------------------------------------------------------------ two sets as one

    def as_one_set(self) -> ItemSets:
        """Return two sets as one set if that does not change any rank; else the same sets. *Collective*.

        Both sets must have the same items in the same order, and ids or groups must exclude each item from its own
        candidates. With one set, each score serves both items of a pair.
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
        # A column without repeated codes only excludes the query itself.
        codes = {name: queries.columns[name] for name in EXCLUDING if name in queries.columns}
        queries = queries.without(*(name for name, code in codes.items() if len(code.unique()) == len(code)))
        return replace(self, queries=queries, gallery=queries, self_match=torch.arange(queries.length))


# Whether queries and gallery are one set -> what to do about repeated items.
_CURES = {
    True: "pass query_ids= (ids= in monitors, metrics and files), so that each id counts once (or drop the items that a "
    "sampler repeats, as gather_for_metrics of Accelerate does)",
    False: "omit the gallery if it contains the queries themselves, or pass query_ids= and gallery_ids= (ids= in monitors, "
    "metrics and files), so that no query finds its own copy",
}


def _hashed(items: Items, dtype: torch.dtype) -> Items:
    """Return items with the hash of each row in a type. Rows from files may already have hashes in their own type."""
    is_known = items.hashes is not None and items.rows.dtype == dtype
    return items if is_known else replace(items, hashes=hashes_of(items.rows, dtype))


def first_equal_rows(items: Items) -> Int[np.ndarray, "rows"]:
    """Return, for each row of this process, the index of the first bit-identical row. The items need hashes.

    Rows in memory are compared. Rows in files that share a hash are read again for a second hash with other factors. Two
    different rows have 128 equal bits with a probability of about 2^-120.
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
    """Return the index of each id in `distinct`; -1 if it is not there."""
    ordered, order = distinct.sort()
    position = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
    return torch.where(ordered[position] == ids, order[position], -1)


class _ChosenRows:
    """Chosen rows of an array, as an array."""

    def __init__(self, rows: StoredRows, is_chosen: Bool[np.ndarray, "rows"]) -> None:
        self._all = rows
        self._indices = np.flatnonzero(is_chosen)
        self.shape = (len(self._indices), rows.dim)
        self.dtype = rows.dtype

    def __getitem__(self, span: slice) -> Tensor:
        """Return consecutive chosen rows. Rows between them are read and dropped."""
        indices = self._indices[span]
        if not len(indices):
            return self._all.read(slice(0, 0))
        first = indices[0]
        return self._all.read(slice(first, indices[-1] + 1))[torch.from_numpy(indices - first)]
