"""`Relevance`: the relevant gallery items of each query with their grades, and the ignored items."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray

from fewshot_callbacks.engine.relevance import Lists
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._reading import as_list, as_tensor
from fewshot_callbacks.functional.retrieval._label_sets import (
    clusters_of_sets,
    number_labels,
    read_label_sets,
    shared_labels,
)
from fewshot_callbacks.functional.retrieval.judgements import (
    as_grade,
    check_choices,
    distinct_judgements,
    finite_grades,
    item_numbers,
    positive_grades,
    read_judgements,
    refuse_unknown_ids,
    rows_of_ids,
)
from fewshot_callbacks.system.words import counted, verb, with_article


class Absent(NamedTuple):
    """Relevant items that are not in the gallery. Query i has the grades `grades[start[i] : stop[i]]`."""

    start: Int[np.ndarray, "queries"]
    stop: Int[np.ndarray, "queries"]
    grades: Float[np.ndarray, "absent"]

    @property
    def sizes(self) -> Int[np.ndarray, "queries"]:
        """Number of such items for each query."""
        sizes: NDArray[np.int64] = self.stop - self.start
        return sizes

    def padded(self, queries: Int[np.ndarray, "chosen"]) -> Float[np.ndarray, "chosen columns"]:
        """Return the grades of some queries, padded with 0."""
        sizes = self.sizes[queries]
        column = np.arange(sizes.max(initial=0))
        entries = np.minimum(self.start[queries, None] + column, max(0, len(self.grades) - 1))
        return np.where(column < sizes[:, None], self.grades[entries], 0.0)


@dataclass(frozen=True, eq=False)
class Relevance:
    """The relevant gallery items of each query with their grades, and the ignored items. It replaces labels.

    Create it with `from_judgements`, `from_label_sets` or `from_lists`, and pass it to `evaluate_retrieval` instead of
    labels. Items that are neither relevant nor ignored are irrelevant. An ignored item is not a candidate: it does not
    occupy a rank. Memory is 4 bytes for each relevant and each ignored pair, and 8 more for each grade (2 for the number of
    shared labels). Irrelevant pairs need no memory.

    Attributes:
        gallery: Number of gallery items.
        one_set: Whether queries and gallery are one set, in which an item is not a candidate for itself.
        mutual: Whether queries and gallery are one set in which j is in the lists of i whenever i is in the lists of j.
        clusters: (queries,) index of the cluster of each query. Intervals allow for the dependence of queries in the same
            cluster. None if queries are independent.
        unknown: Number of judgements with a query or an item that has no row.
        at_least: Smallest relevant grade of judgements.
        below: Number of judgements with a positive grade below `at_least`. They are irrelevant.

    Examples:
        >>> relevance = Relevance.from_lists([[0, 2], [1]], gallery=3)
        >>> relevance
        Relevance(2 queries, 3 gallery items, 3 relevant pairs, 0 ignored)
        >>> from fewshot_callbacks import evaluate_retrieval
        >>> queries, items = [[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.1], [0.5, 0.5], [0.2, 1.0]]
        >>> report = evaluate_retrieval(queries, gallery=items, relevance=relevance)
        >>> round(report.mAP, 4), report["recall@1"]
        (0.6667, 0.5)
    """

    # relevant and ignored items of each query, ascending
    _relevant: Lists
    _ignored: Lists
    gallery: int
    one_set: bool
    mutual: bool
    # grade of each relevant item; None if all are 1
    _grades: Shaped[np.ndarray, "pairs"] | None = field(default=None, repr=False)
    clusters: Int[np.ndarray, "queries"] | None = field(default=None, repr=False)
    unknown: int = 0
    # relevant items that are not in the gallery, which count as never retrieved; None if there are none
    _absent: Absent | None = field(default=None, repr=False)
    at_least: float = 1
    below: int = 0

    @classmethod
    def from_lists(
        cls,
        relevant: Sequence[Any],
        ignored: Sequence[Any] | None = None,
        *,
        gallery: Any | None = None,
        grades: Sequence[Any] | None = None,
        clusters: Any | None = None,
    ) -> Relevance:
        """Return a relevance from lists of relevant and ignored gallery items.

        Args:
            relevant: For each query the indices of its relevant gallery items, in any order. A list may be empty.
            ignored: For each query the indices of items that are neither hits nor misses, such as junk images.
            gallery: Number of gallery items; by default queries and gallery are one set.
            grades: For each query the grade of each relevant item, positive and finite; by default 1.
            clusters: (queries,) integers. Queries with the same integer depend on each other, such as the captions of one
                image, and intervals allow for this. By default queries are independent.

        Returns:
            A relevance for these queries in this order.

        Raises:
            ValueError: If lengths do not fit, an index is not a gallery item or occurs twice, an item is both relevant and
                ignored, or a grade is not positive and finite.

        Examples:
            >>> Relevance.from_lists([[1], [0], []], ignored=[[2], [], []], grades=[[3], [1], []])
            Relevance(3 queries in one set, 2 relevant pairs, 1 ignored)
        """
        call = "Relevance.from_lists"
        queries = len(relevant)
        items = queries if gallery is None else _number_of_items(call, gallery)
        if ignored is not None and len(ignored) != queries:
            raise InputError(
                f"{call}: there are {counted(queries, 'list')} of relevant items, but {len(ignored)} of ignored items. Pass "
                "one of each for every query."
            )
        lists = _lists(call, "relevant", relevant, items)
        ignored_lists = Lists.none(queries) if ignored is None else _lists(call, "ignored", ignored, items)
        _refuse_both(call, lists, ignored_lists, items)
        return cls(
            _relevant=lists,
            _ignored=ignored_lists,
            gallery=items,
            one_set=gallery is None,
            mutual=gallery is None and _are_mutual(lists) and _are_mutual(ignored_lists),
            _grades=None if grades is None else _grades_of_lists(call, relevant, grades),
        )._with(call, clusters)

    @classmethod
    def from_judgements(
        cls,
        judgements: Mapping[Any, Any] | tuple[Any, ...] | str | Path,
        query_ids: Sequence[Any],
        gallery_ids: Sequence[Any] | None = None,
        *,
        at_least: Any = 1,
        unknown: str = "error",
        clusters: Any | None = None,
    ) -> Relevance:
        """Return a relevance from judgements (qrels) by ids, in the formats of TREC, BEIR and MS MARCO.

        Args:
            judgements: `{query: {item: grade}}`, `{query: [items]}`, a tuple of two or three sequences of equal length
                (queries, items) or (queries, items, grades), or the path of a file. The file has the four columns of TREC,
                or the columns query, item and grade of BEIR, with or without a header. Grades of 0 or less and pairs without
                a judgement are irrelevant.
            query_ids: Id of each row of the queries: integers or strings, each once.
            gallery_ids: Id of each row of the gallery; by default queries and gallery are one set.
            at_least: The smallest relevant grade (`-l` of trec_eval), above 0. Lower grades are irrelevant, also for nDCG.
                trec_eval's nDCG uses every positive grade, so evaluate twice to reproduce both.
            unknown: What to do with judgements on ids that no query or no item has: `error`, or `ignore`. Ignored judgements
                are counted in `unknown`. As in trec_eval, a relevant item that is not in the gallery counts as never
                retrieved, and a query without a row is skipped.
            clusters: (queries,) integers. Queries with the same integer depend on each other, and intervals allow for this.

        Returns:
            A relevance for the queries in the order of `query_ids`.

        Raises:
            ValueError: If an id is unknown or occurs twice, a pair has two judgements with different grades, or a grade is
                not a finite number.

        Examples:
            >>> judged = {"q1": {"d1": 2, "d3": 1}, "q2": {"d2": 0}}
            >>> Relevance.from_judgements(judged, ["q1", "q2"], ["d1", "d2", "d3"])
            Relevance(2 queries, 3 gallery items, 2 relevant pairs, 0 ignored)
        """
        call = "Relevance.from_judgements"
        one_set = gallery_ids is None
        least = check_choices(call, at_least, unknown)
        if isinstance(judgements, str | Path):  # the ids of a file are strings
            query_ids = [str(query) for query in as_list(query_ids)]
            gallery_ids = None if gallery_ids is None else [str(item) for item in as_list(gallery_ids)]
        judged_queries, judged_items, grades = read_judgements(call, judgements)
        items_of_rows = query_ids if gallery_ids is None else gallery_ids
        row_of_query = rows_of_ids(call, "query_ids", query_ids, judged_queries)
        row_of_item = rows_of_ids(call, "gallery_ids", items_of_rows, judged_items)
        refuse_unknown_ids(
            call, unknown, (("query", judged_queries, row_of_query), ("item", judged_items, row_of_item))
        )
        # for each judgement the row of its query, -1 for no row, and the index of its item
        row = np.array([row_of_query.get(query, -1) for query in judged_queries], np.int64)
        item, numbers = item_numbers(judged_items, row_of_item, len(items_of_rows))
        distinct = distinct_judgements(
            call, row, item, finite_grades(call, grades), numbers, (judged_queries, judged_items)
        )
        distinct = distinct[row[distinct] >= 0]
        relevant = distinct[grades[distinct] >= least]
        is_present = item[relevant] < len(items_of_rows)
        present = relevant[is_present]
        missing = relevant[~is_present]
        lists = Lists(*_spans(row[present], len(query_ids)), item[present].astype(np.int32))
        return cls(
            _relevant=lists,
            _ignored=Lists.none(len(query_ids)),
            gallery=len(items_of_rows),
            one_set=one_set,
            mutual=one_set and _are_mutual(lists),
            _grades=grades[present],
            unknown=int(((row < 0) | (item >= len(items_of_rows))).sum()),
            _absent=Absent(*_spans(row[missing], len(query_ids)), grades[missing]) if len(missing) else None,
            at_least=least,
            below=int(((grades[distinct] > 0) & (grades[distinct] < least)).sum()),
        )._with(call, clusters)

    @classmethod
    def from_label_sets(cls, targets: Any, gallery_targets: Any | None = None) -> Relevance:
        """Return the relevance of items with several labels each.

        An item is relevant to a query if they share at least one label. The number of shared labels is its grade.

        Args:
            targets: (queries, labels) zeros and ones: a tensor, an array or a `scipy.sparse` matrix; or a list with the
                labels of each query, all strings or all integers, such as [{"sky", "sea"}, {"sky"}].
            gallery_targets: The labels of the gallery items in the same form; by default queries and gallery are one set.

        Returns:
            A relevance. Intervals allow for the dependence of queries with the same labels.

        Raises:
            ValueError: If targets contain anything else, their numbers of labels differ, or some labels are strings and some
                are integers.

        Examples:
            >>> Relevance.from_label_sets([{"sky", "sea"}, {"sky", "sea", "tree"}, {"tree"}])
            Relevance(3 queries in one set, 4 relevant pairs, 0 ignored)
        """
        call = "Relevance.from_label_sets"
        one_set = gallery_targets is None
        query_sets, width = read_label_sets(call, "targets", targets)
        if one_set:
            item_sets = query_sets
            item_width = width
        else:
            item_sets, item_width = read_label_sets(call, "gallery_targets", gallery_targets)
        if width is not None and item_width is not None and width != item_width:
            raise InputError(
                f"{call}: targets have {counted(width, 'label')}, but gallery_targets have {item_width}. Pass tables with "
                "the same label in column j of both."
            )
        of_query, of_item = number_labels(call, {"targets": query_sets, "gallery_targets": item_sets})
        lists, grades = shared_labels(of_query, of_item, one_set=one_set)
        return cls(
            _relevant=lists,
            _ignored=Lists.none(len(query_sets)),
            gallery=len(item_sets),
            one_set=one_set,
            mutual=one_set,
            _grades=grades,
            clusters=clusters_of_sets(of_query),
        )

    def _with(self, call: str, clusters: Any | None) -> Relevance:
        """Return the same relevance with clusters of queries."""
        if clusters is None:
            return self
        numbers = as_tensor(clusters, "clusters", call).numpy()
        if numbers.shape != (self.queries,) or not np.issubdtype(numbers.dtype, np.integer):
            raise InputError(
                f"{call}: clusters have the shape {numbers.shape} and the type {numbers.dtype}. Pass one integer for each "
                f"of the {counted(self.queries, 'query')}."
            )
        return replace(self, clusters=np.unique(numbers, return_inverse=True)[1])

    @property
    def queries(self) -> int:
        """Number of queries."""
        return len(self._relevant.start)

    def digest(self) -> str:
        """Return eight hexadecimal characters that almost certainly differ for different relevances."""
        digest = hashlib.blake2b(digest_size=4)
        absent = () if self._absent is None else self._absent
        for array in (*self._relevant, *self._ignored, self._grades, self.clusters, *absent):
            digest.update(b"-" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def part(self, queries: NDArray[np.int64], numbers: NDArray[np.int64]) -> Relevance:
        """Return the relevance of some queries, with new indices for the gallery items.

        Args:
            queries: Indices of the queries.
            numbers: (gallery,) old index of the item with each new index.
        """
        is_same = np.array_equal(queries, np.arange(self.queries)) and np.array_equal(numbers, np.arange(self.gallery))
        if is_same:  # large lists are not copied
            return self
        new_numbers = np.argsort(numbers)
        relevant, order = _renumbered(self._relevant, queries, new_numbers)
        ignored, _ = _renumbered(self._ignored, queries, new_numbers)
        absent = self._absent
        if absent is not None:
            absent = absent._replace(start=absent.start[queries], stop=absent.stop[queries])
        return replace(
            self,
            _relevant=relevant,
            _ignored=ignored,
            _grades=None if self._grades is None else self._grades[order],
            _absent=absent,
        )

    @property
    def notes(self) -> list[str]:
        """Notes on the judgements, for the reader of the values."""
        if not self.unknown:
            return []
        subject = "judgement names" if self.unknown == 1 else "judgements name"
        note = f"{self.unknown:,} {subject} a query or an item that has no row."
        absent = 0 if self._absent is None else len(self._absent.grades)
        if absent:
            note += (
                f" Relevant items that are missing from the gallery count as never retrieved: the evaluated queries have "
                f"{absent:,}."
            )
        return [note]

    def __repr__(self) -> str:
        sets = " in one set" if self.one_set else f", {counted(self.gallery, 'gallery item')}"
        relevant = int(self._relevant.sizes.sum())
        ignored = int(self._ignored.sizes.sum())
        missing = "" if self._absent is None else f", {len(self._absent.grades):,} not in the gallery"
        return (
            f"Relevance({counted(self.queries, 'query')}{sets}, {counted(relevant, 'relevant pair')}{missing}, "
            f"{ignored:,} ignored)"
        )


class JudgedItems(NamedTuple):
    """The relevant and ignored items of a `Relevance`, in the form that the engine reads.

    Attributes:
        relevant: Relevant items of each query, ascending.
        ignored: Ignored items of each query, ascending.
        grades: Grade of each entry of `relevant`; None if all are 1.
        absent: Relevant items that are not in the gallery; None if there are none.
    """

    relevant: Lists
    ignored: Lists
    grades: Shaped[np.ndarray, "pairs"] | None
    absent: Absent | None


def judged_items(relevance: Relevance) -> JudgedItems:
    """Return the relevant and ignored items of a relevance."""
    return JudgedItems(relevance._relevant, relevance._ignored, relevance._grades, relevance._absent)


def _renumbered(
    lists: Lists, queries: NDArray[np.int64], new_numbers: NDArray[np.int64]
) -> tuple[Lists, NDArray[np.int64]]:
    """Return the lists of some queries with new item indices, ascending, and the old position of each entry."""
    sizes = lists.sizes[queries]
    ends = np.append(0, np.cumsum(sizes))
    rows = np.repeat(np.arange(len(queries)), sizes)
    entries = np.repeat(lists.start[queries] - ends[:-1], sizes) + np.arange(ends[-1])
    items = new_numbers[lists.items[entries]]
    order = np.lexsort((items, rows))
    return Lists(ends[:-1], ends[1:], items[order].astype(np.int32)), entries[order]


# ------------------------------------------------------------------------------------------------------------- reading


def _lists(call: str, name: str, lists: Sequence[Any], items: int) -> Lists:
    """Return the lists, if each index is a gallery item and occurs once in its list."""
    for query, indices in enumerate(lists):
        numbers = np.asarray(indices)
        if not numbers.size:
            continue
        if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
            raise InputError(f"{call}: {name}[{query}] has the type {numbers.dtype}. Pass indices of gallery items.")
        lowest = numbers.min()
        highest = numbers.max()
        if lowest < 0 or highest >= items:
            wrong = lowest if lowest < 0 else highest
            raise InputError(
                f"{call}: {name}[{query}] contains {wrong}, but there are {counted(items, 'gallery item')}. Pass indices "
                "that start at 0."
            )
        if len(np.unique(numbers)) < numbers.size:
            raise InputError(f"{call}: {name}[{query}] contains an item twice. Pass each item once.")
    return Lists.of(lists)


def _grades_of_lists(call: str, relevant: Sequence[Any], grades: Sequence[Any]) -> NDArray[np.float64]:
    """Return the grade of each relevant item, in the ascending order of `Lists.of`."""
    if [len(of_query) for of_query in grades] != [len(of_query) for of_query in relevant]:
        raise InputError(
            f"{call}: grades and relevant items have different lengths. Pass one grade for each relevant item."
        )
    values = positive_grades(
        call, np.array([as_grade(call, grade) for of_query in grades for grade in of_query], np.float64)
    )
    ordered = []
    start = 0
    for indices in relevant:
        order = np.argsort(np.asarray(indices, np.int64), kind="stable")
        ordered.append(values[start + order])
        start += len(order)
    return np.concatenate([np.empty(0), *ordered])


def _pair_keys(lists: Lists, items: int) -> NDArray[np.int64]:
    """Return a unique integer for each pair of a query and an item in its list."""
    rows = np.repeat(np.arange(len(lists.start)), lists.sizes)
    keys: NDArray[np.int64] = rows * items + lists.items
    return keys


def _are_mutual(lists: Lists) -> bool:
    """Return whether i is in the list of j for each j in the list of i."""
    items = len(lists.start)
    rows = np.repeat(np.arange(items), lists.sizes)
    return bool((np.sort(_pair_keys(lists, items)) == np.sort(lists.items * items + rows)).all())


def _refuse_both(call: str, relevant: Lists, ignored: Lists, items: int) -> None:
    """Refuse an item that is relevant and ignored."""
    both = np.intersect1d(_pair_keys(relevant, items), _pair_keys(ignored, items))
    if len(both):
        query, item = divmod(int(both[0]), items)
        raise InputError(
            f"{call}: {counted(len(both), 'pair')} {verb(len(both), 'is', 'are')} both relevant and ignored, such as "
            f"query {query} and item {item}. Keep each item in only one of the lists."
        )


def _number_of_items(call: str, gallery: Any) -> int:
    """Return the number of gallery items."""
    number = gallery.__index__() if isinstance(gallery, int | np.integer) and not isinstance(gallery, bool) else 0
    if number < 1:
        words = repr(gallery) if np.ndim(gallery) == 0 else with_article(type(gallery).__name__)
        raise InputError(
            f"{call}: gallery is {words}, not the number of gallery items. Pass gallery=len(...), or None if queries and "
            "gallery are one set."
        )
    return int(number)


def _spans(rows: Int[np.ndarray, "pairs"], queries: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and the end of each query's entries, given the ascending row of each entry."""
    offsets = np.searchsorted(rows, np.arange(queries + 1))
    return offsets[:-1], offsets[1:]
