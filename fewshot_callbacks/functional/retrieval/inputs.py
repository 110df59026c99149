"""Queries and gallery of an evaluation: this process holds its own vectors, every process the labels, ids and groups."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes, ShardIndex
from fewshot_callbacks.engine.chunks import gather_in_item_order
from fewshot_callbacks.engine.relevance import Lists, Relevance
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional._labels import (
    Labels,
    check_labels,
    encode,
    exclusion_codes,
    read_labels,
)
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
    Side,
    first_of_each,
    hashes_of,
    note_on_ids,
    sketches,
)
from fewshot_callbacks.functional.retrieval import relevance as given_relevance
from fewshot_callbacks.settings import Similarity
from fewshot_callbacks.sources import RowSubset, Shards
from fewshot_callbacks.sources.stored_rows import StoredRows, as_one_tensor, is_source, rows_of
from fewshot_callbacks.system.words import counted

# Share of the budget beyond which rows of files are not loaded.
LOADED_SHARE = 0.25
# And beyond which a gallery in memory is copied piece by piece to be multiplied, each piece once for all queries; what is
# smaller is copied as a whole, at least in bytes (`plan_layout`).
COPIED_SHARE = 0.8


@dataclass(frozen=True, eq=False)
class Share:
    """Which share of the queries and of the gallery this process holds, where several make a call together.

    A share may be empty. Each process returns the report of the whole sets, the same as a single process would.
    `evaluate_retrieval` exchanges the shares of the gallery in chunks, so that no process ever holds the whole gallery.
    `knn_accuracy`, and `embedding_health` with `k`, join the rows of all in each process.

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
    """(queries,) index of each query in the whole set, which determines the order of `per_query` and the random draws; by
    default, the queries of each process follow those of the previous process. A dropped repetition has no place, so that the
    places are 0, 1, 2, ... (a position in the data would count it)"""
    gallery_places: Any | None = None
    """(gallery,) index of each gallery item in the whole gallery"""


EVERYTHING = Share()


@dataclass(frozen=True)
class RetrievalInputs:
    """The validated inputs of an evaluation.

    Labels, ids and groups are those of all processes: one number for each item, little compared with its vector.
    """

    queries: Tensor | StoredRows
    """the query vectors of this process; codes as int8 of -1 and +1"""
    gallery: Tensor | StoredRows
    """the gallery vectors of this process, with one set the same tensor as the queries"""
    query_labels: Int[Tensor, "queries"]
    """labels of the queries of all processes"""
    gallery_labels: Int[Tensor, "gallery"]
    """labels of the gallery items of all processes"""
    codes: dict[str, Tensor | None]
    """ids and groups of all processes, by the name of the argument"""
    same_set: bool
    share: ShardIndex
    """index among all of each item of this process"""
    processes: Processes
    """the processes that hold the set together"""
    label_names: tuple[str, ...] | None = None
    """the string of each label, sorted; None where labels were given as integers"""
    drawn: Int[Tensor, "queries"] | None = None
    """index among all of each query of a sample, ascending; None for all queries"""
    given: given_relevance.Relevance | None = None
    """who is relevant, of all queries and items, where labels do not say it; labels are then those of clusters"""
    copies: Copies | None = None
    """copies among the candidates of each query; None where nobody asked, or labels do not say who is relevant"""
    counted: Int[Tensor, "counted"] | None = None
    """index of the first query of each id among the queries that were given; None if all are counted"""
    notes_on_ids: tuple[str, ...] = ()
    """what is wrong with the ids, where items were left out that are not the one that was counted"""

    @property
    def is_one_set(self) -> bool:
        """Whether the queries are the gallery, all of it, in memory."""
        return self.same_set and self.drawn is None and not isinstance(self.gallery, StoredRows)

    def vectors(self, similarity: Similarity, threads: int) -> Vectors:
        """Return both sets as they are compared."""
        gallery = None if self.is_one_set else self.gallery
        return Vectors(as_one_tensor(self.queries), gallery, similarity, threads=threads, processes=self.processes)

    def relevance(
        self,
    ) -> tuple[Relevance, Shaped[np.ndarray, "pairs"] | None, given_relevance.Absent | None]:
        """Return who is relevant to the queries of this process, with grades, and relevant items without a row. Collective.

        Grades are None if all are 1, and items without a row if there are none. Items are numbered from those of this
        process on, see `engine.tiles`.
        """
        own_labels = self.own_query_labels.numpy()
        kinds = []
        for of_queries, of_items in self.exclusions():
            items_of_process = of_items[self.share.gallery].numpy()
            in_item_order = gather_in_item_order(self.processes, items_of_process)
            kinds.append((of_queries[self.share.queries].numpy(), in_item_order))
        if self.given is not None:
            places = self.share.queries if self.drawn is None else self.drawn[self.share.queries]
            numbers = gather_in_item_order(self.processes, self.share.gallery.numpy())
            given = self.given.part(places.numpy(), numbers)
            judged = given_relevance.judged_items(given)
            symmetric = self.is_one_set and given.mutual
            relevance = Relevance(judged.relevant, self._itself(), kinds, judged.ignored, symmetric)
            return relevance, judged.grades, judged.absent
        labels = gather_in_item_order(self.processes, self.own_gallery_labels.numpy())
        of_labels = Lists.of_labels(own_labels, labels)
        return Relevance(of_labels, self._itself(), kinds, symmetric=self.is_one_set), None, None

    def exclusions(self) -> list[tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]]]:
        """Return the codes of all queries and gallery items, for ids and for groups; none without these."""
        pairs = []
        for kind in ("ids", "groups"):
            of_queries = self.codes[f"query_{kind}"]
            of_items = self.codes[f"gallery_{kind}"]
            if of_queries is not None and of_items is not None:
                pairs.append((of_queries, of_items))
        return pairs

    def _itself(self) -> NDArray[np.int32]:
        """Return the number of the item that each query of this process is; -1 for none."""
        if not self.same_set:
            return np.full(len(self.queries), -1, np.int32)
        if self.drawn is None:
            return np.arange(len(self.queries), dtype=np.int32)
        return np.flatnonzero(np.isin(self.share.gallery, self.drawn)).astype(np.int32)

    @property
    def own_query_labels(self) -> Int[Tensor, "own"]:
        """The labels of the queries of this process."""
        return self.query_labels[self.share.queries]

    @property
    def own_gallery_labels(self) -> Int[Tensor, "own"]:
        """The labels of the gallery items of this process."""
        return self.gallery_labels[self.share.gallery]

    def notes_on_repeated_items(self, effect: str = "A copy is a perfect neighbour") -> list[str]:
        """Return what a reader should know of items that come several times.

        Args:
            effect: What copies do to the values.
        """
        notes = [*self.notes_on_ids]
        if self.copies is not None and self.copies.is_noted and self.copies.queries:
            notes.append(self.copies.note(effect, self._cure_for_copies()))
        return notes

    def _cure_for_copies(self) -> str:
        """Return what to do about items that come several times."""
        if not self.same_set:
            return (
                "leave out the gallery if it holds the queries themselves, or name the items by query_ids and gallery_ids "
                "(ids of monitors, metrics and files), so that no query finds its own copy"
            )
        return (
            "pass query_ids= (ids of monitors, metrics and files), which names each item, and the first of each is counted "
            "(or drop what a sampler repeats before, as gather_for_metrics of Accelerate does)"
        )

    def is_here(self, drawn: Int[Tensor, "drawn"]) -> Bool[Tensor, "own"]:
        """Find the queries of this process among those with these indices."""
        return torch.isin(self.share.queries, drawn)

    def sample(self, drawn: Int[Tensor, "drawn"]) -> RetrievalInputs:
        """Keep the queries with these indices, ascending, and the whole gallery."""
        here = self.is_here(drawn)
        codes = {
            name: code[drawn] if code is not None and name.startswith("query") else code
            for name, code in self.codes.items()
        }
        copies = None if self.copies is None else replace(self.copies, counts=self.copies.counts[drawn.numpy()])
        return replace(
            self,
            copies=copies,
            queries=self.queries[here],
            query_labels=self.query_labels[drawn],
            codes=codes,
            share=self.share._replace(queries=torch.searchsorted(drawn, self.share.queries[here])),
            drawn=drawn,
        )

    def as_one_set(self) -> RetrievalInputs:
        """Take queries and gallery as one set where ids or groups say the same; collective.

        So it is where they are the same items in the same order and whom one excludes excludes it. All ranks stay the same,
        and the score of a pair serves both its items.
        """
        exclusions = self.exclusions()
        queries = self.queries
        gallery = self.gallery
        if self.same_set or self.drawn is not None or self.given is not None or not exclusions:
            return self
        if isinstance(queries, StoredRows) or isinstance(gallery, StoredRows):
            return self
        if not all(torch.equal(*pair) for pair in ((self.query_labels, self.gallery_labels), *exclusions)):
            return self
        is_same_here = torch.equal(queries, gallery) and torch.equal(*self.share)
        if self.processes.largest([float(not is_same_here)])[0]:
            return self
        # where no two items share a code, it says no more than that an item is not its own candidate
        shared = {
            name: code if code is not None and len(code.unique()) < len(code) else None
            for name, code in self.codes.items()
        }
        return replace(self, gallery=queries, codes=shared, same_set=True)


def collect_inputs(
    call: str,
    share: Share,
    queries: Any,
    query_labels: Any,
    gallery: Any,
    gallery_labels: Any,
    *,
    relevance: given_relevance.Relevance | None = None,
    as_codes: bool = False,
    memory: float = math.inf,
    with_copies: bool = False,
    **ids_and_groups: Any,
) -> RetrievalInputs:
    """Validate the inputs of an evaluation, and share labels, ids and groups (never vectors) with every process.

    Args:
        call: The public function, for messages.
        share: The share of this process; it may hold nothing of a set, but must say whether there is a gallery.
        queries: Queries of this process.
        query_labels: Labels of the queries.
        gallery: Gallery items of this process; None for one set.
        gallery_labels: Labels of the gallery items.
        relevance: Who is relevant, in place of labels: of all queries and items.
        as_codes: Pack binary codes.
        memory: Budget in bytes; what takes much of it stays in its files.
        with_copies: Count the copies of the queries.
        **ids_and_groups: Ids and groups of the items of this process, as in `exclusion_codes`. The first query and the first
            gallery item of each id are counted.

    Raises:
        ValueError: As `evaluate_retrieval` does; the same in every process.
    """
    arrays = {"query_labels": query_labels, "gallery_labels": gallery_labels, **ids_and_groups}
    queries, gallery, arrays = with_stored_arrays(queries, gallery, arrays, labelled=relevance is None)
    query_labels = arrays.pop("query_labels", None)
    gallery_labels = arrays.pop("gallery_labels", None)
    if relevance is not None:
        _refuse_labels_beside_relevance(call, query_labels, gallery_labels)
        query_labels = _no_labels(queries)
        gallery_labels = None if gallery is None else _no_labels(gallery)
    _check_gallery_labels(call, gallery, gallery_labels)
    processes = share.processes
    reader = _Reader(call, processes, memory, as_codes=as_codes)
    sets = _read_sets(reader, share, queries, query_labels, gallery, gallery_labels)
    same_set = sets.same_set
    labels, names = _label_codes(call, processes, sets)
    codes = _codes_of_all(call, processes, sets, arrays)
    counted, notes = _counted_items(processes, sets, labels, codes)
    codes = _codes_of_counted(codes, counted, same_set=same_set)
    sets = sets.only(call, counted, relevance, memory)
    labels = counted.of(labels)  # the number of each set of labels where items have several
    has_labels = relevance is None
    query_codes, gallery_codes = labels
    if names is not None and isinstance(names[0], tuple):
        relevance = _relevance_of_sets(names, *labels, same_set=same_set)
        names = None
        gallery_codes = torch.zeros_like(gallery_codes)
    if relevance is not None:
        query_codes = _clusters(call, relevance, sets)
    inputs = RetrievalInputs(
        *_of_one_type(sets.queries.rows, sets.gallery.rows),  # one set stays one tensor
        query_codes,
        gallery_codes,
        codes,
        same_set,
        ShardIndex(sets.queries.places, sets.gallery.places),
        processes,
        names,
        given=relevance,
        counted=counted.queries,
        notes_on_ids=tuple(notes),
    )
    if with_copies and has_labels:
        inputs = replace(inputs, copies=_copies(inputs, sets, labels, as_codes=as_codes))
    return inputs


def _read_sets(
    reader: _Reader, share: Share, queries: Any, query_labels: Any, gallery: Any, gallery_labels: Any
) -> _Sets:
    """Return the queries and the gallery of this process, which are one set without a gallery. *Collective*."""
    query_share = reader.read("queries", queries, query_labels, share.query_places)
    if gallery is None:
        return _Sets(query_share, query_share, True)
    gallery_share = reader.read("gallery", gallery, gallery_labels, share.gallery_places)
    dims = (query_share.rows.shape[1], gallery_share.rows.shape[1])
    _check_dims(reader.call, *dims, as_codes=reader.as_codes)
    return _Sets(query_share, gallery_share, False)


def _label_codes(call: str, processes: Processes, sets: _Sets) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...] | None]:
    """Return the codes of the labels of all queries and of all gallery items, and the label of each code. *Collective*."""
    labels = {"query_labels": sets.queries.labels}
    if not sets.same_set:
        labels["gallery_labels"] = sets.gallery.labels
    codes, names = encode(call, labels, processes)
    query_codes = sets.queries.of_all(processes, codes[0])
    gallery_codes = query_codes if sets.same_set else sets.gallery.of_all(processes, codes[1])
    return (query_codes, gallery_codes), names


def _relevance_of_sets(
    sets: Sequence[tuple[int, ...]], queries: Tensor, items: Tensor, *, same_set: bool
) -> given_relevance.Relevance:
    """Return who is relevant where the label of each query and item is the number of a set of labels."""
    of_queries = [sets[number] for number in queries.tolist()]
    if same_set:
        return given_relevance.Relevance.from_label_sets(of_queries)
    return given_relevance.Relevance.from_label_sets(of_queries, [sets[number] for number in items.tolist()])


def _refuse_labels_beside_relevance(call: str, labels: Any, gallery_labels: Any) -> None:
    """Refuse labels where relevance is given."""
    if labels is not None or gallery_labels is not None:
        raise ValueError(f"{call}: relevance and labels both say who is relevant. Pass one of them.")


def _check_gallery_labels(call: str, gallery: Any, gallery_labels: Any) -> None:
    """Refuse a gallery without labels, and labels without a gallery."""
    if (gallery is None) != (gallery_labels is None):
        fact = "gallery_labels without gallery" if gallery is None else "gallery without gallery_labels"
        raise ValueError(
            f"{call}: {fact}. gallery and gallery_labels belong together: pass both, or neither for leave-one-out."
        )


def _codes_of_all(call: str, processes: Processes, sets: _Sets, arrays: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return the ids and groups of the items of all processes, by the name of the argument. *Collective*."""
    sizes = (len(sets.queries.rows), len(sets.gallery.rows))
    codes = exclusion_codes(call, arrays, *sizes, same_set=sets.same_set, processes=processes)
    of_all: dict[str, Tensor | None] = {}
    for name, code in codes.items():
        share = sets.queries if name.startswith("query") else sets.gallery
        of_all[name] = None if code is None else share.of_all(processes, code)
    return of_all


class _Counted(NamedTuple):
    """Indices of the first query and of the first gallery item of each id, ascending; None if all are counted.

    With one set, both are the same.
    """

    queries: Int[Tensor, "counted"] | None
    gallery: Int[Tensor, "counted"] | None

    def of(self, labels: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the labels of the queries and gallery items that are counted."""
        query_labels, gallery_labels = labels
        if self.queries is not None:
            query_labels = query_labels[self.queries]
        if self.gallery is not None:
            gallery_labels = gallery_labels[self.gallery]
        return query_labels, gallery_labels


def _codes_of_counted(
    codes: Mapping[str, Tensor | None], counted: _Counted, *, same_set: bool
) -> dict[str, Tensor | None]:
    """Return the ids and groups of the queries and gallery items that are counted.

    The ids of one set have done their work: the items that are counted all have different ones.
    """
    remaining: dict[str, Tensor | None] = {}
    for name, code in codes.items():
        index = counted.queries if name.startswith("query") else counted.gallery
        remaining[name] = code if code is None or index is None else code[index]
    if same_set:
        remaining["query_ids"] = None
    return remaining


def _copies(
    inputs: RetrievalInputs,
    sets: _Sets,
    labels: tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]],
    *,
    as_codes: bool,
) -> Copies:
    """Return the copies of all queries. *Collective*.

    Args:
        inputs: Queries and gallery.
        sets: The shares of this process, with the hashes of rows that were read.
        labels: Labels of all queries and gallery items; the number of each set of labels where items have several.
        as_codes: Whether rows are binary codes.
    """
    processes = inputs.processes
    has_doubles = torch.float64 in (inputs.queries.dtype, inputs.gallery.dtype)
    dtype = torch.float64 if any(processes.gather(has_doubles)) else torch.float32
    if as_codes:
        dtype = torch.int8

    def side(share: _SetShare, rows: Tensor | StoredRows, of_all: Tensor) -> Side:
        """Return the hashes and labels of all items of a set. *Collective*."""
        # Hashes of rows that were read are hashes in their own type.
        is_known = share.hashes is not None and rows.dtype == dtype
        hashes = share.hashes if is_known and share.hashes is not None else hashes_of(rows, dtype)
        return Side(share.of_all(processes, torch.from_numpy(hashes)).numpy(), of_all.numpy())

    query_side = side(sets.queries, inputs.queries, labels[0])
    gallery_side = query_side if sets.same_set else side(sets.gallery, inputs.gallery, labels[1])
    self_match = np.arange(len(labels[0])) if sets.same_set else None
    gallery_rows = (inputs.gallery, inputs.share.gallery.numpy())
    exclusions = [(of_queries.numpy(), of_items.numpy()) for of_queries, of_items in inputs.exclusions()]
    return Copies.among(query_side, gallery_side, self_match, exclusions, gallery_rows, processes, as_codes=as_codes)


def _counted_items(
    processes: Processes, sets: _Sets, labels: tuple[Tensor, Tensor], codes: Mapping[str, Tensor | None]
) -> tuple[_Counted, list[str]]:
    """Return the queries and gallery items that are counted, and notes on wrong ids. *Collective*."""
    query_ids = codes["query_ids"]
    gallery_ids = codes["gallery_ids"]
    notes = _notes_on_ids_of_both(*labels, query_ids, gallery_ids)
    queries = _first_of_repeated(query_ids)
    beginning = "" if sets.same_set else "query_ids: "
    notes += _notes_on_repeated_ids(processes, sets.queries, labels[0], beginning, query_ids, queries)
    if sets.same_set:
        return _Counted(queries, queries), notes
    items = _first_of_repeated(gallery_ids)
    notes += _notes_on_repeated_ids(processes, sets.gallery, labels[1], "gallery_ids: ", gallery_ids, items)
    return _Counted(queries, items), notes


def _first_of_repeated(ids: Int[Tensor, "items"] | None) -> Int[Tensor, "counted"] | None:
    """Return the index of the first item of each id; None if no id repeats, or there are none."""
    if ids is None:
        return None
    first = first_of_each(ids)
    return None if len(first) == len(ids) else first


def _notes_on_ids_of_both(
    query_labels: Tensor, gallery_labels: Tensor, query_ids: Tensor | None, gallery_ids: Tensor | None
) -> list[str]:
    """Return a note on ids that name a query and a gallery item that cannot be one item.

    Embeddings may differ, for two models may have made them; labels may not.
    """
    if query_ids is None or gallery_ids is None or not len(query_ids) or not len(gallery_ids):
        return []
    ordered, order = gallery_ids.sort(stable=True)
    position = torch.searchsorted(ordered, query_ids).clamp(max=len(ordered) - 1)
    is_in_gallery = ordered[position] == query_ids
    differing = int((is_in_gallery & (query_labels != gallery_labels[order[position]])).sum())
    if not differing:
        return []
    return [
        f"{differing:,} ids name queries and gallery items of different labels, which cannot be the same items, and no such "
        "item is a candidate for its query. Pass ids that mean the same in both sets, such as the path of a file, or none "
        "if no query is in the gallery."
    ]


def _notes_on_repeated_ids(
    processes: Processes,
    share: _SetShare,
    labels: Int[Tensor, "items"],
    beginning: str,
    ids: Int[Tensor, "items"] | None,
    first: Int[Tensor, "counted"] | None,
) -> list[str]:
    """Return notes on wrong ids of a set: only the first item of each id is counted. *Collective*.

    Args:
        processes: All that hold a share of the set.
        share: The share of this process.
        labels: Labels of all items.
        beginning: Beginning of the note.
        ids: Ids of all items; None if there are none.
        first: Index of the first item of each id; None if no id repeats.
    """
    if ids is None or first is None:
        return []
    sketch = sketches(share.rows) if len(share.places) else torch.empty(0, SKETCH, dtype=torch.float64)
    note = note_on_ids(ids, labels, share.of_all(processes, sketch.T.contiguous()).T)
    return [] if note is None else [f"{beginning}{note}"]


def with_stored_arrays(
    queries: Any, gallery: Any, arrays: dict[str, Any], *, labelled: bool
) -> tuple[Any, Any, dict[str, Any]]:
    """Return queries, gallery and their labels, ids and groups, with those that files hold where none are passed.

    Ids and groups that only the files of one of two sets hold are left out: they would exclude nobody.

    Args:
        queries: Rows of the queries; `Shards` with `is_gallery` are divided into queries and gallery.
        gallery: Rows of the gallery; None for one set.
        arrays: Labels, ids and groups by the name of the argument, such as `query_ids`; None where none are passed.
        labelled: Whether labels are used.

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
            stored = {f"{prefix}_ids": rows.ids, f"{prefix}_groups": rows.groups}
            if labelled:
                stored[f"{prefix}_labels"] = rows.labels
            merged = stored | merged
    if gallery is not None:
        _refuse_groups_of_one(merged, passed)
        for kind in ("ids", "groups"):
            pair = {f"query_{kind}", f"gallery_{kind}"}
            if not pair & passed.keys() and any(merged.get(name) is None for name in pair):
                merged = {name: array for name, array in merged.items() if name not in pair}
    return queries, gallery, merged


def _refuse_groups_of_one(merged: Mapping[str, Any], passed: Mapping[str, Any]) -> None:
    """Refuse groups that the files of one of two sets hold, if the other set has none."""
    prefixes = {"query", "gallery"}
    with_groups = {prefix for prefix in prefixes if merged.get(f"{prefix}_groups") is not None}
    if len(with_groups) != 1:
        return
    [grouped] = with_groups
    [other_prefix] = prefixes - with_groups
    if f"{grouped}_groups" not in passed:
        names = {"query": "queries", "gallery": "gallery"}
        raise ValueError(
            f"Only the files of the {names[grouped]} hold groups: they would exclude nobody. Pass groups= to the Shards of "
            f"both sets, or {other_prefix}_groups=."
        )


def _no_labels(rows: Any) -> Int[Tensor, "items"]:
    if is_source(rows):
        return torch.zeros(int(rows.shape[0]), dtype=torch.int64)
    return torch.zeros(len(rows) if hasattr(rows, "__len__") else 0, dtype=torch.int64)


def _clusters(call: str, relevance: given_relevance.Relevance, sets: _Sets) -> Int[Tensor, "queries"]:
    """Return the cluster of each query for intervals: each query is one, if the relevance names none."""
    queries = sets.queries.length
    _check_relevance(call, relevance, queries, sets.gallery.length, same_set=sets.same_set)
    return torch.arange(queries) if relevance.clusters is None else torch.from_numpy(relevance.clusters)


def _check_relevance(
    call: str, relevance: given_relevance.Relevance, queries: int, gallery: int, *, same_set: bool
) -> None:
    """Refuse a relevance of other sets."""
    if (relevance.queries, relevance.gallery, relevance.one_set) != (queries, gallery, same_set):
        sets = (
            f"{counted(queries, 'query')} in one set"
            if same_set
            else f"{counted(queries, 'query')} and {counted(gallery, 'gallery item')}"
        )
        raise ValueError(
            f"{call}: the relevance is {relevance}, but there are {sets}. Make it for the rows that are passed, with "
            "gallery_ids or the number of gallery items where there is a gallery."
        )


@dataclass(frozen=True)
class _SetShare:
    """The share of one set that this process holds."""

    rows: Tensor | StoredRows
    # as they were given
    labels: Labels
    # index of each item among those of all processes, without items that were dropped
    places: Int[Tensor, "own"]
    # number of items of all processes
    length: int
    # hashes of rows that are read, in their type; None for rows in memory, whose hashes take little time
    hashes: NDArray[np.int64] | None = None

    def of_all(self, processes: Processes, values: Shaped[Tensor, "*rows own"]) -> Shaped[Tensor, "*rows items"]:
        """Return the values of the items of all processes, in the order of their places. *Collective*."""
        return processes.placed(values, self.places, self.length)

    def only(self, counted: Int[Tensor, "counted"], memory: float) -> _SetShare:
        """Return the share of a smaller set: of the items with these indices, ascending, which are numbered anew."""
        is_counted = torch.isin(self.places, counted)
        mask = is_counted.numpy()
        if isinstance(self.rows, StoredRows):
            rows: Tensor | StoredRows = StoredRows(_SourceOfCounted(self.rows, mask), memory)
        else:
            rows = self.rows[is_counted]
        hashes = None if self.hashes is None else self.hashes[mask]
        places = torch.searchsorted(counted, self.places[is_counted])
        return _SetShare(rows, self.labels[is_counted], places, len(counted), hashes)


class _Sets(NamedTuple):
    """The shares of queries and gallery that this process holds; with one set, both are the same object."""

    queries: _SetShare
    gallery: _SetShare
    same_set: bool

    def only(self, call: str, counted: _Counted, relevance: given_relevance.Relevance | None, memory: float) -> _Sets:
        """Return the shares of the items that are counted; a relevance of all rows is refused if some are not."""
        queries = _only_counted(call, self.queries, counted.queries, relevance, memory)
        gallery = queries
        if not self.same_set:
            gallery = _only_counted(call, self.gallery, counted.gallery, relevance, memory)
        return _Sets(queries, gallery, self.same_set)


def _only_counted(
    call: str,
    share: _SetShare,
    counted: Int[Tensor, "counted"] | None,
    relevance: given_relevance.Relevance | None,
    memory: float,
) -> _SetShare:
    """Return the share of the items that are counted, which are all for None."""
    if counted is None:
        return share
    if relevance is not None:
        raise ValueError(
            f"{call}: relevance is of all rows, and {share.length - len(counted):,} of them repeat an id. Pass each item "
            "once, and the relevance of these."
        )
    return share.only(counted, memory)


class _SourceOfCounted:
    """The rows of a source that are counted, as a source.

    Args:
        rows: All rows.
        mask: (rows,) whether each row is counted.
    """

    def __init__(self, rows: StoredRows, mask: Bool[np.ndarray, "rows"]) -> None:
        self._all = rows
        self._indices = np.flatnonzero(mask)
        self.shape = (len(self._indices), rows.dim)
        self.dtype = rows.dtype

    def __getitem__(self, span: slice) -> Tensor:
        """Read neighbouring rows, and pass over those between them."""
        indices = self._indices[span]
        if not len(indices):
            return self._all.read(slice(0, 0))
        first = indices[0]
        return self._all.read(slice(first, indices[-1] + 1))[torch.from_numpy(indices - first)]


@dataclass(frozen=True)
class _Reader:
    """Reads and validates the share of each set that this process was given."""

    # the public function, for messages
    call: str
    processes: Processes
    # budget in bytes
    memory: float
    as_codes: bool

    def read(self, name: str, source: Any, labels: Any, places: Any) -> _SetShare:
        """Return the share of one set. *Collective*.

        Args:
            name: `queries` or `gallery`, for messages.
            source: Rows of this process.
            labels: Their labels.
            places: Their indices among all; None if those of a process follow those of the one before.
        """
        rows = self._rows(name, source)
        items = len(rows) if rows.ndim else 0
        if items or self.processes.count == 1:  # one of several processes may hold nothing
            code = name if self.as_codes and hasattr(source, "__array__") else tensor_code(name, source)
            rows = self._checked(name, rows, code)
        label_name = "query_labels" if name == "queries" else "gallery_labels"
        nouns = _nouns(name, as_codes=self.as_codes)
        own_labels = read_labels(labels, items, label_name, nouns, self.call, sets=True)
        dim = rows.shape[1] if items else 0
        sizes, rows = self._of_one_kind(name, rows, items, dim)
        if places is None:
            first = sum(sizes[: self.processes.rank])
            places = torch.arange(first, first + items)
        places = check_labels(places, items, "places", name, self.call)
        check_places(self.call, name, torch.cat(self.processes.gather(places)))
        non_finite, hashes = _checked_rows(rows, as_codes=self.as_codes)
        location = ""
        if len(non_finite) and isinstance(source, Shards | RowSubset):
            location = f", which is {source.where(int(non_finite[0]))}"
        length = sum(sizes)
        non_finite_of_all = torch.cat(self.processes.gather(places[non_finite])).sort().values
        refuse_non_finite(non_finite_of_all, length, name, self.call, location, tensor_code(name, source))
        return _SetShare(rows, own_labels, places, length, hashes)

    def _rows(self, name: str, source: Any) -> Tensor | StoredRows:
        """Return rows in memory, or rows that stay where they are, since they take much of the budget. *Collective*."""
        is_read = is_source(source) and not self.as_codes
        rows = source
        if not is_read:
            rows = rows_of(source, slice(0, int(source.shape[0]))) if is_source(source) else source
            rows = as_tensor(rows, name, self.call).cpu()
        in_memory = isinstance(source, Tensor) or type(source) is np.ndarray or not is_read
        # Queries in memory are copied block by block anyway.
        may_stay = (name == "gallery" or not in_memory) and not self.as_codes and len(rows.shape) == 2
        size = 4.0 * math.prod(rows.shape) if may_stay else 0.0
        limit = (LOADED_SHARE if is_read else COPIED_SHARE) * self.memory
        stays = any(self.processes.gather(size > limit)) and size > 0
        if stays:
            return StoredRows(rows, self.memory) if is_read or rows.is_floating_point() else rows
        if is_read:
            stored = StoredRows(rows, self.memory)  # a source need not have a length
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

    def _of_one_kind(
        self, name: str, rows: Tensor | StoredRows, items: int, dim: int
    ) -> tuple[list[int], Tensor | StoredRows]:
        """Return the number of items of each process, and rows in a type that holds those of all. *Collective*."""
        kinds = self.processes.gather((items, dim, rows.dtype))
        holders = {rank: kind for rank, kind in enumerate(kinds) if kind[0]}
        if not holders:
            raise ValueError(
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


def _checked_rows(rows: Tensor | StoredRows, *, as_codes: bool) -> tuple[Int[Tensor, "bad"], NDArray[np.int64] | None]:
    """Return the indices of rows with NaN or Inf and, of rows that are read, the hash of each, from the same reading."""
    nothing = torch.empty(0, dtype=torch.int64)
    if not isinstance(rows, StoredRows):
        return nothing if as_codes else non_finite_rows(rows), None
    bad = [nothing]
    hashes = [np.empty(0, np.int64)]
    for chunk, values in rows.chunks():
        bad.append(chunk.start + non_finite_rows(values))
        hashes.append(hashes_of(values, rows.dtype))
    return torch.cat(bad), np.concatenate(hashes)


def _of_one_type(
    queries: Tensor | StoredRows, items: Tensor | StoredRows
) -> tuple[Tensor | StoredRows, Tensor | StoredRows]:
    """Return rows in memory in the type that holds both."""
    if isinstance(queries, StoredRows) or isinstance(items, StoredRows):
        return queries, items
    common = torch.promote_types(queries.dtype, items.dtype)
    return queries.to(common), items.to(common)


def _nouns(name: str, *, as_codes: bool) -> str:
    """Name the items of one side in messages."""
    if name == "gallery":
        return "gallery codes" if as_codes else "gallery items"
    return "query codes" if as_codes else "queries"


def _check_dims(call: str, queries: int, gallery: int, *, as_codes: bool) -> None:
    if queries != gallery:
        fact = f"queries have dimension {queries}, the gallery has {gallery}"
        if as_codes:
            fact = f"codes of {queries} bits cannot be compared with a gallery of {gallery} bits"
        raise ValueError(f"{call}: {fact}. Both must come from the same model.")


def refuse_other_dims(call: str, name: str, dims: Mapping[int, int]) -> None:
    """Refuse vectors of different dimensions, given rank -> dimension of each process with items."""
    first, dim = next(iter(dims.items()))
    for rank, dim_of_rank in dims.items():
        if dim_of_rank != dim:
            raise ValueError(
                f"{call}: {name} have dimension {dim} in process {first}, {dim_of_rank} in process {rank}. All must "
                "come from the same model."
            )


def check_places(call: str, name: str, places: Int[Tensor, "items"]) -> None:
    """Refuse places of all items that are not each of 0, 1, 2, ... once."""
    if not torch.equal(places.sort().values, torch.arange(len(places))):
        raise ValueError(
            f"{call}: the places of {name} must be 0 to {len(places) - 1}, each once over all processes. Drop repeated "
            "items first."
        )
