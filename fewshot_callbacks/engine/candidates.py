"""Who may be retrieved for whom: classes, the item itself, groups, and the order in which the pass takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Queries and gallery ordered by class, so that the relevant items of a query lie side by side.

    Classes are numbered by the number of their gallery items (then queries), so that neighbours in this order have
    about as many relevant items. An index into `query_order` or `gallery_order` is called a *position*.
    """

    query_order: Int[Tensor, "queries"]
    """position -> index of the query"""
    gallery_order: Int[Tensor, "gallery"]
    """position -> index of the gallery item"""
    query_class: Int[Tensor, "queries"]
    """class number of each position in `query_order`, ascending"""
    gallery_class: Int[Tensor, "gallery"]
    """class number of each position in `gallery_order`, ascending"""
    query_start: Int[Tensor, "classes1"]
    """first position of each class among the queries, and their number"""
    gallery_start: Int[Tensor, "classes1"]
    """first position of each class in the gallery, and the number of items"""
    exclusions: tuple[tuple[Int[Tensor, "queries"], Int[Tensor, "gallery"]], ...]
    """int32 codes by index: a candidate whose code equals the query's is neither a hit nor a miss"""
    has_codes: bool
    """whether ids or groups exclude pairs, beside a query and itself"""
    excluded_negatives: int
    """pairs of different classes that are excluded, of all queries and the whole gallery"""
    part: Int[Tensor, "classes"] | None = None
    """where items of different parts are no candidates for each other: the part of each class, ascending"""

    @property
    def classes(self) -> int:
        """How many labels there are, queries' and gallery's together."""
        return len(self.query_start) - 1

    @property
    def pairs(self) -> int:
        """Pairs of a query and a gallery item that it searches, itself included."""
        queries, gallery = self.query_start.diff(), self.gallery_start.diff()
        if self.part is None:
            return int(queries.sum()) * int(gallery.sum())
        parts = torch.zeros((2, int(self.part.max()) + 1), dtype=torch.int64, device=queries.device)
        parts[0].index_add_(0, self.part, queries)
        parts[1].index_add_(0, self.part, gallery)
        return int((parts[0] * parts[1]).sum())

    @property
    def relevant_pairs(self) -> int:
        """Pairs of one class, those of an item with itself included."""
        return int((self.query_start.diff() * self.gallery_start.diff()).sum())

    @property
    def negative_pairs(self) -> int:
        """Pairs of different classes that are not excluded, where this is of all queries and the whole gallery."""
        return self.pairs - self.relevant_pairs - self.excluded_negatives

    @property
    def across_classes(self) -> bool:
        """Whether some pair of different classes is excluded."""
        return self.excluded_negatives > 0

    @property
    def most_relevant(self) -> int:
        """Gallery items of the largest class that has a query."""
        in_class = self.gallery_start.diff()[self.query_class]
        return int(in_class.max()) if len(in_class) else 0

    def share(self, queries: Int[Tensor, "some"], gallery: Int[Tensor, "others"]) -> Candidates:
        """Return some of the queries with some of the gallery, in the same classes; indices are those among these.

        Args:
            queries: Indices.
            gallery: Indices.
        """
        query_class, gallery_class = torch.empty_like(self.query_class), torch.empty_like(self.gallery_class)
        query_class[self.query_order], gallery_class[self.gallery_order] = self.query_class, self.gallery_class
        own, others = query_class[queries], gallery_class[gallery]
        query_order, gallery_order = own.argsort(stable=True), others.argsort(stable=True)
        exclusions = tuple((of_query[queries], of_item[gallery]) for of_query, of_item in self.exclusions)
        return Candidates(
            query_order,
            gallery_order,
            own[query_order],
            others[gallery_order],
            starts_of(own, self.classes),
            starts_of(others, self.classes),
            exclusions,
            self.has_codes,
            self.excluded_negatives,
            self.part,
        )

    def codes(
        self, queries: Int[Tensor, "queries"], gallery: Int[Tensor, "items"]
    ) -> tuple[Int[Tensor, "exclusions queries"], Int[Tensor, "exclusions items"]]:
        """Return the codes of these indices, a row for each exclusion, of which there must be one."""
        of_queries, of_items = zip(*self.exclusions, strict=True)
        return torch.stack([code[queries] for code in of_queries]), torch.stack([code[gallery] for code in of_items])

    def excluded(self, queries: Tensor, gallery: Tensor) -> Bool[Tensor, "*pairs"]:
        """Return whether the pairs of these indices (broadcast against each other) are excluded."""
        shape = torch.broadcast_shapes(queries.shape, gallery.shape)
        result = torch.zeros(shape, dtype=torch.bool, device=queries.device)
        for query_code, gallery_code in self.exclusions:
            result |= query_code[queries] == gallery_code[gallery]
        return result


def find_candidates(
    query_labels: Int[Tensor, "queries"],
    gallery_labels: Int[Tensor, "gallery"],
    *,
    same_set: bool,
    query_ids: Int[Tensor, "queries"] | None = None,
    gallery_ids: Int[Tensor, "gallery"] | None = None,
    query_groups: Int[Tensor, "queries"] | None = None,
    gallery_groups: Int[Tensor, "gallery"] | None = None,
    query_part: Int[Tensor, "queries"] | None = None,
    query_position: Int[Tensor, "queries"] | None = None,
) -> Candidates:
    """Order the items by class and note who is excluded.

    Args:
        query_labels: Any integers.
        gallery_labels: Any integers.
        same_set: Queries and gallery are the same items in the same order (leave-one-out).
        query_ids: Identity of each query; with `gallery_ids`, the same item is never a candidate of itself.
        gallery_ids: Identity of each gallery item.
        query_groups: Items of the query's own group are neither hit nor miss.
        gallery_groups: Group of each gallery item.
        query_part: By default everything is searched; else each query only searches the classes of its part. The
            part of a class is that of its queries: no class may have queries in two, or no query at all.
        query_position: Where the queries are some of the gallery's items: the index of each there.
    """
    codes = torch.cat([query_labels, gallery_labels]).unique(return_inverse=True)[1]
    query_code, gallery_code = codes[: len(query_labels)], codes[len(query_labels) :]
    classes = int(codes.max()) + 1
    queries_in = torch.bincount(query_code, minlength=classes)
    gallery_in = torch.bincount(gallery_code, minlength=classes)
    by_size = (gallery_in * (len(query_labels) + 1) + queries_in).argsort(stable=True)
    part = None
    if query_part is not None:
        part = torch.zeros(classes, dtype=torch.int64, device=codes.device).scatter_(0, query_code, query_part)
        by_size = by_size[part[by_size].argsort(stable=True)]
        part = part[by_size]
    number = torch.empty_like(by_size)
    number[by_size] = torch.arange(classes, device=by_size.device)

    itself = []
    if same_set or query_position is not None:
        places = torch.arange(len(gallery_labels), dtype=torch.int32, device=codes.device)
        itself.append((places if query_position is None else query_position.int(), places))
    given = [
        torch.cat([of_query, of_item]).unique(return_inverse=True)[1].int()
        for of_query, of_item in ((query_ids, gallery_ids), (query_groups, gallery_groups))
        if of_query is not None and of_item is not None
    ]
    queries, query_class, gallery_class = len(query_labels), number[query_code], number[gallery_code]
    query_order, gallery_order = query_class.argsort(stable=True), gallery_class.argsort(stable=True)
    return Candidates(
        query_order=query_order,
        gallery_order=gallery_order,
        query_class=query_class[query_order],
        gallery_class=gallery_class[gallery_order],
        query_start=_starts(queries_in[by_size]),
        gallery_start=_starts(gallery_in[by_size]),
        exclusions=(*itself, *((code[:queries], code[queries:]) for code in given)),
        has_codes=bool(given),
        excluded_negatives=_excluded_negatives(given, number[codes], part, queries),
        part=part,
    )


def _excluded_negatives(exclusions: Sequence[Tensor], classes: Tensor, part: Tensor | None, queries: int) -> int:
    """Count the pairs of different classes (of one part) that some exclusion meets, by inclusion and exclusion.

    Args:
        exclusions: Codes of the queries, and after them those of the gallery items, like the other arguments.
        classes: Their class numbers.
        part: The part of each class.
        queries: How many of them are queries.
    """
    searched, total = () if part is None else (part[classes],), 0
    for many in range(1, len(exclusions) + 1):
        for chosen in combinations(exclusions, many):
            equal = [_equal_pairs(codes, queries) for codes in ((*searched, *chosen), (*searched, *chosen, classes))]
            total += (equal[0] - equal[1]) * (1 if many % 2 else -1)
    return total


def _equal_pairs(codes: Sequence[Tensor], queries: int) -> int:
    """Count the pairs of a query and a gallery item all of whose codes are equal."""
    joined = torch.zeros_like(codes[0], dtype=torch.int64)
    for code in codes:
        joined = (joined * (int(code.max()) + 1) + code).unique(return_inverse=True)[1]
    of_queries, of_items = (
        torch.bincount(side, minlength=len(joined)) for side in (joined[:queries], joined[queries:])
    )
    return int((of_queries * of_items).sum())


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def starts_of(classes: Int[Tensor, "items"], number: int) -> Int[Tensor, "classes1"]:
    """Return where each of `number` classes begins in items ordered by class."""
    return _starts(torch.bincount(classes, minlength=number))
