"""Nearest-prototype accuracy: how often the most similar class mean is that of the query's own class.

The prototypes are those of Snell, Swersky and Zemel, "Prototypical networks for few-shot learning", NeurIPS 2017, over
all items of a class; the classifier is the nearest class mean of Mensink, Verbeek, Perronnin and Csurka,
"Distance-based image classification: generalizing to new classes at near-zero cost", TPAMI 2013.

It is Recall@1 with the class means as the gallery: a float64 product decides where its error leaves no doubt, the exact
score elsewhere (see `exact_scores`). The means must not depend on the order of the items. Each component of an item is
therefore rounded to a grid, 2**-(62 - log2 n) of the largest such component in its class, where n is the size of the largest
class; sums of these integers are exact, and leaving a query out of its class is a subtraction. A class that holds one huge
item has a huge mean and a coarse grid, but no other class is touched by it. Scores with a mean are taken from the sum, and
divided by the number of items at the end, so that equal means are equally similar, whatever the number of their members.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.duplicates import row_numbers
from fewshot_callbacks.engine.precision import Precision, full_precision
from fewshot_callbacks.engine.scores import exact as exact_scores
from fewshot_callbacks.engine.scores.products import ScoreTiles, Similarity, check_similarity

NUMBERS_PER_COMPONENT = 16
"""Float64 numbers that a component of a prototype or a query takes while tiles are made, with room to spare."""
NUMBERS_PER_PAIR = 6
"""And a pair of them."""


def prototype_accuracy(
    queries: Float[Tensor, "queries dim"],
    query_labels: Int[Tensor, "queries"],
    gallery: Float[Tensor, "gallery dim"],
    gallery_labels: Int[Tensor, "gallery"],
    *,
    similarity: Similarity = "cosine",
    same_set: bool,
    memory_bytes: int,
    processes: Processes = ALONE,
) -> Float[Tensor, "queries"]:
    """Whether the most similar prototype of each query is that of its own class.

    The prototype of a class is the mean of its gallery items: for cosine the mean of the items scaled to length 1, which
    is the usual choice, otherwise the plain mean. Every class of the gallery competes, also one that no query belongs to.

    Args:
        queries: (queries, dim) floating-point rows, finite.
        query_labels: the class of each query, any integers.
        gallery: (gallery, dim) rows of the items that the prototypes are the means of.
        gallery_labels: the class of each item.
        similarity: of query and prototype: `"cosine"`, `"dot"` or `"euclidean"`. A zero vector has cosine 0 to everything.
        same_set: queries and gallery are the same items in the same order. Each query is then left out of the prototype
            of its own class.
        memory_bytes: bound on the memory used beyond the embeddings, as far as 16 queries and 16 prototypes fit into it.
        processes: who else holds queries and gallery items; the result is that of the queries given here.

    Returns:
        One value for each query: 1 where its own prototype is the most similar, 1 / n where it is one of n equally
        similar ones (its chance to be named first), otherwise 0. NaN where its class has no prototype: no item in the
        gallery, or with one set none but the query itself.

    Raises:
        ValueError: if the similarity is unknown, or one set is announced and two of different lengths are given.

    Examples:
        >>> import torch
        >>> items, labels = torch.tensor([[0.0], [1.0], [9.0], [10.0], [3.0]]), torch.tensor([0, 0, 1, 1, 1])
        >>> prototype_accuracy(
        ...     items, labels, items, labels, similarity="euclidean", same_set=True, memory_bytes=10**6
        ... )
        tensor([1., 1., 1., 1., 0.], dtype=torch.float64)
    """
    check_similarity(similarity)
    if same_set and len(queries) != len(gallery):
        raise ValueError(
            f"prototype_accuracy: one set has as many queries as gallery items; got {len(queries)} and {len(gallery)}. "
            "Pass same_set=False for two sets."
        )
    result = torch.full((len(queries),), torch.nan, dtype=torch.float64, device=queries.device)
    classes = torch.from_numpy(processes.joined(gallery_labels.cpu().unique().numpy())).unique().to(queries.device)
    if not len(classes):
        return result
    with full_precision():
        item_class = torch.searchsorted(classes, gallery_labels.to(queries.device))
        query_labels = query_labels.to(queries.device)
        query_class = torch.searchsorted(classes, query_labels).clamp(max=len(classes) - 1)
        counts = torch.bincount(item_class, minlength=len(classes))
        counts = torch.from_numpy(processes.summed(counts.cpu().numpy())).to(queries.device)
        known = (classes[query_class] == query_labels) & (counts[query_class] > int(same_set))
        # equal queries of one class have equal values: in a collapsed set that leaves one query for each class
        case = (row_numbers(queries) * len(classes) + query_class)[known]
        if processes.count == 1 and not len(case):
            return result
        number = case.unique(return_inverse=True)[1]
        rows = known.nonzero().flatten()
        first = torch.full_like(number, len(rows)).scatter_reduce_(
            0, number, torch.arange(len(rows), device=rows.device), "amin"
        )[: int(number.max()) + 1 if len(number) else 0]
        distinct = rows[first]
        distinct = distinct[query_class[distinct].argsort(stable=True)]
        means = _Means(gallery, item_class, counts, similarity, memory_bytes, processes)
        search = _Search(means, queries, distinct, query_class[distinct], same_set=same_set)
        value = torch.empty(len(distinct), dtype=torch.float64, device=queries.device)
        value[number[torch.searchsorted(rows, distinct)]] = search.run()
        result[rows] = value[number]
    return result


@dataclass(frozen=True)
class _Sums:
    """Sums of items, of some classes or of one for each query: sums / counts are prototypes."""

    sums: Int[Tensor, "rows dim"]
    unit: Float[Tensor, "rows dim"]
    """power of two: each component is a multiple of unit * 2**-bits"""
    counts: Int[Tensor, "rows"]
    bits: int

    def select(self, index: Int[Tensor, "chosen"]) -> _Sums:
        """Some of the rows."""
        return _Sums(self.sums[index], self.unit[index], self.counts[index], self.bits)

    def without(self, items: Float[Tensor, "rows dim"]) -> _Sums:
        """Each sum without one of its items."""
        return _Sums(self.sums - _on_grid(items, self.unit, self.bits), self.unit, self.counts - 1, self.bits)

    @property
    def means(self) -> Float[Tensor, "rows dim"]:
        """The prototypes, rounded."""
        return self.sums.double() / self.counts.double().unsqueeze(1) * 2.0**-self.bits * self.unit

    def scores(self, queries: Float[Tensor, "rows dim"], similarity: Similarity) -> Float[Tensor, "rows"]:
        """The exact score of each query with the prototype of the same row.

        Sums of more than 53 bits are rounded to these. Dot products are in multiples of the power of two in the query.
        """
        scale, other = _power_of_two(queries.abs().amax(dim=1)), self.unit.amax(dim=1)
        count, dim = self.counts.double(), queries.shape[1]
        sums = self.sums.double() * 2.0**-self.bits * (self.unit / other.unsqueeze(1))
        if similarity == "euclidean":  # |n q - s| / n
            common = torch.maximum(scale, other)
            left, sums = queries / common.unsqueeze(1) * count.unsqueeze(1), sums * (other / common).unsqueeze(1)
            distance = exact_scores.root(*exact_scores.squared_distance(left, sums, torch.ones_like(count)))
            first, second = exact_scores.quotient(*distance, count)
            found = exact_scores.nearest(first, second, first * (2.0**-96 + exact_scores.relative_error(dim)))
        else:
            left = queries / scale.unsqueeze(1)
            products = exact_scores.dot(left, sums, single=False)
            if similarity == "cosine":
                squares = [exact_scores.dot(rows, rows, single=False)[:2] for rows in (left, sums)]
                found = exact_scores.cosine(products, squares[0], squares[1], dim)
            else:
                first, second = exact_scores.quotient(*products[:2], count)
                found = exact_scores.nearest(first, second, first.abs() * 2.0**-97 + products[2] / count)
        for row in found.isnan().nonzero().flatten().tolist():  # what the error leaves open
            found[row] = _by_fractions(left[row].tolist(), sums[row].tolist(), int(self.counts[row]), similarity)
        return found * {"cosine": torch.ones_like(count), "dot": other}.get(similarity, -torch.maximum(scale, other))


def _by_fractions(left: list[float], sums: list[float], count: int, similarity: Similarity) -> float:
    """Cosine, dot product over the count, or distance over the count, rounded once."""
    if similarity == "cosine":
        return exact_scores.by_fractions(left, sums, similarity)
    pairs = [(Fraction(x), Fraction(y)) for x, y in zip(left, sums, strict=True)]
    if similarity == "dot":
        return float(sum((x * y for x, y in pairs), Fraction(0)) / count)
    return exact_scores.nearest_root(sum(((x - y) ** 2 for x, y in pairs), Fraction(0)) / count**2)


class _Means:
    """The means of all classes, over all processes.

    Args:
        gallery: the items of this process.
        item_class: their class numbers.
        counts: how many items each class has in all processes.
        similarity: for cosine items are scaled to length 1 first.
        memory_bytes: bound on the memory used at a time.
        processes: who else holds items.
    """

    def __init__(
        self,
        gallery: Tensor,
        item_class: Int[Tensor, "items"],
        counts: Int[Tensor, "classes"],
        similarity: Similarity,
        memory_bytes: int,
        processes: Processes,
    ) -> None:
        self.gallery, self.counts, self.similarity, self.processes = gallery, counts, similarity, processes
        self.item_class, self.order = item_class.sort(stable=True)
        self.bits = 62 - int(counts.max()).bit_length()  # a sum of all items of a class fits into 63 bits
        # half of the memory for rows and prototypes, half for the pairs of a tile
        vectors = max(16, memory_bytes // 4 // (8 * NUMBERS_PER_COMPONENT * gallery.shape[1]))
        self.rows_at_once = min(4096, vectors, max(16, int((memory_bytes // 2 // (8 * NUMBERS_PER_PAIR)) ** 0.5)))
        self.classes_at_once = max(16, min(vectors, memory_bytes // 2 // (8 * NUMBERS_PER_PAIR * self.rows_at_once)))

    def prepared(self, vectors: Tensor) -> Float[Tensor, "items dim"]:
        """Items as they are averaged, by operations whose result depends on each row alone."""
        vectors = vectors.double()
        if self.similarity != "cosine":
            return vectors
        largest = vectors.abs().amax(dim=1, keepdim=True)
        # by a power of two, so that no square overflows or vanishes; 0 / 0 for a row of zeros
        vectors = (vectors / (largest / (2 * torch.frexp(largest)[0]))).masked_fill(largest == 0, 0.0)
        length = vectors.square().cumsum(dim=1)[:, -1:].sqrt()  # one after the other: the same sum in each layout
        return vectors / length.masked_fill(length == 0, 1.0)

    def classes(self) -> Iterator[tuple[int, _Sums]]:
        """All classes, some at a time: the number of the first of them, and their sums."""
        for first in range(0, len(self.counts), self.classes_at_once):
            counts = self.counts[first : first + self.classes_at_once]
            shape = len(counts), self.gallery.shape[1]
            largest = self.gallery.new_zeros(shape, dtype=torch.float64)
            for items, of_class in self._items(first, len(counts)):
                largest.scatter_reduce_(0, of_class[:, None].expand_as(items), items.abs(), "amax")
            if self.processes.count > 1:
                everywhere = np.max(self.processes.gather(largest.cpu().numpy()), axis=0)
                largest = torch.from_numpy(everywhere).to(largest.device)
            unit = _power_of_two(largest)
            sums = torch.zeros(shape, dtype=torch.int64, device=self.gallery.device)
            for items, of_class in self._items(first, len(counts)):
                sums.index_add_(0, of_class, _on_grid(items, unit[of_class], self.bits))
            if self.processes.count > 1:
                sums = torch.from_numpy(self.processes.summed(sums.cpu().numpy())).to(sums.device)
            yield first, _Sums(sums, unit, counts, self.bits)

    def _items(self, first: int, classes: int) -> Iterator[tuple[Float[Tensor, "items dim"], Int[Tensor, "items"]]]:
        """The items of some classes, some at a time, with the number of their class from the first of these on."""
        start, stop = torch.searchsorted(self.item_class, self.item_class.new_tensor([first, first + classes])).tolist()
        for begin in range(start, stop, self.rows_at_once):
            some = slice(begin, min(begin + self.rows_at_once, stop))
            yield self.prepared(self.gallery[self.order[some]]), self.item_class[some] - first


class _Search:
    """Counts, for each query, the prototypes that are more similar than its own, and those that are as similar.

    Args:
        means: the prototypes.
        queries: all queries.
        rows: those that are asked, in the order of their classes.
        row_class: their classes.
        same_set: leave each query out of the mean of its class.
    """

    def __init__(
        self,
        means: _Means,
        queries: Tensor,
        rows: Int[Tensor, "rows"],
        row_class: Int[Tensor, "rows"],
        *,
        same_set: bool,
    ) -> None:
        self.means, self.queries, self.rows, self.row_class, self.same_set = means, queries, rows, row_class, same_set

    def run(self) -> Float[Tensor, "rows"]:
        """1 where its own prototype is the most similar, 1 / n where it is one of n, otherwise 0."""
        own = torch.empty(len(self.rows), dtype=torch.float64, device=self.rows.device)
        better, equal = torch.zeros_like(self.rows), torch.zeros_like(self.rows)
        held: list[tuple[int, _Sums]] = []
        for first, sums in self.means.classes():
            held = [(first, sums)]
            self._score_own(own, first, sums)
        # if they do not all fit, they are formed once more, now that each query knows its own
        for first, sums in held if len(self.means.counts) <= self.means.classes_at_once else self.means.classes():
            for part in torch.arange(len(self.rows)).split(self.means.rows_at_once):
                more, same = self._compare(self.rows[part], own[part], self.row_class[part] - first, sums)
                better[part] += more
                equal[part] += same
        return (better == 0).double() / (1 + equal)

    def _score_own(self, own: Float[Tensor, "rows"], first: int, sums: _Sums) -> None:
        """The scores of the queries of some classes, from number `first` on, with their own prototypes."""
        ends = self.row_class.new_tensor([first, first + len(sums.counts)])
        low, high = torch.searchsorted(self.row_class, ends).tolist()
        for part in torch.arange(low, high, device=self.rows.device).split(self.means.rows_at_once):
            queries, mine = self.queries[self.rows[part]].double(), sums.select(self.row_class[part] - first)
            if self.same_set:
                mine = mine.without(self.means.prepared(queries))
            own[part] = mine.scores(queries, self.means.similarity)

    def _compare(
        self, rows: Int[Tensor, "rows"], own: Float[Tensor, "rows"], own_column: Int[Tensor, "rows"], sums: _Sums
    ) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows"]]:
        """How many other prototypes are more similar than each query's own, and how many are as similar.

        Where some are clearly more similar, the query has lost: those that are close are not looked at any more.
        """
        similarity, queries = self.means.similarity, self.queries[rows].double()
        tiles = ScoreTiles(queries, sums.means, similarity)
        # the scores of dot products are in multiples of a power of two in the query
        unit = _power_of_two(queries.abs().amax(dim=1)) if similarity == "dot" else torch.ones_like(own)
        threshold = tiles.keys_of(own * unit).unsqueeze(1)
        index, columns = (torch.arange(len(side), device=rows.device) for side in (rows, sums.counts))
        estimates, error = tiles.tile(index, columns, Precision.FLOAT64)
        others = own_column.unsqueeze(1) != columns  # its own prototype is no other
        # prototypes were rounded, and so is the difference
        error = (1.01 * error).unsqueeze(1) + threshold.abs() * 2.0**-50
        more = ((estimates - threshold > error) & others).sum(dim=1)
        unclear = ~((estimates - threshold).abs() > error) & (more == 0).unsqueeze(1) & others
        row, column = unclear.nonzero(as_tuple=True)
        equal = torch.zeros_like(more)
        if not len(row):
            return more, equal
        exact = self._distinct_scores(queries, sums, row, column)
        equal.index_add_(0, row, (exact == own[row]).long())
        more.index_add_(0, row, (exact > own[row]).long())
        return more, equal

    def _distinct_scores(
        self, queries: Float[Tensor, "rows dim"], sums: _Sums, row: Int[Tensor, "pairs"], column: Int[Tensor, "pairs"]
    ) -> Float[Tensor, "pairs"]:
        """The exact scores of pairs, each made once for equal queries and equal prototypes: of a collapsed set, few."""
        prototypes = torch.cat([sums.sums.double(), sums.unit, sums.counts.double().unsqueeze(1)], dim=1)
        number = row_numbers(queries)[row] * len(prototypes) + row_numbers(prototypes)[column]
        distinct, back = number.unique(return_inverse=True)
        first = torch.full_like(distinct, len(row)).scatter_reduce_(
            0, back, torch.arange(len(row), device=row.device), "amin"
        )
        scores = [
            sums.select(column[some]).scores(queries[row[some]], self.means.similarity)
            for some in first.split(self.means.rows_at_once)
        ]
        return torch.cat(scores)[back]


def _power_of_two(values: Tensor) -> Tensor:
    """The largest power of two not above each value; 1 for 0."""
    return torch.where(values == 0, 1.0, values / (2 * torch.frexp(values)[0]))


def _on_grid(values: Float[Tensor, "rows dim"], unit: Float[Tensor, "rows dim"], bits: int) -> Int[Tensor, "rows dim"]:
    """Each value in multiples of unit * 2**-bits."""
    return (values / unit * 2.0**bits).round().long()
