"""Nearest-prototype accuracy: how often the most similar class mean is that of the query's own class.

The prototypes are those of Snell, Swersky and Zemel, "Prototypical networks for few-shot learning", NeurIPS 2017, over
all items of a class; the classifier is the nearest class mean of Mensink, Verbeek, Perronnin and Csurka,
"Distance-based image classification: generalizing to new classes at near-zero cost", TPAMI 2013.

It is Recall@1 with the class means, rounded to float64, as the gallery. The means must not depend on the order of the items.
Each component of an item is therefore rounded to a grid, 2**-(62 - log2 n) of the largest such component in its class, where
n is the size of the largest class; sums of these integers are exact, and leaving a query out of its class is a subtraction.
A class that holds one huge item has a huge mean and a coarse grid, but no other class is touched by it. Equal means are
rounded alike for any number of members, so that they are equally similar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.evaluation import Matches, rank_of_best
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.relevance import Lists, Relevance
from fewshot_callbacks.engine.thresholds import BestMatches
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional._reading import computable
from fewshot_callbacks.settings import Similarity

# Float64 numbers that a component of a prototype or of an item takes while means are made, with room to spare.
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
    """Check whether the most similar prototype of each query is that of its own class.

    The prototype of a class is the mean of its gallery items, rounded to float64: for cosine the mean of the items scaled to
    length 1, which is the usual choice, otherwise the plain mean. Every class of the gallery competes, also one that no
    query belongs to.

    Args:
        queries: (queries, dim) floating-point rows, finite.
        query_labels: The class of each query, any integers.
        gallery: (gallery, dim) rows of the items that the prototypes are the means of.
        gallery_labels: The class of each item.
        similarity: Similarity of query and prototype: `"cosine"`, `"dot"` or `"euclidean"`. A zero vector has cosine 0 to
            everything.
        same_set: Queries and gallery are the same items in the same order. Each query is then left out of the prototype
            of its own class.
        memory_bytes: Bound on the memory used beyond the embeddings, as far as 16 prototypes and the least that a pass over
            these queries takes fit into it.
        processes: Who else holds queries and gallery items; the result is that of the queries given here.

    Returns:
        One value for each query: 1 where its own prototype is the most similar, 1 / n where it is one of n equally
        similar ones (its chance to be named first), otherwise 0. NaN where its class has no prototype: no item in the
        gallery, or with one set none but the query itself.

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
    item_class, query_class = (
        torch.searchsorted(classes, labels).clamp(max=len(classes) - 1) for labels in (gallery_labels, query_labels)
    )
    means = _ClassMeans(gallery, item_class, len(classes), similarity, memory_bytes, processes)
    known = (classes[query_class] == query_labels) & (means.counts[query_class] > int(same_set))
    with computing() as threads:
        better, equal = _count_others(
            computable(queries),
            torch.where(known, query_class, -1),
            means,
            memory_bytes // 2,
            threads,
            same_set=same_set,
        )
    return ((better == 0).double() / (1 + equal)).masked_fill(~known, torch.nan)


def _count_others(
    queries: Float[Tensor, "queries dim"],
    query_class: Int[Tensor, "queries"],
    means: _ClassMeans,
    memory_bytes: int,
    threads: int,
    *,
    same_set: bool,
) -> tuple[Int[Tensor, "queries"], Int[Tensor, "queries"]]:
    """Count the prototypes of other classes that are more similar to each query than its own, and those that are as similar.

    Args:
        queries: All queries.
        query_class: The class number of each; -1 where it has no prototype.
        means: The prototypes.
        memory_bytes: Budget of the pass over all pairs.
        threads: To compute with.
        same_set: Leave each query out of the mean of its class.
    """
    own = np.full(len(queries), -np.inf)
    better, equal = torch.zeros_like(query_class), torch.zeros_like(query_class)
    # means that do not all fit are formed once more, now that the score of each query with its own is known
    blocks = list(means.blocks()) if len(means.counts) <= means.classes_at_once else None
    for sums in blocks or means.blocks():
        for part in sums.members(query_class).split(means.rows_at_once):
            left_out = means.prepared(queries[part]) if same_set else None
            mine = sums.means(query_class[part] - sums.first, left_out)
            vectors = Vectors(queries[part], mine, means.similarity, threads=threads)
            every = np.arange(len(part))
            own[part.numpy()] = vectors.to_user(vectors.exact(every, every))
    for sums in blocks or means.blocks():
        prototypes = sums.means(slice(None))
        for part in torch.arange(len(queries)).split(means.rows_at_once):
            vectors = Vectors(queries[part], prototypes, means.similarity, threads=threads)
            number = (query_class[part] - sums.first).numpy()
            is_here = (number >= 0) & (number < len(prototypes))
            first = np.where(is_here, number, 0)  # its own prototype is no other
            lists = Lists(first, first + is_here, np.arange(len(prototypes), dtype=np.int32))
            thresholds = np.where(query_class[part].numpy() >= 0, vectors.from_user(own[part.numpy()]), -np.inf)
            relevance = Relevance(lists, np.full(len(part), -1, np.int32))
            best = BestMatches(thresholds, np.ones(len(part), np.int64))
            ranks = rank_of_best(Matches(vectors, relevance, best, "float32", None, memory_bytes))
            better[part] += ranks.negatives_above[:, 0]
            equal[part] += ranks.negatives_tied[:, 0]
    return better, equal


@dataclass(frozen=True)
class _Sums:
    """The sums of the items of some classes."""

    # number of the first class
    first: int
    sums: Int[Tensor, "classes dim"]
    # power of two: each component is a multiple of unit * 2**-bits
    unit: Float[Tensor, "classes dim"]
    counts: Int[Tensor, "classes"]
    bits: int

    def members(self, query_class: Int[Tensor, "queries"]) -> Int[Tensor, "members"]:
        """Find the indices of the queries of these classes."""
        return ((query_class >= self.first) & (query_class < self.first + len(self.counts))).nonzero().flatten()

    def means(
        self, index: Int[Tensor, "rows"] | slice, left_out: Float[Tensor, "rows dim"] | None = None
    ) -> Float[Tensor, "rows dim"]:
        """Compute the means of these classes, each without one of its items if they are given, rounded to float64.

        Each step depends on the quotient alone, so that equal ones are rounded alike. The result is the nearest float64
        wherever the quotient is at least the number of items; below, a tie may fall to the other side.
        """
        sums, unit, counts = self.sums[index], self.unit[index], self.counts[index].unsqueeze(1)
        if left_out is not None:
            sums, counts = sums - _on_grid(left_out, unit, self.bits), counts - 1
        whole = torch.div(sums, counts, rounding_mode="trunc").double()
        rest = sums - whole.long() * counts  # exact, since no mean lies beyond 2**(bits + 1), which float64 holds
        return (whole + rest.double() / counts.double()) * 2.0**-self.bits * unit


class _ClassMeans:
    """The means of all classes, over all processes.

    Args:
        gallery: The items of this process.
        item_class: Class numbers of the items.
        classes: The number of classes.
        similarity: For cosine items are scaled to length 1 first.
        memory_bytes: Bound on the memory used at a time, half of which is left for the pass over all pairs.
        processes: Who else holds items.
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
        self.gallery, self.similarity, self.processes = gallery, similarity, processes
        self.item_class, self.order = item_class.sort(stable=True)
        self.counts = self._everywhere(torch.bincount(item_class, minlength=classes), np.sum)
        self.bits = 62 - int(self.counts.max()).bit_length()  # a sum of all items of a class fits into 63 bits
        dim = gallery.shape[1]
        self.classes_at_once = max(16, memory_bytes // 4 // (8 * NUMBERS_PER_COMPONENT * dim))
        self.rows_at_once = min(4096, self.classes_at_once)
        # dot products with means of this scale stay in the range of float64; a power of two changes no comparison
        largest = max(abs(float(end)) for end in gallery.aminmax()) if len(gallery) else 0.0
        exponent = math.frexp(processes.largest([largest])[0])[1] + dim.bit_length() + 2
        self.scale = 2.0 ** min(-exponent, 1023) if similarity == "dot" else 1.0

    def _everywhere(self, mine: Tensor, over_processes: Callable[..., Any]) -> Tensor:
        """Reduce each number over all processes, to its sum or its maximum."""
        found = over_processes(self.processes.gather(mine.cpu().numpy()), axis=0)
        return torch.from_numpy(found).to(mine.device)

    def prepared(self, vectors: Float[Tensor, "items dim"]) -> Float[Tensor, "items dim"]:
        """Items as they are averaged, by operations whose result depends on each row alone."""
        vectors = vectors.double()
        if self.similarity != "cosine":
            return vectors * self.scale
        largest = vectors.abs().amax(dim=1, keepdim=True)
        # by a power of two, so that no square overflows or vanishes
        vectors = vectors / _power_of_two(largest)
        length = vectors.square().cumsum(dim=1)[:, -1:].sqrt()  # sequential: the same sum in each layout
        return vectors / length.masked_fill(length == 0, 1.0)

    def blocks(self) -> Iterator[_Sums]:
        """Yield the sums of all classes, a block of classes at a time."""
        for first in range(0, len(self.counts), self.classes_at_once):
            counts = self.counts[first : first + self.classes_at_once]
            largest = self.gallery.new_zeros((len(counts), self.gallery.shape[1]), dtype=torch.float64)
            for items, of_class in self._items(first, len(counts)):
                largest.scatter_reduce_(0, of_class[:, None].expand_as(items), items.abs(), "amax")
            unit = _power_of_two(self._everywhere(largest, np.max))
            sums = torch.zeros_like(unit, dtype=torch.int64)
            for items, of_class in self._items(first, len(counts)):
                sums.index_add_(0, of_class, _on_grid(items, unit[of_class], self.bits))
            yield _Sums(first, self._everywhere(sums, np.sum), unit, counts, self.bits)

    def _items(self, first: int, classes: int) -> Iterator[tuple[Float[Tensor, "items dim"], Int[Tensor, "items"]]]:
        """Yield blocks of the items of some classes, with the index of each item's class among these."""
        start, stop = torch.searchsorted(self.item_class, self.item_class.new_tensor([first, first + classes])).tolist()
        for some in torch.arange(start, stop).split(self.rows_at_once):
            yield self.prepared(self.gallery[self.order[some]]), self.item_class[some] - first


def _power_of_two(values: Tensor) -> Tensor:
    """Find the largest power of two not above each value; 1 for 0."""
    return torch.where(values == 0, 1.0, values / (2 * torch.frexp(values)[0]))


def _on_grid(values: Float[Tensor, "rows dim"], unit: Float[Tensor, "rows dim"], bits: int) -> Int[Tensor, "rows dim"]:
    """Round each value to a multiple of unit * 2**-bits."""
    return (values / unit * 2.0**bits).round().long()
