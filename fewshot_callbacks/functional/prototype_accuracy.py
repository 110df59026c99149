"""Nearest-prototype accuracy: how often the most similar class mean is that of the query's own class.

The prototypes are those of Snell, Swersky and Zemel, "Prototypical networks for few-shot learning", NeurIPS 2017, over
all items of a class; the classifier is the nearest class mean of Mensink, Verbeek, Perronnin and Csurka,
"Distance-based image classification: generalizing to new classes at near-zero cost", TPAMI 2013.

A result must not depend on the order of the data, on tiles or on threads, and near-ties must be decided all the same.
All components are therefore rounded once to a common grid, 2**-40 of the largest (2**-40 itself for unit vectors), and
are integers from there on. A class is the exact sum of its members, and leaving a query out of it is a subtraction. A
float64 product of each query with each prototype decides where its proved error leaves no doubt. Where it does, the
similarities are computed from slices of the integers whose products float64 sums exactly (see `similarity`), and one
rounding at the end makes float64 numbers of them: these are compared. They are functions of the query and the rational
mean alone, so that equal means are equally similar, whatever the number of their members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional._checks import rows_at_once
from fewshot_callbacks.functional._precision import full_precision
from fewshot_callbacks.functional.candidates import row_numbers, starts_of
from fewshot_callbacks.functional.processes import ALONE, Processes
from fewshot_callbacks.functional.similarity import Similarity, check_similarity

FRACTION_BITS = 40

MANY_OPEN = 1 / 64
"""Share of a tile's pairs from which exact products of the whole tile are cheaper than the pairs one by one."""


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
        grid = _Grid.of(queries, gallery, similarity, int(counts.sum()), processes)
        search = _Search(
            grid, queries, distinct, query_class[distinct], gallery, item_class, counts, processes, same_set=same_set
        )
        value = torch.empty(len(distinct), dtype=torch.float64, device=queries.device)
        value[number[torch.searchsorted(rows, distinct)]] = search.run(memory_bytes)
        result[rows] = value[number]
    return result


@dataclass(frozen=True)
class _Grid:
    """Vectors as integers: multiples of unit * 2**-bits."""

    similarity: Similarity
    unit: float
    """a power of two that no component exceeds; 1 for cosine"""
    bits: int
    dim: int

    @classmethod
    def of(
        cls,
        queries: Tensor,
        gallery: Tensor,
        similarity: Similarity,
        items: int | None = None,
        processes: Processes = ALONE,
    ) -> _Grid:
        # sums of all items, moved by their mean, stay below 2**61
        items = len(gallery) if items is None else items
        bits = min(FRACTION_BITS, 60 - items.bit_length())
        unit = 1.0
        if similarity != "cosine":
            parts = [part for side in (queries, gallery) for part in side.split(rows_at_once(side)) if len(part)]
            largest = processes.largest([max((float(part.abs().max()) for part in parts), default=0.0)])[0]
            unit = math.ldexp(1.0, min(math.frexp(largest)[1], 1023)) if largest else 1.0
        return cls(similarity, unit, bits, queries.shape[1])

    def integers(self, rows: Float[Tensor, "items dim"]) -> Int[Tensor, "items dim"]:
        """Each row rounded to the grid, by operations whose result depends on that row alone."""
        rows = rows.double()
        if self.similarity == "cosine":
            largest = rows.abs().amax(dim=1, keepdim=True)
            # by a power of two, so that no square overflows or vanishes; 0 / 0 for a row of zeros
            rows = (rows / (largest / (2 * torch.frexp(largest)[0]))).masked_fill(largest == 0, 0.0)
            length = rows.square().cumsum(dim=1)[:, -1:].sqrt()  # one after the other: the same sum in each layout
            rows = rows / length.masked_fill(length == 0, 1.0)
        return (rows / self.unit * 2.0**self.bits).round().long()

    @property
    def slice_bits(self) -> int:
        """Products of two numbers of so many bits, summed over the components and up to four pairs of slices, are exact."""
        return (53 - 2 - math.ceil(math.log2(max(self.dim, 2)))) // 2

    def slices(self, integers: Int[Tensor, "*items dim"], bits: int) -> list[Float[Tensor, "*items dim"]]:
        """Integers of so many bits and a sign in float64: sum over i of slice_i 2**(i slice_bits)."""
        parts = []
        for _ in range(bits // self.slice_bits):
            parts.append((integers & (2**self.slice_bits - 1)).double())
            integers = integers >> self.slice_bits
        return [*parts, integers.double()]


@dataclass(frozen=True)
class _Prototypes:
    """Some classes: the sums of their members and how many these are; the prototype is sum / count."""

    sums: Int[Tensor, "classes dim"]
    count: Int[Tensor, "classes"]
    slices: list[Float[Tensor, "classes dim"]]
    square: list[Int[Tensor, "classes"]]
    """digits of |sum|^2"""

    @classmethod
    def of(cls, grid: _Grid, sums: Tensor, count: Tensor) -> _Prototypes:
        slices = grid.slices(sums, 62)
        return cls(sums, count, slices, _product(slices, slices, lambda a, b: (a * b).sum(dim=-1), grid.slice_bits))

    def select(self, index: Tensor) -> _Prototypes:
        return _Prototypes(
            self.sums[index], self.count[index], [s[index] for s in self.slices], [d[index] for d in self.square]
        )


class _Search:
    """Counts, for each query, the prototypes that are more similar than its own, and those that are as similar."""

    def __init__(
        self,
        grid: _Grid,
        queries: Tensor,
        rows: Int[Tensor, "rows"],
        row_class: Int[Tensor, "rows"],
        gallery: Tensor,
        item_class: Int[Tensor, "gallery"],
        counts: Int[Tensor, "classes"],
        processes: Processes,
        *,
        same_set: bool,
    ) -> None:
        self.processes = processes
        self.grid, self.queries, self.rows, self.row_class = grid, queries, rows, row_class
        self.gallery, self.counts, self.same_set = gallery, counts, same_set
        self.item_class, self.item_order = item_class.sort(stable=True)
        self.starts = starts_of(item_class, len(counts))
        self.centre = torch.zeros(grid.dim, dtype=torch.int64, device=queries.device)

    def run(self, memory_bytes: int) -> Float[Tensor, "rows"]:
        # int64 sums, their slices, float64 prototypes and what makes them: 12 numbers of each component
        dim, classes = self.grid.dim, len(self.counts)
        per_vector = 8 * dim * 12
        class_tile = max(16, min(classes, memory_bytes // 4 // per_vector))
        self.rows_at_once = max(16, min(4096, memory_bytes // 4 // per_vector))
        # a tile of pairs holds up to 20 numbers for each where it is computed exactly
        tile_rows = max(16, min(self.rows_at_once, memory_bytes // 2 // (160 * class_tile)))
        class_tile = max(16, min(class_tile, memory_bytes // 2 // (160 * tile_rows)))
        if self.grid.similarity == "euclidean":  # distances do not change when everything moves; the error does
            total = sum((sums.sum(dim=0) for _, sums in self._class_sums(class_tile)), torch.zeros_like(self.centre))
            self.centre = total.div(int(self.counts.sum()), rounding_mode="floor")
        own = torch.empty(len(self.rows), dtype=torch.float64, device=self.rows.device)
        better = torch.zeros_like(self.rows)
        equal = torch.zeros_like(self.rows)
        tiles: list[tuple[int, _Prototypes]] = []
        for start, sums in self._class_sums(class_tile):
            tiles = [(start, _Prototypes.of(self.grid, sums, self.counts[start : start + len(sums)]))]
            self._score_own(own, start, tiles[0][1])
        if class_tile < classes:  # they do not all fit: form them once more, now that each query knows its own
            tiles = []
        for start, prototypes in tiles or self._prototypes(class_tile):
            estimator = _Estimator(self.grid, prototypes)
            for place in range(0, len(self.rows), tile_rows):
                part = slice(place, place + tile_rows)
                integers = self._integers(self.rows[part])
                own_column = self.row_class[part] - start
                more, same = _compare(
                    self.grid, integers, own[part], own_column, prototypes, estimator, self.rows_at_once
                )
                better[part] += more
                equal[part] += same
        return (better == 0).double() / (1 + equal)

    def _integers(self, rows: Tensor) -> Int[Tensor, "rows dim"]:
        return self.grid.integers(self.queries[rows]) - self.centre

    def _class_sums(self, class_tile: int) -> Iterator[tuple[int, Int[Tensor, "classes dim"]]]:
        """The first class of each tile and the sums of its classes, over all processes."""
        bounds = self.starts.tolist()
        for start in range(0, len(self.counts), class_tile):
            stop = min(start + class_tile, len(self.counts))
            sums = torch.zeros(stop - start, self.grid.dim, dtype=torch.int64, device=self.gallery.device)
            for first in range(bounds[start], bounds[stop], self.rows_at_once):
                some = slice(first, min(first + self.rows_at_once, bounds[stop]))
                integers = self.grid.integers(self.gallery[self.item_order[some]]) - self.centre
                sums.index_add_(0, self.item_class[some] - start, integers)
            if self.processes.count > 1:
                sums = torch.from_numpy(self.processes.summed(sums.cpu().numpy())).to(sums.device)
            yield start, sums

    def _prototypes(self, class_tile: int) -> Iterator[tuple[int, _Prototypes]]:
        for start, sums in self._class_sums(class_tile):
            yield start, _Prototypes.of(self.grid, sums, self.counts[start : start + len(sums)])

    def _score_own(self, own: Tensor, start: int, prototypes: _Prototypes) -> None:
        """The similarities of the queries of some classes to their own prototypes."""
        ends = self.row_class.new_tensor([start, start + len(prototypes.count)])
        low, high = torch.searchsorted(self.row_class, ends).tolist()
        for place in range(low, high, self.rows_at_once):
            part = slice(place, min(place + self.rows_at_once, high))
            integers, index = self._integers(self.rows[part]), self.row_class[part] - start
            if self.same_set:
                mine = _Prototypes.of(self.grid, prototypes.sums[index] - integers, prototypes.count[index] - 1)
            else:
                mine = prototypes.select(index)
            own[part] = _exact(self.grid, integers, mine, lambda a, b: (a * b).sum(dim=-1))


class _Estimator:
    """Similarities from one float64 product, and how far each can lie from the exact one.

    A product of length n in float64, u = 2**-53, is off by at most n u / (1 - n u) times |q| |p| (Higham, "Accuracy and
    Stability of Numerical Algorithms", section 3.1). The operands carry at most 6 u of rounding, the exact similarity 6 u.
    """

    def __init__(self, grid: _Grid, prototypes: _Prototypes) -> None:
        self._grid = grid
        sums = prototypes.sums.double() * 2.0**-grid.bits
        length = _to_double(prototypes.square, grid.slice_bits).sqrt() * 2.0**-grid.bits  # |sum|
        if grid.similarity == "cosine":
            self._right, self._largest = sums / length.masked_fill(length == 0, 1.0).unsqueeze(1), 1.0
            return
        length = length / prototypes.count
        self._right, self._largest = sums / prototypes.count.unsqueeze(1), float(length.max()) * (1 + 1e-9)
        if grid.similarity == "euclidean":  # 2 q.p - |p|^2 orders as minus the distance does
            self._right = torch.cat([2 * self._right, -length.square().unsqueeze(1)], dim=1)

    def __call__(
        self, integers: Int[Tensor, "rows dim"]
    ) -> tuple[Float[Tensor, "rows classes"], Float[Tensor, "rows"]]:
        left = integers.double() * 2.0**-self._grid.bits
        length = left.square().sum(dim=1).sqrt() * (1 + 1e-9)
        u, terms = 2.0**-53, self._grid.dim + 24
        size = length * self._largest
        if self._grid.similarity == "euclidean":
            left = torch.cat([left, left.new_ones(len(left), 1)], dim=1)
            size = 2 * size + self._largest**2
        return left @ self._right.T, 1.02 * terms * u / (1 - terms * u) * size


def _compare(
    grid: _Grid,
    integers: Int[Tensor, "rows dim"],
    own: Float[Tensor, "rows"],
    own_column: Int[Tensor, "rows"],
    prototypes: _Prototypes,
    estimator: _Estimator,
    pairs_at_once: int,
) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows"]]:
    """How many other prototypes are more similar than each query's own, and how many are as similar.

    Where some are clearly more similar, the query has lost: those that are close are not looked at any more.
    """
    estimates, error = estimator(integers)
    inside = ((own_column >= 0) & (own_column < len(prototypes.count))).nonzero().flatten()
    estimates[inside, own_column[inside]] = -torch.inf  # its own prototype is no other
    estimates -= own.unsqueeze(1)
    more = (estimates > error.unsqueeze(1)).sum(dim=1)
    equal = torch.zeros_like(more)
    unclear = (estimates.abs() <= error.unsqueeze(1)) & (more == 0).unsqueeze(1)
    row, column = unclear.nonzero(as_tuple=True)
    if not len(row):
        return more, equal
    rows, columns = row.unique(), column.unique()
    if len(row) > MANY_OPEN * len(rows) * len(columns):
        exact = _exact(grid, integers[rows], prototypes.select(columns), lambda a, b: a @ b.T)
        exact.masked_fill_(~unclear[rows][:, columns], -torch.inf)
        more[rows] += (exact > own[rows].unsqueeze(1)).sum(dim=1)
        equal[rows] += (exact == own[rows].unsqueeze(1)).sum(dim=1)
        return more, equal
    for i, j in zip(row.split(pairs_at_once), column.split(pairs_at_once), strict=True):
        exact = _exact(grid, integers[i], prototypes.select(j), lambda a, b: (a * b).sum(dim=-1))
        more.index_add_(0, i, (exact > own[i]).long())
        equal.index_add_(0, i, (exact == own[i]).long())
    return more, equal


# ---------------------------------------------------------------------------------------------------- exact similarities


def _exact(
    grid: _Grid,
    integers: Int[Tensor, "rows dim"],
    prototypes: _Prototypes,
    product: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The similarities of queries and prototypes, pair by pair or each with each, as `product` pairs them.

    In multiples of the grid: q.p (dot), q.p / |p| (cosine), or 2 q.p - |p|^2, which orders as minus the distance does.
    """
    base, count = grid.slice_bits, prototypes.count
    dot = _product(grid.slices(integers, grid.bits + 1), prototypes.slices, product, base)
    scale = 2.0 ** (-2 * grid.bits)
    if grid.similarity == "euclidean":
        # (2 n q.s - |s|^2) / n^2, where the prototype is s / n
        length = max(len(dot), len(prototypes.square))
        twice = [2 * count * digit for digit in dot] + [torch.zeros_like(dot[0])] * (length - len(dot))
        digits = [
            digit - prototypes.square[i] if i < len(prototypes.square) else digit for i, digit in enumerate(twice)
        ]
        return _divided(_carried(digits, base), count, 2, base) * scale
    value = _divided(dot, count, 1, base) * scale
    if grid.similarity == "dot":
        return value
    length_of = (_divided(prototypes.square, count, 2, base) * scale).sqrt()
    return value / length_of.masked_fill(length_of == 0, torch.inf)


def _product(
    left: list[Tensor], right: list[Tensor], product: Callable[[Tensor, Tensor], Tensor], base: int
) -> list[Tensor]:
    """Digits of the exact sum of products of two sliced numbers."""
    levels = []
    for order in range(len(left) + len(right) - 1):
        members = [(i, order - i) for i in range(len(left)) if 0 <= order - i < len(right)]
        level = product(left[members[0][0]], right[members[0][1]])
        for i, j in members[1:]:
            level = level + product(left[i], right[j])
        levels.append(level.long())
    return _carried(levels, base)


def _carried(levels: list[Tensor], base: int) -> list[Tensor]:
    """The same number, sum over i of digit_i 2**(i base), with each digit within 0 ... 2**base - 1 but the last."""
    digits, carry = [], torch.zeros_like(levels[0])
    for level in levels:
        total = level + carry
        digits.append(total & (2**base - 1))
        carry = total >> base
    return [*digits, carry]


def _divided(digits: list[Tensor], count: Tensor, times: int, base: int) -> Tensor:
    """The number over count**times (times is 1 or 2), rounded: equal quotients give equal results."""
    numerator, denominator = torch.zeros_like(count), torch.ones_like(count)
    for _ in range(times):
        quotient, rest = [], torch.zeros_like(digits[0])
        for digit in reversed(digits):  # rest < count: it and a digit fit into 53 bits
            value = (rest << base) + digit
            whole = value.div(count, rounding_mode="floor")
            quotient.append(whole)
            rest = value - whole * count
        digits = quotient[::-1]
        numerator = rest * denominator + numerator
        denominator = denominator * count
    return _to_double(digits, base) + numerator.double() / denominator.double()


def _to_double(digits: list[Tensor], base: int) -> Tensor:
    """From the highest digit on: no rounding up to 53 bits, then one, and what follows is below it."""
    value = digits[-1].double()
    for digit in reversed(digits[:-1]):
        value = value * 2.0**base + digit
    return value
