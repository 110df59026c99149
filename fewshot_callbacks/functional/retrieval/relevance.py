"""`Relevance`: which gallery items are relevant to each query, with which grade, and which are ignored."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy.typing import NDArray

from fewshot_callbacks.engine.relevance import Lists
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.files.text import Line, read_lines
from fewshot_callbacks.functional._reading import as_tensor
from fewshot_callbacks.system.words import counted, verb, with_article

# Ids that a message shows.
SHOWN = 3
# What unknown='ignore' does with judgements of an unknown query or item, for messages.
IGNORED = {"query": "leave these judgements out", "item": "count those that are relevant as never found"}


class Absent(NamedTuple):
    """Relevant items that are not in the gallery: those of query i are `grades[start[i] : stop[i]]`."""

    start: Int[np.ndarray, "queries"]
    stop: Int[np.ndarray, "queries"]
    grades: Float[np.ndarray, "absent"]

    @property
    def sizes(self) -> Int[np.ndarray, "queries"]:
        """Number of such items of each query."""
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
    """Which gallery items are relevant to each query, with which grade, and which are ignored, where labels do not say it.

    Everything else is irrelevant. An ignored item is no candidate: it takes up no rank. Make one with `from_judgements`,
    `from_label_sets` or `from_lists`, and pass it to `evaluate_retrieval` in place of labels. It takes 4 bytes for
    each relevant and each ignored pair, 8 more where grades are given (2 for the number of shared labels), and never
    anything for all pairs.

    Examples:
        >>> relevance = Relevance.from_lists([[0, 2], [1]], gallery=3)
        >>> relevance
        Relevance(2 queries, 3 gallery items, 3 relevant pairs, 0 ignored)
    """

    _relevant: Lists
    """relevant items of each query, ascending"""
    _ignored: Lists
    """ignored items of each query, ascending"""
    gallery: int
    """number of gallery items"""
    one_set: bool
    """queries and gallery are one set, in which an item is no candidate for itself"""
    mutual: bool
    """whether queries and gallery are one set in which j is in the lists of i wherever i is in the lists of j"""
    _grades: Shaped[np.ndarray, "pairs"] | None = field(default=None, repr=False)
    """grade of each entry of the relevant items; None if all are 1"""
    clusters: Int[np.ndarray, "queries"] | None = field(default=None, repr=False)
    """number of the cluster of each query, for intervals: queries of one cluster depend on each other; None if none do"""
    unknown: int = 0
    """number of judgements whose query or item has no row"""
    _absent: Absent | None = field(default=None, repr=False)
    """relevant items that are not in the gallery: each counts as one that is never found; None if there are none"""
    at_least: float = 1
    """smallest relevant grade of judgements"""
    below: int = 0
    """number of judgements with a positive grade below `at_least`, which are irrelevant"""

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
        """Return a relevance from the indices of the relevant and of the ignored gallery items of each query.

        Args:
            relevant: For each query the indices of its relevant gallery items, in any order; perhaps none.
            ignored: For each query the indices of items that are neither hit nor miss, such as junk images.
            gallery: Number of gallery items; by default queries and gallery are one set.
            grades: For each query the grade of each relevant item, positive and finite; by default 1.
            clusters: (queries,) integers: queries of one number depend on each other, such as captions of one image; by
                default no two queries do. Intervals allow for it.

        Returns:
            A relevance for these queries in this order.

        Raises:
            ValueError: If lengths do not fit, an index is no gallery item or occurs twice, an item is both relevant and
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
                f"{call}: {counted(queries, 'list')} of relevant items, but {len(ignored)} of ignored ones. Pass one each."
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
        """Return a relevance from judgements (qrels) by ids, as TREC, BEIR and MS MARCO give them.

        Args:
            judgements: `{query: {item: grade}}`, `{query: [items]}`, a tuple of two or three equally long sequences
                (queries, items) or (queries, items, grades), or the path of a file with the four columns of TREC, or with
                query, item and grade, as BEIR has them, with or without a heading. A grade of 0 or less is judged
                irrelevant, as is what is not judged.
            query_ids: Id of each row of the queries: integers or strings, each once.
            gallery_ids: Id of each row of the gallery; by default queries and gallery are one set.
            at_least: The smallest relevant grade (`-l` of trec_eval), above 0. Lower grades are irrelevant, also to nDCG,
                whereas trec_eval's nDCG takes every grade: evaluate twice for both.
            unknown: What to do with judgements of ids that no query or no item has: `error`, or `ignore`. Ignored
                judgements are counted in `unknown`. As in trec_eval, a relevant item that is not in the gallery counts as
                one that is never found, and a query that is not among the rows counts nowhere.
            clusters: As in `from_lists`.

        Returns:
            A relevance for the queries in the order of `query_ids`.

        Raises:
            ValueError: If an id is unknown or occurs twice, a pair is judged twice with two grades, or a grade is no finite
                number.

        Examples:
            >>> judged = {"q1": {"d1": 2, "d3": 1}, "q2": {"d2": 0}}
            >>> Relevance.from_judgements(judged, ["q1", "q2"], ["d1", "d2", "d3"])
            Relevance(2 queries, 3 gallery items, 2 relevant pairs, 0 ignored)
        """
        call = "Relevance.from_judgements"
        one_set = gallery_ids is None
        least = check_choices(call, at_least, unknown)
        if isinstance(judgements, str | Path):  # the ids of a file are strings
            query_ids = [str(query) for query in _listed(query_ids)]
            gallery_ids = None if gallery_ids is None else [str(item) for item in _listed(gallery_ids)]
        judged_queries, judged_items, grades = read_judgements(call, judgements)
        items_of_rows = query_ids if gallery_ids is None else gallery_ids
        row_of_query = _rows_of_ids(call, "query_ids", query_ids, judged_queries)
        row_of_item = _rows_of_ids(call, "gallery_ids", items_of_rows, judged_items)
        _refuse_unknown(call, unknown, (("query", judged_queries, row_of_query), ("item", judged_items, row_of_item)))
        # for each judgement the row of its query, -1 for none, and the number of its item
        row = np.array([row_of_query.get(query, -1) for query in judged_queries], np.int64)
        item, numbers = _item_numbers(judged_items, row_of_item, len(items_of_rows))
        distinct = _each_once(call, row, item, _finite(call, grades), numbers, (judged_queries, judged_items))
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

        An item is relevant to a query if they share labels; the number of shared labels is its grade.

        Args:
            targets: (queries, labels) zeros and ones: a tensor, an array or a matrix of `scipy.sparse`; or a list with the
                labels of each query, all words or all integers, such as [{"sky", "sea"}, {"sky"}].
            gallery_targets: The same of the gallery; by default queries and gallery are one set.

        Returns:
            A relevance; queries with the same labels depend on each other.

        Raises:
            ValueError: If targets hold something else, their numbers of labels differ, or labels are partly words and partly
                integers.

        Examples:
            >>> Relevance.from_label_sets([{"sky", "sea"}, {"sky", "sea", "tree"}, {"tree"}])
            Relevance(3 queries in one set, 4 relevant pairs, 0 ignored)
        """
        call = "Relevance.from_label_sets"
        one_set = gallery_targets is None
        query_sets, width = _label_sets(call, "targets", targets)
        if one_set:
            item_sets = query_sets
            item_width = width
        else:
            item_sets, item_width = _label_sets(call, "gallery_targets", gallery_targets)
        if width is not None and item_width is not None and width != item_width:
            raise InputError(
                f"{call}: targets have {counted(width, 'label')}, gallery_targets {item_width}. Column j must be the "
                "same label in both."
            )
        of_query, of_item = _numbered(call, {"targets": query_sets, "gallery_targets": item_sets})
        lists, grades = _shared_labels(of_query, of_item, one_set=one_set)
        return cls(
            _relevant=lists,
            _ignored=Lists.none(len(query_sets)),
            gallery=len(item_sets),
            one_set=one_set,
            mutual=one_set,
            _grades=grades,
            clusters=_clusters_of_sets(of_query),
        )

    def _with(self, call: str, clusters: Any | None) -> Relevance:
        """Return the same relevance with clusters of queries."""
        if clusters is None:
            return self
        numbers = as_tensor(clusters, "clusters", call).numpy()
        if numbers.shape != (self.queries,) or not np.issubdtype(numbers.dtype, np.integer):
            raise InputError(
                f"{call}: clusters of shape {numbers.shape} and type {numbers.dtype} must be one integer for each of the "
                f"{counted(self.queries, 'query')}."
            )
        return replace(self, clusters=np.unique(numbers, return_inverse=True)[1])

    @property
    def queries(self) -> int:
        """Number of queries."""
        return len(self._relevant.start)

    def digest(self) -> str:
        """Return eight hexadecimal characters; relevances that differ have different ones, but by chance."""
        digest = hashlib.blake2b(digest_size=4)
        absent = () if self._absent is None else self._absent
        for array in (*self._relevant, *self._ignored, self._grades, self.clusters, *absent):
            digest.update(b"-" if array is None else np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def part(self, queries: NDArray[np.int64], numbers: NDArray[np.int64]) -> Relevance:
        """Return the relevance of some queries, with other numbers of the items that are in the gallery.

        Args:
            queries: Indices of the queries.
            numbers: (gallery,) the old number of the item that gets each new number.
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
        """Notes on the judgements, for a reader of the values."""
        if not self.unknown:
            return []
        subject = "judgement names" if self.unknown == 1 else "judgements name"
        note = f"{self.unknown:,} {subject} a query or an item that no row is."
        absent = 0 if self._absent is None else len(self._absent.grades)
        if absent:
            note += (
                f" Relevant items that are missing from the gallery count as never found: {absent:,}, of the queries that "
                "are evaluated."
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
    """The items that a `Relevance` names, as the engine reads them.

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
    """Return the items that a relevance names."""
    return JudgedItems(relevance._relevant, relevance._ignored, relevance._grades, relevance._absent)


def _renumbered(
    lists: Lists, queries: NDArray[np.int64], new_numbers: NDArray[np.int64]
) -> tuple[Lists, NDArray[np.int64]]:
    """Return the lists of some queries with the new number of each item, ascending, and the old position of each entry."""
    sizes = lists.sizes[queries]
    ends = np.append(0, np.cumsum(sizes))
    rows = np.repeat(np.arange(len(queries)), sizes)
    entries = np.repeat(lists.start[queries] - ends[:-1], sizes) + np.arange(ends[-1])
    items = new_numbers[lists.items[entries]]
    order = np.lexsort((items, rows))
    return Lists(ends[:-1], ends[1:], items[order].astype(np.int32)), entries[order]


# ------------------------------------------------------------------------------------------------------------- reading


def _lists(call: str, name: str, lists: Sequence[Any], items: int) -> Lists:
    """Return lists of indices, each of which is a gallery item, and occurs once in a list."""
    for query, indices in enumerate(lists):
        numbers = np.asarray(indices)
        if not numbers.size:
            continue
        if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
            raise InputError(f"{call}: {name}[{query}] holds {numbers.dtype}. Pass indices of gallery items.")
        lowest = numbers.min()
        highest = numbers.max()
        if lowest < 0 or highest >= items:
            wrong = lowest if lowest < 0 else highest
            raise InputError(
                f"{call}: {name}[{query}] holds {wrong}, but there are {counted(items, 'gallery item')}. Indices begin at 0."
            )
        if len(np.unique(numbers)) < numbers.size:
            raise InputError(f"{call}: {name}[{query}] holds an item twice. Pass each once.")
    return Lists.of(lists)


def _grades_of_lists(call: str, relevant: Sequence[Any], grades: Sequence[Any]) -> NDArray[np.float64]:
    """Return the grade of each entry of the lists of relevant items, which `Lists.of` puts in ascending order."""
    if [len(of_query) for of_query in grades] != [len(of_query) for of_query in relevant]:
        raise InputError(f"{call}: grades must have the lengths of the relevant items. Pass one grade for each item.")
    values = _positive(call, np.array([_grade(call, grade) for of_query in grades for grade in of_query], np.float64))
    ordered = []
    start = 0
    for indices in relevant:
        order = np.argsort(np.asarray(indices, np.int64), kind="stable")
        ordered.append(values[start + order])
        start += len(order)
    return np.concatenate([np.empty(0), *ordered])


def _pair_keys(lists: Lists, items: int) -> NDArray[np.int64]:
    """Return a number for each pair of a query and an item in its list."""
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
            f"query {query} and item {item}. Leave each in one of the lists."
        )


def _number_of_items(call: str, gallery: Any) -> int:
    """Return the number of gallery items."""
    number = gallery.__index__() if isinstance(gallery, int | np.integer) and not isinstance(gallery, bool) else 0
    if number < 1:
        words = repr(gallery) if np.ndim(gallery) == 0 else with_article(type(gallery).__name__)
        raise InputError(
            f"{call}: gallery is {words}, but must be the number of gallery items. Pass gallery=len(...), or None if "
            "queries and gallery are one set."
        )
    return int(number)


def _item_numbers(
    judged_items: Sequence[Any], row_of_item: Mapping[Any, int], items: int
) -> tuple[NDArray[np.int64], int]:
    """Return the number of the item of each judgement, and how many numbers there are.

    An item of the gallery has the number of its row; others are numbered from `items` on.
    """
    number_of_absent: dict[Any, int] = {}
    numbers = []
    for item in judged_items:
        if item in row_of_item:
            numbers.append(row_of_item[item])
        else:
            numbers.append(number_of_absent.setdefault(item, items + len(number_of_absent)))
    return np.array(numbers, np.int64), items + len(number_of_absent)


def _spans(rows: Int[np.ndarray, "pairs"], queries: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the entries of each query begin and end, given the row of each entry, ascending."""
    offsets = np.searchsorted(rows, np.arange(queries + 1))
    return offsets[:-1], offsets[1:]


def _finite(call: str, grades: Float[np.ndarray, "pairs"]) -> Float[np.ndarray, "pairs"]:
    """Return the grades, if all are finite."""
    return _checked_grades(call, grades, np.isfinite(grades), "is not finite")


def _positive(call: str, grades: Float[np.ndarray, "pairs"]) -> Float[np.ndarray, "pairs"]:
    """Return the grades of relevant items, if all are finite and positive."""
    return _checked_grades(call, grades, np.isfinite(grades) & (grades > 0), "is no finite positive number")


def _checked_grades(
    call: str, grades: Float[np.ndarray, "pairs"], is_valid: NDArray[np.bool_], fact: str
) -> Float[np.ndarray, "pairs"]:
    """Return the grades, if all are valid; else the message states a fact on those that are not."""
    wrong = grades[~is_valid]
    if len(wrong):
        raise InputError(
            f"{call}: {counted(len(wrong), 'grade')} {verb(len(wrong), 'is', 'are')} wrong: {wrong[0]:g} {fact}. Grades "
            "are numbers such as 0, 1, 2."
        )
    return grades


def check_choices(call: str, at_least: Any, unknown: str) -> float:
    """Return the smallest relevant grade of judgements.

    Args:
        call: The public function, for messages.
        at_least: See `Relevance.from_judgements`.
        unknown: See `Relevance.from_judgements`.

    Raises:
        ValueError: If `at_least` is no positive number, or `unknown` is neither `error` nor `ignore`.
    """
    least = _grade(call, at_least, "at_least")
    if not 0 < least < math.inf:
        raise InputError(
            f"{call}: at_least={at_least!r} must be a positive number: a grade of 0 is irrelevant. Pass the smallest "
            "relevant grade, such as 1 or 2."
        )
    if unknown not in ("error", "ignore"):
        raise InputError(f"{call}: there is no unknown={unknown!r}. Pass 'error' or 'ignore'.")
    return least


def read_judgements(call: str, judgements: Any) -> tuple[list[Any], list[Any], Float[np.ndarray, "pairs"]]:
    """Return queries, items and grades of all judgements."""
    if isinstance(judgements, str | Path):
        judgements = _read_file(call, Path(judgements))
    if not isinstance(judgements, Mapping):
        sides = [_listed(side) for side in judgements]
        if len(sides) not in (2, 3) or len({*map(len, sides)}) > 1:
            raise InputError(
                f"{call}: judgements of lengths {', '.join(str(len(side)) for side in sides)} must be a dictionary, or two "
                "or three sequences of one length: queries, items and perhaps grades."
            )
        queries, items = sides[:2]
        values = sides[2] if len(sides) == 3 else [1] * len(queries)
    else:
        queries = []
        items = []
        values = []
        for query, judged in judgements.items():
            grade_of_item = judged if isinstance(judged, Mapping) else dict.fromkeys(judged, 1)
            for item, grade in grade_of_item.items():
                queries.append(query)
                items.append(item)
                values.append(grade)
    return queries, items, np.array([_grade(call, value) for value in values], np.float64)


def _grade(call: str, value: Any, name: str = "the grade") -> float:
    """Return a grade as a number."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"{call}: {name} {value!r} is no number. Pass numbers such as 0, 1, 2.") from None


def _read_file(call: str, file: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the queries, items and grades of a file of judgements, as strings."""
    try:
        lines = read_lines(file)
    except ValueError as error:
        raise InputError(f"{call}: {error}") from None
    if lines and _is_heading(_columns(lines[0])):
        lines = lines[1:]
    rows = [_columns(line) for line in lines]
    if not rows:
        raise InputError(
            f"{call}: {file} holds no judgement. Pass a file of lines with TREC's four columns (query, 0, item, grade), or "
            "BEIR's three (query, item, grade)."
        )
    for line, row in zip(lines, rows, strict=True):
        if len(row) not in (3, 4) or len(row) != len(rows[0]):
            raise InputError(
                f"{call}: line {line.number} of {file} has {len(row)} columns: {' '.join(row)[:60]!r}. A file of judgements "
                "has TREC's four (query, 0, item, grade), or BEIR's three (query, item, grade), with or without a heading."
            )
        if not _is_number(row[-1]):
            raise InputError(
                f"{call}: the grade in line {line.number} of {file} is {row[-1]!r}, no number. Grades are numbers such as 1."
            )
    return [row[0] for row in rows], [row[-2] for row in rows], [row[-1] for row in rows]


def _is_heading(cells: list[str]) -> bool:
    """Return whether the first line of a file names its columns: the grade is no number, nor is TREC's second column."""
    return not _is_number(cells[-1]) and not (len(cells) == 4 and _is_number(cells[1]))


def _columns(line: Line) -> list[str]:
    """Return the cells between the tabs of a line, if these make columns of judgements, or else its words."""
    between_tabs = line.cells("\t")
    return between_tabs if len(between_tabs) in (3, 4) else line.words()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _listed(ids: Any) -> list[Any]:
    """Return ids as Python's strings and integers, which are equal if they are written alike."""
    listed: list[Any] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return [name.item() if hasattr(name, "item") and np.ndim(name) == 0 else name for name in listed]


def _rows_of_ids(call: str, name: str, ids: Iterable[Any], judged: Iterable[Any]) -> dict[Any, int]:
    """Return judged id -> its row, for the ids that have a row.

    Args:
        call: The public function, for messages.
        name: Name of the argument that holds the ids.
        ids: Id of each row.
        judged: Ids of the judgements.
    """
    judged_ids = set(judged)
    row_of_id: dict[Any, int] = {}
    for row, row_id in enumerate(_listed(ids)):
        if row_id not in judged_ids:
            continue
        if row_id in row_of_id:
            raise InputError(
                f"{call}: {name} holds {row_id!r} in rows {row_of_id[row_id]} and {row}. Each id names one row."
            )
        row_of_id[row_id] = row
    return row_of_id | _rows_in_other_forms(ids, judged_ids - row_of_id.keys())


def _rows_in_other_forms(ids: Iterable[Any], missing: set[Any]) -> dict[Any, int]:
    """Return the row of each word that only one id spells, in the other normal form of Unicode."""
    word_of_form = {composed_form(word): word for word in missing if isinstance(word, str) and not word.isascii()}
    if not word_of_form:
        return {}
    rows: dict[Any, list[int]] = {word: [] for word in word_of_form.values()}
    for row, row_id in enumerate(_listed(ids)):
        if isinstance(row_id, str) and composed_form(row_id) in word_of_form:
            rows[word_of_form[composed_form(row_id)]].append(row)
    return {word: of_word[0] for word, of_word in rows.items() if len(of_word) == 1}


def _refuse_unknown(call: str, unknown: str, sides: Iterable[tuple[str, list[Any], dict[Any, int]]]) -> None:
    """Refuse ids that no row has, unless they are to be left out.

    Args:
        call: The public function, for messages.
        unknown: See `Relevance.from_judgements`.
        sides: Name of each side, the ids of its judgements, and the row of each known id.
    """
    if unknown != "error":
        return
    for name, judged, row_of_id in sides:
        missing = [judged_id for judged_id in dict.fromkeys(judged) if judged_id not in row_of_id]
        if missing:
            examples = ", ".join(map(repr, missing[:SHOWN]))
            if len(missing) > SHOWN:
                examples += ", ..."
            raise InputError(
                f"{call}: no {name} has the ids {examples} ({len(missing)} in all) of the judgements. Pass the ids of the "
                f"rows as the judgements write them (strings or integers), or unknown='ignore' to {IGNORED[name]}."
            )


def _each_once(
    call: str,
    rows: Int[np.ndarray, "pairs"],
    items: Int[np.ndarray, "pairs"],
    grades: Float[np.ndarray, "pairs"],
    numbers: int,
    ids: tuple[Sequence[Any], Sequence[Any]],
) -> Int[np.ndarray, "different"]:
    """Return the judgements in the order of queries and items; one that is there twice comes once.

    Judgements of queries that are not among the rows are left out.

    Args:
        call: The public function, for messages.
        rows: Row of the query of each judgement; -1 for none.
        items: Number of its item.
        grades: Its grade.
        numbers: How many numbers of items there are.
        ids: Its query and its item, as they are written.
    """
    keys = rows * numbers + items
    order = np.argsort(keys, kind="stable")
    order = order[rows[order] >= 0]
    keys = keys[order]
    values = grades[order]
    # whether a judgement is of the same pair as the one before it
    repeats = np.append(False, keys[1:] == keys[:-1])[: len(keys)]
    differs = repeats & (values != np.append(np.nan, values[:-1])[: len(values)])
    if differs.any():
        query_ids, item_ids = ids
        first = int(order[differs][0])
        number = int(differs.sum())
        raise InputError(
            f"{call}: {counted(number, 'pair')} {verb(number, 'is', 'are')} judged twice with two grades, such as query "
            f"{query_ids[first]!r} and item {item_ids[first]!r}. Keep one of them."
        )
    different: NDArray[np.int64] = order[~repeats]
    return different


# ---------------------------------------------------------------------------------------------------------- label sets


def _label_sets(call: str, name: str, targets: Any) -> tuple[Sequence[Sequence[Any] | NDArray[np.integer]], int | None]:
    """Return the labels of each item, and the number of columns of a table of zeros and ones; None for a list."""
    if isinstance(targets, list | tuple):
        return [_labels_of_item(call, f"{name}[{item}]", labels) for item, labels in enumerate(targets)], None
    if hasattr(targets, "tocsr"):  # scipy.sparse
        table = targets.tocsr()
        table.sum_duplicates()
        entries = table.data
    else:
        entries = table = as_tensor(targets, name, call).cpu().numpy()
    if table.ndim != 2:
        raise InputError(
            f"{call}: {name} have shape {table.shape}; zeros and ones of shape (items, labels) are needed."
        )
    wrong = int((~np.isin(entries, (0, 1))).sum())
    if wrong:
        raise InputError(
            f"{call}: {wrong:,} of {counted(entries.size, 'entry')} of {name} {verb(wrong, 'is', 'are')} neither 0 nor "
            "1. Entry (i, j) is 1 if item i has label j."
        )
    rows, numbers = table.nonzero()
    return list(np.split(numbers, np.searchsorted(rows, np.arange(1, table.shape[0])))), table.shape[1]


def _shared_labels(of_query: Lists, of_item: Lists, *, one_set: bool) -> tuple[Lists, Shaped[np.ndarray, "pairs"]]:
    """Return the items that share labels with each query, ascending, and the number of shared labels of each.

    Args:
        of_query: Numbers of the labels of each query.
        of_item: Numbers of the labels of each item.
        one_set: Whether item i is query i, which is not relevant to itself.
    """
    number = len(of_item.start)
    items_of_label = _items_of_labels(of_item, labels=1 + int(of_query.items.max(initial=-1)))
    items = [np.empty(0, np.int32)]
    grades = [np.empty(0, np.uint16)]
    for query, labels in enumerate(np.split(of_query.items, of_query.stop[:-1])):
        # an item comes once for each label that it shares with the query
        sharing = np.concatenate([np.empty(0, np.int32), *(items_of_label[label] for label in labels)])
        shared = np.bincount(sharing, minlength=number)
        if one_set:
            shared[query] = 0
        relevant = np.flatnonzero(shared)
        items.append(relevant.astype(np.int32))
        grades.append(shared[relevant].astype(np.uint16))
    ends = np.cumsum([len(relevant) for relevant in items])
    return Lists(ends[:-1], ends[1:], np.concatenate(items)), np.concatenate(grades)


def _items_of_labels(of_item: Lists, labels: int) -> list[NDArray[np.int32]]:
    """Return the items that have each label.

    Args:
        of_item: Numbers of the labels of each item.
        labels: How many labels have a list.
    """
    item_of_entry = np.repeat(np.arange(len(of_item.start), dtype=np.int32), of_item.sizes)
    entries = Lists.of_labels(np.arange(labels), of_item.items)
    return [item_of_entry[entries.items[start:stop]] for start, stop in zip(entries.start, entries.stop, strict=True)]


def _clusters_of_sets(of_query: Lists) -> NDArray[np.int64]:
    """Return the number of the label set of each query, in the order of their rows of zeros and ones."""
    # Of two rows of zeros and ones, the one with a 1 in the first column that differs is the larger one.
    sets = [tuple((-labels).tolist()) for labels in np.split(of_query.items, of_query.stop[:-1])]
    number_of_set = {labels: number for number, labels in enumerate(sorted(set(sets)))}
    return np.array([number_of_set[labels] for labels in sets], np.int64)


def _labels_of_item(call: str, name: str, labels: Any) -> list[str | int]:
    """Return the labels of an item as Python's strings or integers."""
    if isinstance(labels, str | bytes) or not (isinstance(labels, Iterable) or hasattr(labels, "tolist")):
        fix = f"Pass [{labels!r}] for one label, or [] for none."
        if not isinstance(labels, str | int):
            fix = "Pass such as ['sky'] or [3], or [] for none."
        raise InputError(f"{call}: {name} is {labels!r}, but must be a set or a list with the labels of an item. {fix}")
    plain_labels: list[str | int] = []
    for label in _listed(labels):
        if isinstance(label, str):
            plain_labels.append(str(label))
        elif isinstance(label, int):
            plain_labels.append(int(label))
        else:
            raise InputError(
                f"{call}: {name} holds {label!r}. A label is a word or an integer: leave out what is missing, and write "
                "others as words, str(label)."
            )
    if len(set(plain_labels)) < len(plain_labels):
        raise InputError(
            f"{call}: {name} holds a label twice. A list holds the labels of each item; pass a table of zeros and ones as a "
            "tensor or an array."
        )
    return plain_labels


def _numbered(call: str, sides: Mapping[str, Sequence[Sequence[Any] | NDArray[np.integer]]]) -> list[Lists]:
    """Return the labels of each item of each side as numbers from 0 on, ascending, the same in all sides."""
    # Words and integers have no common order, and 1 is not '1'. So all labels are of one kind.
    kinds: dict[bool, str] = {}  # whether labels are words -> where the first one of this kind was found
    labels: set[Any] = set()
    for name, side in sides.items():
        for item, labels_of_item in enumerate(side):
            listed = _listed(labels_of_item)
            labels.update(listed)
            for label in listed:
                if isinstance(label, str) not in kinds:
                    kinds[isinstance(label, str)] = f"{name}[{item}] holds {label!r}"
    if len(kinds) > 1:
        raise InputError(
            f"{call}: labels are words and integers: {kinds[True]}, {kinds[False]}. Pass one kind, such as "
            "[[str(label) for label in labels] for labels in targets]."
        )
    number_of_label = {label: number for number, label in enumerate(sorted(labels))}
    numbered = []
    for side in sides.values():
        numbers = [[number_of_label[label] for label in _listed(labels_of_item)] for labels_of_item in side]
        numbered.append(Lists.of(numbers))
    return numbered
