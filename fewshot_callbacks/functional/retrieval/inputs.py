"""Queries and gallery of an evaluation: this process holds its own vectors, every process the labels, ids and groups."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from fewshot_callbacks.sources import ChosenRows, Shards
from fewshot_callbacks.sources.stored_rows import StoredRows, as_one_tensor, is_source

# Share of the budget beyond which rows of files are not loaded.
LOADED_SHARE = 0.25
# And beyond which a gallery in memory is copied piece by piece to be multiplied, each piece once for all queries; what is
# smaller is copied as a whole, at least in bytes (`plan_layout`).
COPIED_SHARE = 0.8


@dataclass(frozen=True, eq=False)
class Share:
    """Which share of the queries and of the gallery this process holds, where several make a call together.

    A share may be empty. Each process returns the report of the whole sets, the same as a single process would. The shares
    of the gallery are exchanged in chunks, so that no process ever holds the whole gallery.

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
    default, the queries of each process follow those of the previous process"""
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
        for kind in ("ids", "groups"):
            of_queries, of_items = self.codes[f"query_{kind}"], self.codes[f"gallery_{kind}"]
            if of_queries is not None and of_items is not None:
                own, other = of_queries[self.share.queries], of_items[self.share.gallery]
                kinds.append((own.numpy(), gather_in_item_order(self.processes, other.numpy())))
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
        kinds = [(self.codes[f"query_{kind}"], self.codes[f"gallery_{kind}"]) for kind in ("ids", "groups")]
        given = [(own, other) for own, other in kinds if own is not None and other is not None]
        queries, gallery = self.queries, self.gallery
        if self.same_set or self.drawn is not None or self.given is not None or not given:
            return self
        if isinstance(queries, StoredRows) or isinstance(gallery, StoredRows):
            return self
        if not all(torch.equal(*sides) for sides in ((self.query_labels, self.gallery_labels), *given)):
            return self
        here = torch.equal(queries, gallery) and torch.equal(*self.share)
        if self.processes.largest([float(not here)])[0]:
            return self
        # where no two items share a code, it says no more than that an item is not its own candidate
        shared = {
            name: code if code is not None and len(code.unique()) < len(code) else None
            for name, code in self.codes.items()
        }
        return replace(self, gallery=queries, codes=shared, same_set=True)


def collect_inputs(
    call: str,
    held: Share,
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
        held: The share of this process; it may hold nothing of a set, but must say whether there is a gallery.
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
    processes, same_set = held.processes, gallery is None
    if relevance is not None:
        _refuse_labels_beside_relevance(call, query_labels, gallery_labels)
        query_labels, gallery_labels = _no_labels(queries), None if same_set else _no_labels(gallery)
    _check_gallery_labels(call, gallery, gallery_labels)
    read = functools.partial(_part, call, processes, memory=memory, as_codes=as_codes)
    own = read("queries", queries, query_labels, held.query_places)
    others = own if same_set else read("gallery", gallery, gallery_labels, held.gallery_places)
    _check_dims(call, own.vectors.shape[1], others.vectors.shape[1], as_codes=as_codes)
    label_codes, names = _label_codes(call, processes, own, others, same_set=same_set)
    codes = _codes_of_all(call, processes, own, others, same_set=same_set, given=arrays)
    counted, counted_items, notes = _first_of_each_id(processes, own, others, label_codes, codes, same_set=same_set)
    codes = _codes_of_counted(codes, counted, counted_items, same_set=same_set)
    own = _without_repeated(call, own, counted, relevance, memory)
    others = own if same_set else _without_repeated(call, others, counted_items, relevance, memory)
    sides = _labels_of_counted(label_codes, counted, counted if same_set else counted_items)
    of_queries, of_items = sides  # of sets of labels the number of each set
    has_labels = relevance is None
    if names is not None and isinstance(names[0], tuple):
        relevance = _relevance_of_sets(names, of_queries, of_items, same_set=same_set)
        names, of_items = None, torch.zeros_like(of_items)
    if relevance is not None:
        of_queries = _clusters(call, relevance, own.length, others.length, same_set=same_set)
    inputs = RetrievalInputs(
        *_of_one_type(own.vectors, others.vectors),  # one set stays one tensor
        of_queries,
        of_items,
        codes,
        same_set,
        ShardIndex(own.places, others.places),
        processes,
        names,
        given=relevance,
        counted=counted,
        notes_on_ids=tuple(notes),
    )
    if with_copies and has_labels:
        inputs = replace(inputs, copies=_copies(inputs, (own.hashes, others.hashes), sides, as_codes=as_codes))
    return inputs


def _label_codes(
    call: str, processes: Processes, own: _Part, others: _Part, *, same_set: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...] | None]:
    """Return the codes of the labels of all queries and of all gallery items, and the label of each code. Collective."""
    given = {"query_labels": own.labels}
    if not same_set:
        given["gallery_labels"] = others.labels
    codes, names = encode(call, given, processes)
    of_queries = processes.placed(codes[0], own.places, own.length)
    of_items = of_queries if same_set else processes.placed(codes[1], others.places, others.length)
    return (of_queries, of_items), names


def _labels_of_counted(
    labels: tuple[Tensor, Tensor], queries: Tensor | None, items: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the labels of the queries and items with these indices, which are all for None."""
    of_queries, of_items = labels
    return (
        of_queries if queries is None else of_queries[queries],
        of_items if items is None else of_items[items],
    )


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


def _codes_of_all(
    call: str, processes: Processes, own: _Part, others: _Part, *, same_set: bool, given: dict[str, Any]
) -> dict[str, Tensor | None]:
    """Return the ids and groups of the items of all processes, by the name of the argument. Collective."""
    sizes = len(own.vectors), len(others.vectors)
    mine = exclusion_codes(call, given, *sizes, same_set=same_set, processes=processes)
    codes: dict[str, Tensor | None] = {}
    for name, code in mine.items():
        part = own if name.startswith("query") else others
        codes[name] = None if code is None else processes.placed(code, part.places, part.length)
    return codes


def _codes_of_counted(
    codes: dict[str, Tensor | None], queries: Tensor | None, items: Tensor | None, *, same_set: bool
) -> dict[str, Tensor | None]:
    """Return the ids and groups of the queries and items with these indices.

    The items of one set are its queries. Its ids have done their work: those that are counted differ.
    """
    if same_set:
        items = queries
        codes = codes | {"query_ids": None}
    found: dict[str, Tensor | None] = {}
    for name, code in codes.items():
        index = queries if name.startswith("query") else items
        found[name] = code if code is None or index is None else code[index]
    return found


def _without_repeated(
    call: str, part: _Part, counted: Tensor | None, relevance: given_relevance.Relevance | None, memory: float
) -> _Part:
    """Return the items that are counted, which are all for None; a relevance of all rows is refused."""
    if counted is None:
        return part
    if relevance is not None:
        raise ValueError(
            f"{call}: relevance is of all rows, and {part.length - len(counted):,} of them repeat an id. Pass each item "
            "once, and the relevance of these."
        )
    return part.only(counted, memory)


def _copies(
    inputs: RetrievalInputs,
    known: tuple[NDArray[np.int64] | None, NDArray[np.int64] | None],
    labels: tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]],
    *,
    as_codes: bool,
) -> Copies:
    """Return the copies of all queries. Collective.

    Args:
        inputs: The sets.
        known: Hashes of the rows of this process that were read, in their type.
        labels: Those of all queries and items; of sets of labels their number.
        as_codes: Whether rows are binary codes.
    """
    processes, rows = inputs.processes, (inputs.queries, inputs.gallery)
    double = any(processes.gather(any(side.dtype == torch.float64 for side in rows)))
    dtype = torch.int8 if as_codes else torch.float64 if double else torch.float32

    def all_of(side: int) -> Side:
        hashes, places, of_side = known[side], inputs.share[side], labels[side]
        own = hashes if hashes is not None and rows[side].dtype == dtype else hashes_of(rows[side], dtype)
        return Side(processes.placed(torch.from_numpy(own), places, len(of_side)).numpy(), of_side.numpy())

    queries = all_of(0)
    items = queries if inputs.same_set else all_of(1)
    exclusions = [
        (of_queries.numpy(), of_items.numpy())
        for kind in ("ids", "groups")
        if (of_queries := inputs.codes[f"query_{kind}"]) is not None
        and (of_items := inputs.codes[f"gallery_{kind}"]) is not None
    ]
    itself = np.arange(len(labels[0])) if inputs.same_set else None
    own_items = inputs.gallery, inputs.share.gallery.numpy()
    return Copies.among(queries, items, itself, exclusions, own_items, processes, as_codes=as_codes)


def _notes_on_ids_of_both(labels: Tensor, others: Tensor, ids: Tensor | None, other_ids: Tensor | None) -> list[str]:
    """Return a description of ids that name a query and a gallery item that cannot be one item; nothing where all can.

    Embeddings may differ, for two models may have made them; labels may not.
    """
    if ids is None or other_ids is None or not len(labels) or not len(others):
        return []
    ordered, order = other_ids.sort(stable=True)
    at = torch.searchsorted(ordered, ids).clamp(max=len(ordered) - 1)
    is_there = ordered[at] == ids
    differing = int((is_there & (labels != others[order[at]])).sum())
    if not differing:
        return []
    return [
        f"{differing:,} ids name queries and gallery items of different labels, which cannot be the same items, and no such "
        "item is a candidate for its query. Pass ids that mean the same in both sets, such as the path of a file, or none "
        "if no query is in the gallery."
    ]


def _first_of_each_id(
    processes: Processes,
    own: _Part,
    others: _Part,
    labels: tuple[Tensor, Tensor],
    codes: dict[str, Tensor | None],
    *,
    same_set: bool,
) -> tuple[Tensor | None, Tensor | None, list[str]]:
    """Return the index of the first query and of the first item of each id, and what is wrong with the ids. Collective.

    An index is None if no id of the set repeats, or none are given.
    """
    notes = _notes_on_ids_of_both(*labels, codes["query_ids"], codes["gallery_ids"])
    indices: list[Tensor | None] = []
    for part, of_part, name in zip((own, others), labels, ("query_ids", "gallery_ids"), strict=True):
        ids = codes[name]
        first = None if ids is None else first_of_each(ids)
        if ids is not None and first is not None and len(first) == len(ids):
            first = None
        indices.append(first)
        notes += _notes_on_repeated_ids(processes, part, of_part, "" if same_set else f"{name}: ", ids, first)
    return indices[0], indices[1], notes


def _notes_on_repeated_ids(
    processes: Processes,
    part: _Part,
    labels: Int[Tensor, "items"],
    beginning: str,
    ids: Int[Tensor, "items"] | None,
    first: Tensor | None,
) -> list[str]:
    """Return what is wrong with the ids of a side, of which only the first item of each is counted. Collective."""
    if ids is None or first is None:
        return []
    own_sketches = sketches(part.vectors).T.contiguous() if len(part.places) else torch.empty(SKETCH, 0).double()
    sketch = processes.placed(own_sketches, part.places, part.length).T
    note = note_on_ids(ids, labels, sketch)
    if note is None:
        return []
    return [f"{beginning}{note}"]


def with_stored_arrays(
    queries: Any, gallery: Any, arrays: dict[str, Any], *, labelled: bool
) -> tuple[Any, Any, dict[str, Any]]:
    """Return queries, gallery and their labels, ids and groups, with those that files hold where none are passed.

    Ids and groups that only the files of one of two sets hold are left out: they would exclude nobody.

    Args:
        queries: Rows of the queries; `Shards` that say which rows are queries are divided into queries and gallery.
        gallery: Rows of the gallery; None for one set.
        arrays: Labels, ids and groups by the name of the argument, such as `query_ids`; None where none are passed.
        labelled: Whether labels are used.

    Raises:
        ValueError: If the files of one of two sets hold groups, and the other set has none.
    """
    passed = {name: array for name, array in arrays.items() if array is not None}
    if isinstance(queries, Shards) and queries.queries is not None and gallery is None:
        shards, is_query = queries, queries.queries
        queries, gallery = ChosenRows(shards, is_query), ChosenRows(shards, ~is_query)
    found = dict(passed)
    for prefix, rows in (("query", queries), ("gallery", gallery)):
        if isinstance(rows, Shards | ChosenRows):
            stored = {f"{prefix}_ids": rows.ids, f"{prefix}_groups": rows.groups}
            if labelled:
                stored[f"{prefix}_labels"] = rows.labels
            found = stored | found
    if gallery is not None:
        _refuse_groups_of_one(found, passed)
        for kind in ("ids", "groups"):
            pair = {f"query_{kind}", f"gallery_{kind}"}
            if not pair & passed.keys() and any(found.get(name) is None for name in pair):
                found = {name: array for name, array in found.items() if name not in pair}
    return queries, gallery, found


def _refuse_groups_of_one(found: Mapping[str, Any], passed: Mapping[str, Any]) -> None:
    """Refuse groups that the files of one of two sets hold, if the other set has none."""
    prefixes = {"query", "gallery"}
    with_groups = {prefix for prefix in prefixes if found.get(f"{prefix}_groups") is not None}
    if len(with_groups) != 1:
        return
    [grouped] = with_groups
    [other] = prefixes - with_groups
    if f"{grouped}_groups" not in passed:
        names = {"query": "queries", "gallery": "gallery"}
        raise ValueError(
            f"Only the files of the {names[grouped]} hold groups: they would exclude nobody. Pass groups= to the Shards of "
            f"both sets, or {other}_groups=."
        )


def _no_labels(rows: Any) -> Int[Tensor, "items"]:
    if is_source(rows):
        return torch.zeros(int(rows.shape[0]), dtype=torch.int64)
    return torch.zeros(len(rows) if hasattr(rows, "__len__") else 0, dtype=torch.int64)


def _clusters(
    call: str, relevance: given_relevance.Relevance, queries: int, gallery: int, *, same_set: bool
) -> Int[Tensor, "queries"]:
    """Return the cluster of each query for intervals: each its own, if the relevance names none."""
    _check_relevance(call, relevance, queries, gallery, same_set=same_set)
    return torch.arange(queries) if relevance.clusters is None else torch.from_numpy(relevance.clusters)


def _check_relevance(
    call: str, relevance: given_relevance.Relevance, queries: int, gallery: int, *, same_set: bool
) -> None:
    """Refuse a relevance of other sets."""
    if (relevance.queries, relevance.gallery, relevance.one_set) != (queries, gallery, same_set):
        sets = f"{queries:,} queries in one set" if same_set else f"{queries:,} queries and {gallery:,} gallery items"
        raise ValueError(
            f"{call}: the relevance is {relevance}, but there are {sets}. Make it for the rows that are passed, with "
            "gallery_ids or the number of gallery items where there is a gallery."
        )


@dataclass(frozen=True)
class _Part:
    """What this process holds of the queries or of the gallery."""

    vectors: Tensor | StoredRows
    # as they were given
    labels: Labels
    # index of each item among all
    places: Int[Tensor, "own"]
    # number of items of all processes
    length: int
    # of the rows that are read, in their type; None for rows in memory, whose hashes take little time
    hashes: NDArray[np.int64] | None = None

    def only(self, counted: Int[Tensor, "counted"], memory: float) -> _Part:
        """Return the part of some of all items, ascending; they are numbered anew."""
        here = torch.isin(self.places, counted)
        if isinstance(self.vectors, StoredRows):
            vectors: Tensor | StoredRows = StoredRows(_SomeRows(self.vectors, here.numpy()), memory)
        else:
            vectors = self.vectors[here]
        hashes = None if self.hashes is None else self.hashes[here.numpy()]
        places = torch.searchsorted(counted, self.places[here])
        return _Part(vectors, self.labels[here], places, len(counted), hashes)


class _SomeRows:
    """Some rows of a source, as a source.

    Args:
        rows: All rows.
        mask: (rows,) Which of them.
    """

    def __init__(self, rows: StoredRows, mask: Bool[np.ndarray, "rows"]) -> None:
        self._all, self._rows = rows, np.flatnonzero(mask)
        self.shape, self.dtype = (len(self._rows), rows.dim), rows.dtype

    def __getitem__(self, some: slice) -> Tensor:
        """Read neighbouring rows, and pass over those between them."""
        wanted = self._rows[some]
        if not len(wanted):
            return self._all.read(slice(0, 0))
        return self._all.read(slice(wanted[0], wanted[-1] + 1))[torch.from_numpy(wanted - wanted[0])]


def _part(
    call: str, processes: Processes, name: str, vectors: Any, labels: Any, places: Any, *, memory: float, as_codes: bool
) -> _Part:
    """Validate one side. Collective."""
    given, is_read = vectors, is_source(vectors) and not as_codes
    if not is_read:
        vectors = as_tensor(vectors[:] if is_source(vectors) else vectors, name, call).cpu()
    # halves in memory stay what they are as items, which are converted as they are compared
    in_memory = isinstance(given, Tensor) or type(given) is np.ndarray or not is_read
    may_stay = name == "gallery" or not in_memory
    size = 4.0 * math.prod(vectors.shape) if may_stay and not as_codes and len(vectors.shape) == 2 else 0.0
    if any(processes.gather(size > (LOADED_SHARE if is_read else COPIED_SHARE) * memory)) and size:
        vectors = StoredRows(vectors, memory) if is_read or vectors.is_floating_point() else vectors
    elif is_read:
        stored = StoredRows(vectors, memory)  # a source need not have a length
        vectors = stored.read(slice(0, len(stored)))
    items, dim = len(vectors) if vectors.ndim else 0, 0
    if items or processes.count == 1:  # one of several may hold nothing
        if as_codes:
            vectors = signs(vectors, name, call)
        else:
            check_matrix(vectors, name, call)
            vectors = vectors if isinstance(vectors, StoredRows) else computable(vectors)
        dim = vectors.shape[1]
    label_name = "query_labels" if name == "queries" else "gallery_labels"
    own_labels = read_labels(labels, items, label_name, _nouns(name, as_codes=as_codes), call, sets=True)
    known = processes.gather((items, dim, vectors.dtype))
    holders = [(rank, *rest) for rank, rest in enumerate(known) if rest[0]]
    if not holders:
        raise ValueError(f"{call}: {name} is empty (shape (0, {dim})) in every process. Pass at least one item.")
    refuse_other_dims(call, name, {rank: of_rank for rank, _, of_rank, *_ in holders})
    dtype = functools.reduce(torch.promote_types, (holder[3] for holder in holders))
    if not isinstance(vectors, StoredRows):
        vectors = vectors.to(dtype) if items else torch.empty(0, holders[0][2], dtype=dtype)
    counts = [held[0] for held in known]
    length, first = sum(counts), sum(counts[: processes.rank])
    if places is None:
        places = torch.arange(first, first + items)
    places = check_labels(places, items, "places", name, call)
    check_places(call, name, torch.cat(processes.gather(places)))
    bad, hashes = _checked_rows(vectors, as_codes=as_codes)
    where = f", which is {given.where(int(bad[0]))}" if len(bad) and isinstance(given, Shards | ChosenRows) else ""
    refuse_non_finite(torch.cat(processes.gather(places[bad])).sort().values, length, name, call, where)
    return _Part(vectors, own_labels, places, length, hashes)


def _checked_rows(rows: Tensor | StoredRows, *, as_codes: bool) -> tuple[Int[Tensor, "bad"], NDArray[np.int64] | None]:
    """Return the indices of rows with NaN or Inf and, of rows that are read, the hash of each, from the same reading."""
    nothing = torch.empty(0, dtype=torch.int64)
    if not isinstance(rows, StoredRows):
        return nothing if as_codes else non_finite_rows(rows), None
    bad, hashes = [nothing], [np.empty(0, np.int64)]
    for some, values in rows.chunks():
        bad.append(some.start + non_finite_rows(values))
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
    """Refuse vectors of different dimensions, given that of each process that holds some."""
    first, dim = next(iter(dims.items()))
    for rank, other in dims.items():
        if other != dim:
            raise ValueError(
                f"{call}: {name} have dimension {dim} in process {first}, {other} in process {rank}. All must come from the "
                "same model."
            )


def check_places(call: str, name: str, places: Int[Tensor, "items"]) -> None:
    """Refuse places of all items that are not each of 0, 1, 2, ... once."""
    if not torch.equal(places.sort().values, torch.arange(len(places))):
        raise ValueError(
            f"{call}: the places of {name} must be 0 to {len(places) - 1}, each once over all processes. Drop repeated "
            "items first."
        )
