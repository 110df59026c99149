"""Nearest-prototype accuracy: how often the most similar class mean is that of the query's own class.

The prototypes are those of Snell, Swersky and Zemel, "Prototypical networks for few-shot learning", NeurIPS 2017, over
all items of a class; the classifier is the nearest class mean of Mensink, Verbeek, Perronnin and Csurka,
"Distance-based image classification: generalizing to new classes at near-zero cost", TPAMI 2013.

It is Recall@1 with the class means as the gallery: a float64 product decides where its error leaves no doubt, the exact
score elsewhere (see `similarity`). The means must not depend on the order of the items. Each component of an item is
therefore rounded to a grid, 2**-(62 - log2 n) of the largest such component in its class, where n is the size of the largest
class; sums of these integers are exact, and leaving a query out of its class is a subtraction. A class that holds one huge
item has a huge mean and a coarse grid, but no other class is touched by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional._precision import full_precision
from fewshot_callbacks.functional.candidates import row_numbers
from fewshot_callbacks.functional.exact_scores import two_product, two_sum
from fewshot_callbacks.functional.processes import ALONE, Processes
from fewshot_callbacks.functional.similarity import DOUBLE, ScoreTiles, Similarity, check_similarity

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
class _Classes:
    """Some classes that follow each other, as exact sums of their items on a grid."""

    first: int
    sums: Int[Tensor, "classes dim"]
    grid: Float[Tensor, "classes dim"]
    """power of two: the sums are multiples of it"""
    counts: Int[Tensor, "classes"]

    @property
    def means(self) -> Float[Tensor, "classes dim"]:
        """The prototypes."""
        return _mean(self.sums, self.counts, self.grid)

    def means_without(
        self, items: Float[Tensor, "items dim"], of_class: Int[Tensor, "items"]
    ) -> Float[Tensor, "items dim"]:
        """For each item the mean of the others of its class, whose number in `first`, ... is given."""
        grid = self.grid[of_class]
        return _mean(self.sums[of_class] - _on_grid(items, grid), self.counts[of_class] - 1, grid)


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

    def classes(self) -> Iterator[_Classes]:
        """All classes, some at a time."""
        for first in range(0, len(self.counts), self.classes_at_once):
            counts = self.counts[first : first + self.classes_at_once]
            shape = len(counts), self.gallery.shape[1]
            largest = self.gallery.new_zeros(shape, dtype=torch.float64)
            for items, of_class in self._items(first, len(counts)):
                largest.scatter_reduce_(0, of_class[:, None].expand_as(items), items.abs(), "amax")
            if self.processes.count > 1:
                everywhere = np.max(self.processes.gather(largest.cpu().numpy()), axis=0)
                largest = torch.from_numpy(everywhere).to(largest.device)
            grid = _power_of_two(largest) * 2.0**-self.bits
            sums = torch.zeros(shape, dtype=torch.int64, device=self.gallery.device)
            for items, of_class in self._items(first, len(counts)):
                sums.index_add_(0, of_class, _on_grid(items, grid[of_class]))
            if self.processes.count > 1:
                sums = torch.from_numpy(self.processes.summed(sums.cpu().numpy())).to(sums.device)
            yield _Classes(first, sums, grid, counts)

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
        held: list[_Classes] = []
        for some in self.means.classes():
            held = [some]
            self._score_own(own, some)
        # if they do not all fit, they are formed once more, now that each query knows its own
        for some in held if len(self.means.counts) <= self.means.classes_at_once else self.means.classes():
            prototypes = some.means
            for part in torch.arange(len(self.rows)).split(self.means.rows_at_once):
                more, same = self._compare(self.rows[part], own[part], self.row_class[part] - some.first, prototypes)
                better[part] += more
                equal[part] += same
        return (better == 0).double() / (1 + equal)

    def _score_own(self, own: Float[Tensor, "rows"], some: _Classes) -> None:
        """The scores of the queries of some classes with their own prototypes."""
        ends = self.row_class.new_tensor([some.first, some.first + len(some.counts)])
        low, high = torch.searchsorted(self.row_class, ends).tolist()
        prototypes = some.means
        for part in torch.arange(low, high, device=self.rows.device).split(self.means.rows_at_once):
            queries, of_class = self.queries[self.rows[part]].double(), self.row_class[part] - some.first
            mine = prototypes[of_class]
            if self.same_set:
                mine = some.means_without(self.means.prepared(queries), of_class)
            tiles = ScoreTiles(queries, mine, self.means.similarity)
            pair = torch.arange(len(part), device=part.device)
            own[part] = tiles.scores_of(tiles.pair_keys(pair, pair))

    def _compare(
        self,
        rows: Int[Tensor, "rows"],
        own: Float[Tensor, "rows"],
        own_column: Int[Tensor, "rows"],
        prototypes: Float[Tensor, "classes dim"],
    ) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows"]]:
        """How many other prototypes are more similar than each query's own, and how many are as similar.

        Where some are clearly more similar, the query has lost: those that are close are not looked at any more.
        """
        tiles = ScoreTiles(self.queries[rows].double(), prototypes, self.means.similarity)
        threshold = tiles.keys_of(own)
        queries, columns = (torch.arange(len(side), device=rows.device) for side in (rows, prototypes))
        estimates, error = tiles.tile(queries, columns, DOUBLE)
        inside = ((own_column >= 0) & (own_column < len(prototypes))).nonzero().flatten()
        estimates[inside, own_column[inside]] = -torch.inf  # its own prototype is no other
        estimates -= threshold.unsqueeze(1)
        error = error + threshold.abs() * 2.0**-52  # of the difference
        more = (estimates > error.unsqueeze(1)).sum(dim=1)
        unclear = (estimates.abs() <= error.unsqueeze(1)) & (more == 0).unsqueeze(1)
        row, column = unclear.nonzero(as_tuple=True)
        exact = tiles.pair_keys(row, column)
        equal = torch.zeros_like(more).index_add_(0, row, (exact == threshold[row]).long())
        return more.index_add_(0, row, (exact > threshold[row]).long()), equal


def _power_of_two(values: Tensor) -> Tensor:
    """The largest power of two not above each value; 1 for 0."""
    return torch.where(values == 0, 1.0, values / (2 * torch.frexp(values)[0]))


def _on_grid(values: Float[Tensor, "items dim"], grid: Float[Tensor, "items dim"]) -> Int[Tensor, "items dim"]:
    return (values / grid).round().long()


def _mean(
    sums: Int[Tensor, "items dim"], counts: Int[Tensor, "items"], grid: Float[Tensor, "items dim"]
) -> Float[Tensor, "items dim"]:
    """Sums / counts * grid, rounded once: equal means give equal results, whatever the number of items."""
    high = sums.double()
    low = (sums - high.long()).double()
    count = counts.double().unsqueeze(1).expand_as(high)
    quotient = high / count
    back, error = two_product(quotient, count)
    return two_sum(quotient, (((high - back) - error) + low) / count)[0] * grid
