"""Nearest-prototype accuracy: how often the most similar class mean is the mean of the query's own class.

The prototypes are from Snell, Swersky and Zemel, "Prototypical networks for few-shot learning", NeurIPS 2017, but over all
items of a class. The classifier is the nearest class mean from Mensink, Verbeek, Perronnin and Csurka, "Distance-based image
classification: generalizing to new classes at near-zero cost", TPAMI 2013.

It is Recall@1 with the class means, rounded to float64, as the gallery.

Why the means are sums of integers: a sum of float64 numbers depends on the order of the items, on their distribution over
processes, and on whether a query was subtracted or never added. Prototypes that differ in the last digit would then rank
differently although they should tie. So each component of an item is rounded to a grid with the step 2**-(62 - log2 n) of
the largest such component in its class, where n is the size of the largest class. Sums of these integers are exact in any
order, and a query is left out of its class by a subtraction. `math.fsum` is also independent of the order, but it sums one
component of one class at a time, and again for each query that is left out.

A class with one huge item has a huge mean and a coarse grid, but the grids of other classes do not depend on it. Equal means
are rounded to equal float64 numbers for any number of items, so they are equally similar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.evaluation import Matches, rank_of_best
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.ranks import RankBlock
from fewshot_callbacks.engine.relevance import Lists, PairRelevance
from fewshot_callbacks.engine.thresholds import BestMatches
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional._reading import computable
from fewshot_callbacks.settings import Similarity

# Upper bound on the float64 numbers in memory per component of a prototype or an item while means are computed.
NUMBERS_PER_COMPONENT = 16


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
    """Return, for each query, whether the most similar prototype is the prototype of its own class. *Collective*.

    The prototype of a class is the mean of its gallery items, rounded to float64. For cosine, the items are scaled to length
    1 first, which is the usual choice. Every class of the gallery competes, even if no query belongs to it.

    Labels are any integers. A zero vector has cosine 0 to everything. With `same_set`, queries and gallery are the same
    items in the same order, and each query is left out of its own class's prototype. `memory_bytes` bounds the memory
    beyond the embeddings. It is exceeded if 16 prototypes, or the smallest possible pass over the queries of this
    process, need more. The value is 1 / n if the query's own prototype is one of n equally similar best prototypes, and
    otherwise 0. It is NaN if the class has no gallery item except the query itself.

    Examples:
        >>> import torch
        >>> items, labels = torch.tensor([[0.0], [1.0], [9.0], [10.0], [3.0]]), torch.tensor([0, 0, 1, 1, 1])
        >>> prototype_accuracy(
        ...     items, labels, items, labels, similarity="euclidean", same_set=True, memory_bytes=10**6
        ... )
        tensor([1., 1., 1., 1., 0.], dtype=torch.float64)
    """
    classes = torch.from_numpy(processes.joined(gallery_labels.cpu().unique().numpy())).unique()
    if not len(classes):
        return torch.full((len(queries),), torch.nan, dtype=torch.float64)
    item_class = torch.searchsorted(classes, gallery_labels)
    query_class = torch.searchsorted(classes, query_labels).clamp(max=len(classes) - 1)
    means = _ClassMeans(gallery, item_class, len(classes), similarity, memory_bytes, processes)
    has_prototype = (classes[query_class] == query_labels) & (means.counts[query_class] > int(same_set))
    with computing() as threads:
        comparison = _PrototypeComparison(
            computable(queries), torch.where(has_prototype, query_class, -1), means, threads, same_set=same_set
        )
        better, equal = comparison.count_others(memory_bytes // 2)
    return ((better == 0).double() / (1 + equal)).masked_fill(~has_prototype, torch.nan)


@dataclass(frozen=True)
class _PrototypeComparison:
    """The comparison of the queries of this process with all prototypes."""

    queries: Float[Tensor, "queries dim"]
    # class number of each query; -1 where it has no prototype
    query_class: Int[Tensor, "queries"]
    means: _ClassMeans
    threads: int
    _: KW_ONLY
    # whether each query is left out of the mean of its class
    same_set: bool

    def count_others(self, memory_bytes: int) -> tuple[Int[Tensor, "queries"], Int[Tensor, "queries"]]:
        """Return how many other prototypes are more similar to each query than its own, and how many are equally similar.

        *Collective*.
        """
        means = self.means
        # All blocks of sums, if they fit into the budget. Otherwise they are computed in both loops.
        cached = list(means.blocks()) if len(means.counts) <= means.classes_at_once else None
        scores = np.full(len(self.queries), -np.inf)
        for sums in cached or means.blocks():
            for batch in sums.members(self.query_class).split(means.rows_at_once):
                scores[batch.numpy()] = self._scores_of_own_class(batch, sums)
        better = torch.zeros_like(self.query_class)
        equal = torch.zeros_like(self.query_class)
        for sums in cached or means.blocks():
            prototypes = sums.means(slice(None))
            for batch in torch.arange(len(self.queries)).split(means.rows_at_once):
                ranks = self._rank(batch, prototypes, sums.first, scores[batch.numpy()], memory_bytes)
                better[batch] += ranks.negatives_above[:, 0]
                equal[batch] += ranks.negatives_tied[:, 0]
        return better, equal

    def _scores_of_own_class(self, batch: Int[Tensor, "batch"], sums: _Sums) -> Float[np.ndarray, "batch"]:
        """Return the exact scores of some queries with the prototypes of their classes, in the units of the data.

        All classes of these queries are in the block.
        """
        held_out = self.means.prepared(self.queries[batch]) if self.same_set else None
        prototypes = sums.means(self.query_class[batch] - sums.first, held_out)
        vectors = Vectors.of(self.queries[batch], prototypes, self.means.similarity, threads=self.threads)
        rows = np.arange(len(batch))
        return vectors.scale.to_user(vectors.exact(rows, rows))

    def _rank(
        self,
        batch: Int[Tensor, "batch"],
        prototypes: Float[Tensor, "classes dim"],
        first_class: int,
        scores: Float[np.ndarray, "batch"],
        memory_bytes: int,
    ) -> RankBlock:
        """Return the rank of each query's score among the prototypes of a block of classes, without its own class.

        `scores` are with the prototypes of the queries' own classes, in the units of the data. `first_class` is the
        number of the block's first class.
        """
        vectors = Vectors.of(self.queries[batch], prototypes, self.means.similarity, threads=self.threads)
        query_class = self.query_class[batch].numpy()
        thresholds = np.where(query_class >= 0, vectors.scale.from_user(scores), -np.inf)
        relevance = _relevance_of_class(query_class - first_class, len(prototypes))
        best = BestMatches(thresholds, np.ones(len(batch), np.int64))
        return rank_of_best(Matches(vectors, relevance, best, "float32", None, memory_bytes))


def _relevance_of_class(prototype: Int[np.ndarray, "queries"], prototypes: int) -> PairRelevance:
    """Return the relevance in which the prototype of a query's class is its only relevant item, if this block contains it.

    Indices of prototypes that are out of range belong to other blocks.
    """
    is_present = (prototype >= 0) & (prototype < prototypes)
    first = np.where(is_present, prototype, 0)
    lists = Lists(first, first + is_present, np.arange(prototypes, dtype=np.int32))
    return PairRelevance(lists, np.full(len(prototype), -1, np.int32))


@dataclass(frozen=True)
class _Sums:
    """The sums of the items of a block of classes, as integer multiples of `scale * 2**-bits`."""

    # number of the first class
    first: int
    sums: Int[Tensor, "classes dim"]
    # a power of two
    scale: Float[Tensor, "classes dim"]
    counts: Int[Tensor, "classes"]
    bits: int

    def members(self, query_class: Int[Tensor, "queries"]) -> Int[Tensor, "members"]:
        """Return the indices of the queries of these classes."""
        is_member = (query_class >= self.first) & (query_class < self.first + len(self.counts))
        return is_member.nonzero().flatten()

    def means(
        self, index: Int[Tensor, "rows"] | slice, held_out: Float[Tensor, "rows dim"] | None = None
    ) -> Float[Tensor, "rows dim"]:
        """Return the means of some classes, rounded to float64.

        Each step depends only on the quotient, so equal means are bit-identical. The result is the nearest float64 if the
        quotient is at least the number of items. For a smaller quotient, a tie may be rounded the other way.

        `index` has the positions of the classes in this block. `held_out` has an item of each class that its mean
        leaves out.
        """
        sums = self.sums[index]
        scale = self.scale[index]
        counts = self.counts[index].unsqueeze(1)
        if held_out is not None:
            sums = sums - _on_grid(held_out, scale, self.bits)
            counts = counts - 1
        quotient = torch.div(sums, counts, rounding_mode="trunc").double()
        rest = sums - quotient.long() * counts  # exact, since no mean exceeds 2**(bits + 1), which float64 represents
        return (quotient + rest.double() / counts.double()) * 2.0**-self.bits * scale


class _ClassMeans:
    """The means of all classes, over all processes.

    For cosine, items are scaled to length 1 first. Half of the budget is for the pass over all pairs.
    """

    def __init__(
        self,
        gallery: Float[Tensor, "items dim"],
        item_class: Int[Tensor, "items"],
        classes: int,
        similarity: Similarity,
        memory_bytes: int,
        processes: Processes,
    ) -> None:
        self.gallery = gallery
        self.similarity = similarity
        self.processes = processes
        # class numbers, ascending, and the index of each item in this order
        self.item_class, self.order = item_class.sort(stable=True)
        self.counts = self._everywhere(torch.bincount(item_class, minlength=classes), np.sum)
        self.bits = 62 - int(self.counts.max()).bit_length()  # a sum of all items of a class fits into 63 bits
        dim = gallery.shape[1]
        self.classes_at_once = max(16, memory_bytes // 4 // (8 * NUMBERS_PER_COMPONENT * dim))
        self.rows_at_once = min(4096, self.classes_at_once)
        # At this scale, dot products with means stay in the range of float64. A power of two does not affect comparisons.
        largest = max(abs(float(end)) for end in gallery.aminmax()) if len(gallery) else 0.0
        exponent = math.frexp(processes.largest([largest])[0])[1] + dim.bit_length() + 2
        self.scale = 2.0 ** min(-exponent, 1023) if similarity == "dot" else 1.0

    def _everywhere(self, mine: Tensor, over_processes: Callable[..., Any]) -> Tensor:
        """Return the sum or the maximum of each number over all processes. *Collective*."""
        reduced = over_processes(self.processes.gather(mine.cpu().numpy()), axis=0)
        return torch.from_numpy(reduced).to(mine.device)

    def prepared(self, vectors: Float[Tensor, "items dim"]) -> Float[Tensor, "items dim"]:
        """Return items in the form that is averaged. Each result depends only on its own row."""
        vectors = vectors.double()
        if self.similarity != "cosine":
            return vectors * self.scale
        largest = vectors.abs().amax(dim=1, keepdim=True)
        # The division by a power of two prevents overflow and underflow of squares.
        vectors = vectors / _power_of_two(largest)
        # A cumulative sum adds the components in order, whatever their layout in memory.
        length = vectors.square().cumsum(dim=1)[:, -1:].sqrt()
        return vectors / length.masked_fill(length == 0, 1.0)

    def blocks(self) -> Iterator[_Sums]:
        """Yield the sums of all classes, one block of classes at a time. *Collective*."""
        for first in range(0, len(self.counts), self.classes_at_once):
            counts = self.counts[first : first + self.classes_at_once]
            largest = self.gallery.new_zeros((len(counts), self.gallery.shape[1]), dtype=torch.float64)
            for items, of_class in self._items(first, len(counts)):
                largest.scatter_reduce_(0, of_class[:, None].expand_as(items), items.abs(), "amax")
            scale = _power_of_two(self._everywhere(largest, np.max))
            sums = torch.zeros_like(scale, dtype=torch.int64)
            for items, of_class in self._items(first, len(counts)):
                sums.index_add_(0, of_class, _on_grid(items, scale[of_class], self.bits))
            yield _Sums(first, self._everywhere(sums, np.sum), scale, counts, self.bits)

    def _items(self, first: int, classes: int) -> Iterator[tuple[Float[Tensor, "items dim"], Int[Tensor, "items"]]]:
        """Yield the items of consecutive classes in batches, with the class index of each item, counted from `first`."""
        ends = self.item_class.new_tensor([first, first + classes])
        start, stop = torch.searchsorted(self.item_class, ends).tolist()
        for batch in torch.arange(start, stop).split(self.rows_at_once):
            yield self.prepared(self.gallery[self.order[batch]]), self.item_class[batch] - first


def _power_of_two(values: Tensor) -> Tensor:
    """Return the largest power of two that does not exceed each value; 1 for 0."""
    return torch.where(values == 0, 1.0, values / (2 * torch.frexp(values)[0]))


def _on_grid(values: Float[Tensor, "rows dim"], scale: Float[Tensor, "rows dim"], bits: int) -> Int[Tensor, "rows dim"]:
    """Return each value as an integer, rounded to a multiple of scale * 2**-bits."""
    return (values / scale * 2.0**bits).round().long()
