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
from fewshot_callbacks.files.names import composed_form
from fewshot_callbacks.files.text import Line, read_lines
from fewshot_callbacks.functional._reading import as_tensor

# Ids that a message shows.
SHOWN = 3
# What becomes of judgements of an unknown query or item where they are ignored.
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

    def padded(self, queries: Int[np.ndarray, "some"]) -> Float[np.ndarray, "some columns"]:
        """Return the grades of some queries, padded with 0."""
        sizes = self.sizes[queries]
        column = np.arange(sizes.max(initial=0))
        entries = np.minimum(self.start[queries, None] + column, max(0, len(self.grades) - 1))
        return np.where(column < sizes[:, None], self.grades[entries], 0.0)


@dataclass(frozen=True, eq=False)
class Relevance:
    """Which gallery items are relevant to each query, with which grade, and which are ignored: for what no label says.

    Everything else is irrelevant. An ignored item is no candidate: it takes up no rank. Make one with `from_judgements`,
    `from_label_sets` or `from_lists`, and pass it to `evaluate_retrieval` in place of labels. It takes 4 bytes for
    each relevant and each ignored pair, 8 more where grades are given (2 for the number of shared labels), and never
    anything for all pairs.

    Examples:
        >>> relevance = Relevance.from_lists([[0, 2], [1]], gallery=3)
        >>> relevance
        Relevance(2 queries, 3 gallery items, 3 relevant pairs, 0 ignored)
    """

    relevant: Lists
    """relevant items of each query, ascending"""
    ignored: Lists
    """ignored items of each query, ascending"""
    gallery: int
    """number of gallery items"""
    one_set: bool
    """queries and gallery are one set, in which an item is no candidate for itself"""
    mutual: bool
    """in one set: who is in the lists of an item has it in its own"""
    grades: Shaped[np.ndarray, "pairs"] | None = field(default=None, repr=False)
    """grade of each entry of the relevant items; None if all are 1"""
    clusters: Int[np.ndarray, "queries"] | None = field(default=None, repr=False)
    """queries of one number depend on each other, for intervals; None if none do"""
    unknown: int = 0
    """judgements whose query or item is in none of the rows"""
    absent: Absent | None = field(default=None, repr=False)
    """relevant items that are not in the gallery: each counts as one that is never found; None if there are none"""
    at_least: float = 1
    """smallest relevant grade of judgements"""
    below: int = 0
    """judgements with a positive grade below that, which are irrelevant"""

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
        """Take the indices of the relevant and of the ignored gallery items of each query.

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
        call, queries = "Relevance.from_lists", len(relevant)
        items = queries if gallery is None else _number_of_items(call, gallery)
        if ignored is not None and len(ignored) != queries:
            raise ValueError(
                f"{call}: {queries} lists of relevant items, but {len(ignored)} of ignored ones. Pass one each."
            )
        lists = _lists(call, "relevant", relevant, items)
        junk = Lists.none(queries) if ignored is None else _lists(call, "ignored", ignored, items)
        _refuse_both(call, lists, junk, items)
        values = None
        if grades is not None:
            if [*map(len, grades)] != [*map(len, relevant)]:
                raise ValueError(
                    f"{call}: grades must have the lengths of the relevant items. Pass one grade for each item."
                )
            order = [n for some in relevant for n in np.argsort(np.asarray(some, np.int64), kind="stable")]
            first = np.repeat(lists.start, lists.sizes)
            given = np.array([_grade(call, grade) for some in grades for grade in some], np.float64)
            values = _positive(call, given)[first + order]
        mutual = gallery is None and _are_mutual(lists) and _are_mutual(junk)
        return cls(lists, junk, items, gallery is None, mutual, values)._with(call, clusters)

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
        """Take judgements (qrels) by ids, as TREC, BEIR and MS MARCO give them.

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
        call, one_set = "Relevance.from_judgements", gallery_ids is None
        least = check_choices(call, at_least, unknown)
        if isinstance(judgements, str | Path):  # its ids are strings
            query_ids = [*map(str, _listed(query_ids))]
            gallery_ids = None if gallery_ids is None else [*map(str, _listed(gallery_ids))]
        rows, columns, grades = read_judgements(call, judgements)
        items = query_ids if gallery_ids is None else gallery_ids
        of_query, of_item = _places(call, "query_ids", query_ids, rows), _places(call, "gallery_ids", items, columns)
        _refuse_unknown(call, unknown, (("query", rows, of_query), ("item", columns, of_item)))
        length = len(items)
        beyond: dict[Any, int] = {}  # numbers of the items that are not in the gallery
        at = np.array([of_query.get(row, -1) for row in rows], np.int64)
        item = np.array(
            [
                of_item[column] if column in of_item else beyond.setdefault(column, length + len(beyond))
                for column in columns
            ],
            np.int64,
        )
        order = _each_once(call, at, item, _finite(call, grades), length + len(beyond), (rows, columns))
        order = order[at[order] >= 0]
        relevant = order[grades[order] >= least]
        is_here = item[relevant] < length
        here, missing = relevant[is_here], relevant[~is_here]
        start, stop = _spans(at[here], len(query_ids))
        lists = Lists(start, stop, item[here].astype(np.int32))
        absent = Absent(*_spans(at[missing], len(query_ids)), grades[missing]) if len(missing) else None
        mutual = one_set and _are_mutual(lists)
        return cls(
            lists,
            Lists.none(len(query_ids)),
            length,
            one_set,
            mutual,
            grades[here],
            unknown=int(((at < 0) | (item >= length)).sum()),
            absent=absent,
            at_least=least,
            below=int(((grades[order] > 0) & (grades[order] < least)).sum()),
        )._with(call, clusters)

    @classmethod
    def from_label_sets(cls, targets: Any, gallery_targets: Any | None = None) -> Relevance:
        """Take items with several labels each: relevant is who shares a label, its grade is the number of shared ones.

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
        own, width = _label_sets(call, "targets", targets)
        others, others_width = own, width
        if gallery_targets is not None:
            others, others_width = _label_sets(call, "gallery_targets", gallery_targets)
        if None not in (width, others_width) and width != others_width:
            raise ValueError(
                f"{call}: targets have {width} labels, gallery_targets {others_width}. Column j must be the same label in "
                "both."
            )
        of_query, of_item = _numbered(call, {"targets": own, "gallery_targets": others})
        one_set = gallery_targets is None
        by_label = np.argsort(of_item.items, kind="stable")
        ends = np.searchsorted(of_item.items[by_label], np.arange(2 + of_query.items.max(initial=-1)))
        holders = np.split(np.repeat(np.arange(len(others)), of_item.sizes)[by_label], ends[1:])
        items, grades = [np.empty(0, np.int32)], [np.empty(0, np.uint16)]
        for query, labels in enumerate(np.split(of_query.items, of_query.stop[:-1])):
            shared = np.bincount(
                np.concatenate([items[0], *(holders[label] for label in labels)]), minlength=len(others)
            )
            if one_set:
                shared[query] = 0
            items.append(np.flatnonzero(shared).astype(np.int32))
            grades.append(shared[items[-1]].astype(np.uint16))
        ends = np.cumsum([*map(len, items)])
        # in the order of their rows of zeros and ones
        sets = [tuple((-labels).tolist()) for labels in np.split(of_query.items, of_query.stop[:-1])]
        number = {labels: n for n, labels in enumerate(sorted(set(sets)))}
        clusters = np.array([number[labels] for labels in sets], np.int64)
        none = Lists.none(len(own))
        lists = Lists(ends[:-1], ends[1:], np.concatenate(items))
        return cls(lists, none, len(others), one_set, one_set, np.concatenate(grades), clusters)

    def _with(self, call: str, clusters: Any | None) -> Relevance:
        if clusters is None:
            return self
        numbers = as_tensor(clusters, "clusters", call).numpy()
        if numbers.shape != (self.queries,) or not np.issubdtype(numbers.dtype, np.integer):
            raise ValueError(
                f"{call}: clusters of shape {numbers.shape} and type {numbers.dtype} must be one integer for each of the "
                f"{self.queries} queries."
            )
        return replace(self, clusters=np.unique(numbers, return_inverse=True)[1])

    @property
    def queries(self) -> int:
        """Number of queries."""
        return len(self.relevant.start)

    def digest(self) -> str:
        """Return a short word that two relevances have in common only if they say the same."""
        found = hashlib.blake2b(digest_size=4)
        absent = () if self.absent is None else self.absent
        for array in (*self.relevant, *self.ignored, self.grades, self.clusters, *absent):
            found.update(b"-" if array is None else np.ascontiguousarray(array).data)
        return found.hexdigest()

    def part(self, queries: NDArray[np.int64], numbers: NDArray[np.int64]) -> Relevance:
        """Keep some queries, and number the items that are in the gallery anew.

        Args:
            queries: Which of them.
            numbers: The item that has each new number.
        """
        wanted, every = (queries, numbers), (np.arange(self.queries), np.arange(self.gallery))
        if all(map(np.array_equal, wanted, every)):  # no copy of what may be large
            return self
        new = np.argsort(numbers)
        relevant, order = _renumbered(self.relevant, queries, new)
        ignored, _ = _renumbered(self.ignored, queries, new)
        absent = self.absent
        if absent is not None:
            absent = absent._replace(start=absent.start[queries], stop=absent.stop[queries])
        return replace(
            self,
            relevant=relevant,
            ignored=ignored,
            grades=None if self.grades is None else self.grades[order],
            absent=absent,
        )

    @property
    def notes(self) -> list[str]:
        """What a reader of the values should know of the judgements."""
        if not self.unknown:
            return []
        what = "judgement names" if self.unknown == 1 else "judgements name"
        note = f"{self.unknown:,} {what} a query or an item that no row is."
        absent = 0 if self.absent is None else len(self.absent.grades)
        if absent:
            note += (
                f" Relevant items that are missing from the gallery count as never found: {absent:,}, of the queries that "
                "are evaluated."
            )
        return [note]

    def __repr__(self) -> str:
        where = "in one set" if self.one_set else f", {self.gallery:,} gallery items"
        pairs, junk = int(self.relevant.sizes.sum()), int(self.ignored.sizes.sum())
        missing = "" if self.absent is None else f", {len(self.absent.grades):,} not in the gallery"
        return (
            f"Relevance({self.queries:,} queries {where}, {pairs:,} relevant pairs{missing}, {junk:,} ignored)".replace(
                " ,", ","
            )
        )


def _renumbered(lists: Lists, queries: NDArray[np.int64], new: NDArray[np.int64]) -> tuple[Lists, NDArray[np.int64]]:
    """Return the lists of some queries with the new number of each item, ascending, and which old entry each is."""
    sizes = lists.sizes[queries]
    ends = np.append(0, np.cumsum(sizes))
    rows = np.repeat(np.arange(len(queries)), sizes)
    entries = np.repeat(lists.start[queries] - ends[:-1], sizes) + np.arange(ends[-1])
    items = new[lists.items[entries]]
    order = np.lexsort((items, rows))
    return Lists(ends[:-1], ends[1:], items[order].astype(np.int32)), entries[order]


# ------------------------------------------------------------------------------------------------------------- reading


def _lists(call: str, name: str, lists: Sequence[Any], items: int) -> Lists:
    """Read lists of indices."""
    for query, some in enumerate(lists):
        numbers = np.asarray(some)
        if numbers.size and (numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer)):
            raise ValueError(f"{call}: {name}[{query}] holds {numbers.dtype}. Pass indices of gallery items.")
        if numbers.size and (numbers.min() < 0 or numbers.max() >= items):
            raise ValueError(
                f"{call}: {name}[{query}] holds {numbers.min() if numbers.min() < 0 else numbers.max()}, but there are "
                f"{items} gallery items. Indices begin at 0."
            )
        if len(np.unique(numbers)) < numbers.size:
            raise ValueError(f"{call}: {name}[{query}] holds an item twice. Pass each once.")
    return Lists.of(lists)


def _are_mutual(lists: Lists) -> bool:
    """Find out whether i is in the list of j for each j in the list of i."""
    rows, items = np.repeat(np.arange(len(lists.start)), lists.sizes), lists.items
    return bool((np.sort(rows * len(lists.start) + items) == np.sort(items * len(lists.start) + rows)).all())


def _refuse_both(call: str, relevant: Lists, ignored: Lists, items: int) -> None:
    """Refuse an item that is relevant and ignored."""
    one, other = (
        np.repeat(np.arange(len(side.start)), side.sizes) * items + side.items for side in (relevant, ignored)
    )
    both = np.intersect1d(one, other)
    if len(both):
        query, item = divmod(int(both[0]), items)
        raise ValueError(
            f"{call}: {len(both)} pairs are both relevant and ignored, such as query {query} and item {item}. Leave each "
            "in one of the lists."
        )


def _number_of_items(call: str, gallery: Any) -> int:
    """Read the number of gallery items."""
    number = gallery.__index__() if isinstance(gallery, int | np.integer) and not isinstance(gallery, bool) else 0
    if number < 1:
        shown = repr(gallery) if np.ndim(gallery) == 0 else f"a {type(gallery).__name__}"
        raise ValueError(
            f"{call}: gallery is {shown}, but must be the number of gallery items. Pass gallery=len(...), or None if "
            "queries and gallery are one set."
        )
    return int(number)


def _spans(at: Int[np.ndarray, "pairs"], queries: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where the entries of each query begin and end, of ascending numbers of queries."""
    ends = np.searchsorted(at, np.arange(queries + 1))
    return ends[:-1], ends[1:]


def _finite(call: str, grades: Float[np.ndarray, "pairs"]) -> Float[np.ndarray, "pairs"]:
    """Refuse a grade that is not finite."""
    return _right(call, grades, np.isfinite(grades), "is not finite")


def _positive(call: str, grades: Float[np.ndarray, "pairs"]) -> Float[np.ndarray, "pairs"]:
    """Refuse a grade of a relevant item that is not finite and positive."""
    return _right(call, grades, np.isfinite(grades) & (grades > 0), "is no finite positive number")


def _right(call: str, grades: Float[np.ndarray, "pairs"], right: NDArray[np.bool_], fact: str) -> NDArray[Any]:
    """Refuse grades of which some are not right."""
    wrong = grades[~right]
    if len(wrong):
        raise ValueError(
            f"{call}: {len(wrong)} grades are wrong: {wrong[0]:g} {fact}. Grades are numbers such as 0, 1, 2."
        )
    return grades


def check_choices(call: str, at_least: Any, unknown: str) -> float:
    """Return the smallest relevant grade of judgements.

    Args:
        call: The public function, for messages.
        at_least: See `Relevance.from_judgements`.
        unknown: See there.

    Raises:
        ValueError: If `at_least` is no positive number, or `unknown` is neither `error` nor `ignore`.
    """
    least = _grade(call, at_least, "at_least")
    if not 0 < least < math.inf:
        raise ValueError(
            f"{call}: at_least={at_least!r} must be a positive number: a grade of 0 is irrelevant. Pass the smallest "
            "relevant grade, such as 1 or 2."
        )
    if unknown not in ("error", "ignore"):
        raise ValueError(f"{call}: there is no unknown={unknown!r}. Pass 'error' or 'ignore'.")
    return least


def read_judgements(call: str, judgements: Any) -> tuple[list[Any], list[Any], Float[np.ndarray, "pairs"]]:
    """Return queries, items and grades of all judgements."""
    if isinstance(judgements, str | Path):
        judgements = _read_file(call, Path(judgements))
    if not isinstance(judgements, Mapping):
        sides = [_listed(side) for side in judgements]
        if len(sides) not in (2, 3) or len({*map(len, sides)}) > 1:
            raise ValueError(
                f"{call}: judgements of lengths {', '.join(str(len(side)) for side in sides)} must be a dictionary, or two "
                "or three sequences of one length: queries, items and perhaps grades."
            )
        rows, columns, values = sides[0], sides[1], sides[2] if len(sides) == 3 else [1] * len(sides[0])
    else:
        of_each = [
            (query, some if isinstance(some, Mapping) else dict.fromkeys(some, 1)) for query, some in judgements.items()
        ]
        rows = [query for query, some in of_each for _ in some]
        columns = [item for _, some in of_each for item in some]
        values = [grade for _, some in of_each for grade in some.values()]
    return rows, columns, np.array([_grade(call, value) for value in values], np.float64)


def _grade(call: str, value: Any, name: str = "the grade") -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{call}: {name} {value!r} is no number. Pass numbers such as 0, 1, 2.") from None


def _read_file(call: str, file: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the queries, items and grades of a file of judgements, as strings."""
    try:
        lines = read_lines(file)
    except ValueError as error:
        raise ValueError(f"{call}: {error}") from None
    has_heading = bool(lines) and not _is_number(_columns(lines[0])[-1])
    lines = lines[1:] if has_heading else lines
    rows = [_columns(line) for line in lines]
    for line, row in zip(lines, rows, strict=True):
        if len(row) not in (3, 4) or len(row) != len(rows[0]):
            raise ValueError(
                f"{call}: line {line.number} of {file} has {len(row)} columns: {' '.join(row)[:60]!r}. A file of judgements "
                "has TREC's four (query, 0, item, grade), or BEIR's three (query, item, grade), with or without a heading."
            )
    queries, items, grades = zip(*((row[0], row[-2], row[-1]) for row in rows), strict=True) if rows else ((), (), ())
    return list(queries), list(items), list(grades)


def _columns(line: Line) -> list[str]:
    """Split a line at its tabs, where these make columns of judgements, or else at all blanks."""
    between_tabs = line.cells("\t")
    return between_tabs if len(between_tabs) in (3, 4) else line.words()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _listed(ids: Any) -> list[Any]:
    """Return ids as Python's own words and integers, which are equal where they are written alike."""
    listed: list[Any] = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    return [one.item() if hasattr(one, "item") and np.ndim(one) == 0 else one for one in listed]


def _places(call: str, name: str, ids: Iterable[Any], wanted: Iterable[Any]) -> dict[Any, int]:
    """Return the row of each id that is judged."""
    wanted, found = set(wanted), dict[Any, int]()
    for row, one in enumerate(_listed(ids)):
        if one not in wanted:
            continue
        if one in found:
            raise ValueError(f"{call}: {name} holds {one!r} in rows {found[one]} and {row}. Each id names one row.")
        found[one] = row
    return found | _places_in_other_forms(ids, wanted - found.keys())


def _places_in_other_forms(ids: Iterable[Any], missing: set[Any]) -> dict[Any, int]:
    """Return the row of each word that only one id spells, in the other normal form of Unicode."""
    forms = {composed_form(word): word for word in missing if isinstance(word, str) and not word.isascii()}
    rows: dict[Any, list[int]] = {word: [] for word in forms.values()}
    for row, one in enumerate(_listed(ids) if forms else ()):
        if isinstance(one, str) and composed_form(one) in forms:
            rows[forms[composed_form(one)]].append(row)
    return {word: found[0] for word, found in rows.items() if len(found) == 1}


def _refuse_unknown(call: str, unknown: str, sides: Iterable[tuple[str, list[Any], dict[Any, int]]]) -> None:
    """Refuse ids that no row has, unless they are to be left out."""
    for name, judged, known in sides:
        missing = [one for one in dict.fromkeys(judged) if one not in known]
        if missing and unknown == "error":
            shown = ", ".join(map(repr, missing[:SHOWN])) + (", ..." if len(missing) > SHOWN else "")
            raise ValueError(
                f"{call}: no {name} has the ids {shown} ({len(missing)} in all) of the judgements. Pass the ids of the rows "
                f"as the judgements write them (strings or integers), or unknown='ignore' to {IGNORED[name]}."
            )


def _each_once(
    call: str,
    at: Int[np.ndarray, "pairs"],
    item: Int[np.ndarray, "pairs"],
    grades: Float[np.ndarray, "pairs"],
    items: int,
    ids: tuple[Sequence[Any], Sequence[Any]],
) -> Int[np.ndarray, "different"]:
    """Return the order of queries and items, in which a judgement that is there twice comes once.

    Judgements of queries that are not among the rows are not looked at.

    Args:
        call: The public function, for messages.
        at: Row of the query of each judgement; -1 for none.
        item: Number of its item.
        grades: Its grade.
        items: How many numbers there are.
        ids: Its query and its item, as they are written.
    """
    keys = at * items + item
    order = np.argsort(keys, kind="stable")
    order = order[at[order] >= 0]
    keys, values = keys[order], grades[order]
    again = np.append(False, keys[1:] == keys[:-1])[: len(keys)]
    other = again & (values != np.append(np.nan, values[:-1])[: len(values)])
    if other.any():
        queries, columns = ids
        one = int(order[other][0])
        raise ValueError(
            f"{call}: {int(other.sum())} pairs are judged twice with two grades, such as query {queries[one]!r} and item "
            f"{columns[one]!r}. Keep one of them."
        )
    different: NDArray[np.int64] = order[~again]
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
        raise ValueError(
            f"{call}: {name} have shape {table.shape}; zeros and ones of shape (items, labels) are needed."
        )
    wrong = int((~np.isin(entries, (0, 1))).sum())
    if wrong:
        raise ValueError(
            f"{call}: {wrong:,} of {entries.size:,} entries of {name} are neither 0 nor 1. Entry (i, j) is 1 if item i has "
            "label j."
        )
    rows, numbers = table.nonzero()
    return list(np.split(numbers, np.searchsorted(rows, np.arange(1, table.shape[0])))), table.shape[1]


def _labels_of_item(call: str, name: str, labels: Any) -> list[str | int]:
    """Return the labels of an item as Python's own words or integers."""
    if isinstance(labels, str | bytes) or not (isinstance(labels, Iterable) or hasattr(labels, "tolist")):
        raise ValueError(
            f"{call}: {name} is {labels!r}, but must be a set or a list with the labels of an item. Pass [{labels!r}] for "
            "one label, or [] for none."
        )
    found: list[str | int] = []
    for label in _listed(labels):
        if isinstance(label, str):
            found.append(str(label))
        elif isinstance(label, int):
            found.append(int(label))
        else:
            raise ValueError(
                f"{call}: {name} holds {label!r}. A label is a word or an integer: leave out what is missing, and write "
                "others as words, str(label)."
            )
    if len(set(found)) < len(found):
        raise ValueError(
            f"{call}: {name} holds a label twice. A list holds the labels of each item; pass a table of zeros and ones as a "
            "tensor or an array."
        )
    return found


def _numbered(call: str, sides: Mapping[str, Sequence[Sequence[Any] | NDArray[np.integer]]]) -> list[Lists]:
    """Return the labels of each item of each side as numbers from 0 on, ascending, the same in all sides."""
    # where a label of each kind was first found: words and integers have no common order, and 1 is not '1'
    kinds: dict[bool, str] = {}
    labels: set[Any] = set()
    for name, side in sides.items():
        for item, some in enumerate(side):
            known = some.tolist() if isinstance(some, np.ndarray) else some
            labels.update(known)
            for label in known[:1] if isinstance(some, np.ndarray) else known:
                kinds.setdefault(isinstance(label, str), f"{name}[{item}] holds {label!r}")
    if len(kinds) > 1:
        raise ValueError(
            f"{call}: labels are words and integers: {kinds[True]}, {kinds[False]}. Pass one kind, such as "
            "[[str(label) for label in labels] for labels in targets]."
        )
    number = {label: place for place, label in enumerate(sorted(labels))}
    return [Lists.of([[number[label] for label in _listed(some)] for some in side]) for side in sides.values()]
