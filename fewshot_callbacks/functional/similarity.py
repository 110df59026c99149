"""Scores of pairs: one exact value for each, and fast products that come close to it with a proved bound.

Larger is always closer. The *key* of a pair is its canonical score: a float64 that depends on the two vectors alone,
the same on every machine, for every tile, thread count and order of summation. Ranks, ties and thresholds are defined
on keys. A matrix product gives only an estimate of them, whose rounding depends on all of that; `ScoreTiles.tile`
therefore hands out each estimate together with the distance that it can be off.

How a key can be the same everywhere although it is a sum: each vector is scaled by a power of two and split into
slices of a few bits, so that every product of two slices, and every partial sum of such products, is an integer that
float64 holds exactly. A sum without rounding has no order. (This is the error-free transformation of Ozaki, Ogita,
Oishi and Rump, "Error-free transformations of matrix multiplication by using fast routines of matrix multiplication
and its applications", Numerical Algorithms 59, 2012.) What the slices drop lies 2**-40 and more below the largest
component of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property, reduce
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

Similarity = Literal["cosine", "dot", "euclidean"]
"""`cosine`: cosine of the angle, 0 for a zero vector. `dot`: inner product. `euclidean`: minus the Euclidean distance."""

SINGLE, DOUBLE, EXACT = 0, 1, 2
"""The rungs of `ScoreTiles.tile`: float32 product, float64 product, the keys themselves."""

PAIRS_AT_ONCE = 2048
ROWS_AT_ONCE = 16384


def check_similarity(similarity: str) -> None:
    """Refuse an unknown similarity, and name the known ones."""
    if similarity not in get_args(Similarity):
        raise ValueError(f"similarity={similarity!r} is unknown. Choose one of {', '.join(get_args(Similarity))}.")


class ScoreTiles:
    """The scores of a set of queries against a set of gallery items, in tiles, without ever holding all of them.

    Args:
        queries: (queries, dim) floating-point rows, finite, on one device.
        gallery: (gallery, dim) rows of the same dtype and device.
        similarity: see `Similarity`.
    """

    def __init__(self, queries: Tensor, gallery: Tensor, similarity: Similarity) -> None:
        check_similarity(similarity)
        self.queries, self.gallery, self.similarity = queries, gallery, similarity
        self.dim = queries.shape[1]
        self.device = queries.device
        slices = 3 if similarity == "euclidean" or torch.float64 in (queries.dtype, gallery.dtype) else 2
        spare = 3 if similarity == "euclidean" else 1  # |q|^2 + |g|^2 - 2 q.g has four terms
        self._slices = slices
        self._bits = (53 - spare - math.ceil(math.log2(max(self.dim, 2)))) // 2
        self._query_scale = _row_scales(queries)
        self._gallery_scale = self._query_scale if gallery is queries else _row_scales(gallery)
        # One power of two for all pairs keeps dot products and distances in range; it changes no comparison.
        self._query_unit = float(self._query_scale.max())
        self._gallery_unit = float(self._gallery_scale.max())
        if similarity == "euclidean":
            self._query_unit = self._gallery_unit = max(self._query_unit, self._gallery_unit)
            self._query_scale = torch.full_like(self._query_scale, self._query_unit)
            self._gallery_scale = torch.full_like(self._gallery_scale, self._gallery_unit)
        self._centre = torch.zeros(self.dim, dtype=torch.float64, device=self.device)
        if similarity == "euclidean":  # distances do not change when everything moves; the product's error does
            self._centre = gallery.mean(dim=0, dtype=torch.float64)
        # squared lengths in units of each vector's own scale, and lengths in the unit of the keys
        self._query_square = self._squares(queries)
        self._gallery_square = self._query_square if gallery is queries else self._squares(gallery)
        self._query_norm = self._query_square.sqrt()
        self._gallery_norm = self._gallery_square.sqrt()
        if similarity != "cosine":
            self._query_norm = self._query_norm * (self._query_scale / self._query_unit)
            self._gallery_norm = self._gallery_norm * (self._gallery_scale / self._gallery_unit)
        self._largest_norm = float(self._gallery_norm.max())

    # ------------------------------------------------------------------------------------------------- range and units

    @property
    def zero_vectors(self) -> tuple[int, int]:
        """How many queries and gallery items have length zero (cosine only; elsewhere a zero vector is nothing odd)."""
        if self.similarity != "cosine":
            return 0, 0
        return int((self._query_norm == 0).sum()), int((self._gallery_norm == 0).sum())

    @property
    def key_range(self) -> tuple[float, float]:
        """An interval that holds every key."""
        if self.similarity == "cosine":
            return -1.0, 1.0
        largest = float(self._query_norm.max())
        if self.similarity == "dot":
            bound = largest * self._largest_norm
            return -bound * (1 + 1e-9), bound * (1 + 1e-9)
        return -((largest + self._largest_norm) ** 2) * (1 + 1e-9), 0.0

    def to_score(self, key: float) -> float:
        """The score that a user reads: the key in the units of the data."""
        if self.similarity == "cosine" or math.isnan(key):
            return key
        if self.similarity == "dot":
            return key * self._query_unit * self._gallery_unit
        return -math.sqrt(max(-key, 0.0)) * self._query_unit

    def to_key(self, score: float) -> float:
        """The key of a score that a user wrote."""
        if self.similarity == "cosine":
            return score
        if self.similarity == "dot":
            return score / self._query_unit / self._gallery_unit
        return -((min(score, 0.0) / self._query_unit) ** 2) if score <= 0 else math.inf

    # ------------------------------------------------------------------------------------------------------------ tiles

    def tile(
        self, rows: Int[Tensor, "rows"], columns: Int[Tensor, "columns"], rung: int
    ) -> tuple[Float[Tensor, "rows columns"], Float[Tensor, "rows"]]:
        """Estimates of the keys of rows x columns, and how far each row's estimates can lie from its keys.

        Args:
            rows: indices of queries.
            columns: indices of gallery items.
            rung: `SINGLE` (float32), `DOUBLE` (float64), or `EXACT`: the keys themselves, error 0.
        """
        if rung == EXACT:
            return self.keys(rows, columns), torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        dtype = torch.float32 if rung == SINGLE else torch.float64
        left = self._operand(self.queries, rows, self._query_norm, self._query_unit).to(dtype)
        right = self._operand(self.gallery, columns, self._gallery_norm, self._gallery_unit).to(dtype)
        if self.similarity != "euclidean":
            estimates = left @ right.T  # (rows, columns)
        else:
            # -|q - g|^2 = 2 q.g - |q|^2 - |g|^2, all in one product of two more columns
            ones = left.new_ones(1)
            left = torch.cat(
                [2 * left, -left.double().square().sum(1, keepdim=True).to(dtype), ones.expand(len(left), 1)], 1
            )
            right = torch.cat(
                [right, ones.expand(len(right), 1), -right.double().square().sum(1, keepdim=True).to(dtype)], 1
            )
            estimates = left @ right.T  # (rows, columns)
        return estimates, self._error(rows, rung)

    def _operand(self, vectors: Tensor, index: Tensor, norm: Tensor, unit: float) -> Float[Tensor, "items dim"]:
        """The rows of a product in float64, so that one rounding to the product's dtype is all that they suffer."""
        rows = vectors[index].double() / unit if self.similarity != "cosine" else vectors[index].double()
        if self.similarity == "cosine":
            length = (norm * self._scale_of(vectors))[index].unsqueeze(1)
            return rows / length.masked_fill(length == 0, 1.0)
        return rows - self._centre / unit

    def _scale_of(self, vectors: Tensor) -> Tensor:
        return self._query_scale if vectors is self.queries else self._gallery_scale

    def _error(self, rows: Tensor, rung: int) -> Float[Tensor, "rows"]:
        """Largest distance between an estimate and its key, for each row.

        A product of length n in a precision with unit roundoff u is off by at most n u / (1 - n u) times
        sum |q_i g_i| <= |q| |g|, in any order of summation, with or without fused multiply-add (Higham, "Accuracy and
        Stability of Numerical Algorithms", section 3.1); rounding the two operands adds 2 u. The slices that a key
        leaves out, and what lies below the smallest normal number, come on top.
        """
        unit_roundoff = 2.0**-24 if rung == SINGLE else 2.0**-53
        terms = self.dim + 8
        relative = 1.02 * (terms * unit_roundoff / (1 - terms * unit_roundoff) + 8 * 2.0**-53)
        # a scaled component is at most 1, and so is off by half a unit of the last slice; a scale is at most twice
        # the largest component, and a row at least as long as that
        truncated = 4 * math.sqrt(self.dim) * 2.0 ** (-self._bits * self._slices)
        smallest = self.dim * (2.0**-120 if rung == SINGLE else 2.0**-960)
        if self.similarity == "cosine":
            return torch.full((len(rows),), relative + truncated + smallest, dtype=torch.float64, device=self.device)
        lengths = self._query_norm[rows]
        if self.similarity == "dot":
            return (relative + truncated) * lengths * self._largest_norm + smallest
        reach = (self._centred_norm(self.queries, rows) + self._largest_centred_norm) ** 2
        return 2 * relative * reach + 4 * truncated * (self.dim + reach) + smallest

    def largest_error(self, rung: int) -> float:
        """No estimate of this rung, or of a more exact one, lies further from its key than this."""
        parts = torch.arange(len(self.queries), device=self.device).split(ROWS_AT_ONCE)
        return max(float(self._error(part, rung).max()) for part in parts)

    def _centred_norm(self, vectors: Tensor, index: Tensor) -> Tensor:
        unit = self._query_unit
        return ((vectors[index].double() - self._centre) / unit).square().sum(dim=1).sqrt() * (1 + 1e-9)

    @cached_property
    def _largest_centred_norm(self) -> float:
        parts = torch.arange(len(self.gallery), device=self.device).split(ROWS_AT_ONCE)
        return max(float(self._centred_norm(self.gallery, part).max()) for part in parts)

    # ------------------------------------------------------------------------------------------------------------- keys

    def keys(self, rows: Int[Tensor, "rows"], columns: Int[Tensor, "columns"]) -> Float[Tensor, "rows columns"]:
        """The keys of rows x columns: exact products of slices."""
        return self._from_slices(
            self._split(self.queries, rows),
            self._split(self.gallery, columns),
            rows.unsqueeze(1),
            columns.unsqueeze(0),
            lambda left, right: left @ right.T,
        )

    def batched_keys(
        self, rows: Int[Tensor, "blocks rows"], columns: Int[Tensor, "blocks columns"]
    ) -> Float[Tensor, "blocks rows columns"]:
        """The keys of several blocks of the same shape at once."""
        return self._from_slices(
            [part.unflatten(0, rows.shape) for part in self._split(self.queries, rows.flatten())],
            [part.unflatten(0, columns.shape) for part in self._split(self.gallery, columns.flatten())],
            rows.unsqueeze(-1),
            columns.unsqueeze(-2),
            lambda left, right: left @ right.mT,
        )

    def pair_keys(self, rows: Int[Tensor, "pairs"], columns: Int[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
        """The keys of single pairs (rows[i], columns[i])."""
        parts = []
        for some_rows, some_columns in zip(
            rows.split(16 * PAIRS_AT_ONCE), columns.split(16 * PAIRS_AT_ONCE), strict=True
        ):
            # each vector is split once, however many pairs it is in
            left_index, left_place = some_rows.unique(return_inverse=True)
            right_index, right_place = some_columns.unique(return_inverse=True)
            left, right = self._split(self.queries, left_index), self._split(self.gallery, right_index)
            parts += [
                self._from_slices(
                    [part[i] for part in left],
                    [part[j] for part in right],
                    left_index[i],
                    right_index[j],
                    lambda a, b: (a * b).sum(dim=-1),
                )
                for i, j in zip(left_place.split(PAIRS_AT_ONCE), right_place.split(PAIRS_AT_ONCE), strict=True)
            ]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device=self.device)

    def _split(self, vectors: Tensor, index: Tensor) -> list[Tensor]:
        """Integers in float64, |.| <= 2**bits: vector = scale * sum over k of slice_k 2**(-bits (k + 1))."""
        rest = vectors[index].double() / self._scale_of(vectors)[index].unsqueeze(1)  # (items, dim), within [-1, 1]
        slices = []
        for _ in range(self._slices):
            rest = rest * 2.0**self._bits
            whole = rest.round()
            slices.append(whole)
            rest = rest - whole
        return slices

    def _from_slices(
        self,
        left: list[Tensor],
        right: list[Tensor],
        rows: Tensor,
        columns: Tensor,
        product: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Combine exact products of slices into keys, the same way for tiles, blocks and pairs."""
        total = self._weighted_levels(left, right, product)
        if self.similarity == "cosine":
            # sqrt(x * x) is exactly x: equal vectors have cosine 1, not 1 minus a rounding
            lengths = (self._query_square[rows] * self._gallery_square[columns]).sqrt()
            return (total / lengths.masked_fill(lengths == 0, torch.inf)).clamp(-1.0, 1.0)
        if self.similarity == "dot":
            relative = (self._query_scale[rows] / self._query_unit) * (
                self._gallery_scale[columns] / self._gallery_unit
            )
            return total * relative
        return total.clamp(max=0.0)

    def _weighted_levels(
        self, left: list[Tensor], right: list[Tensor], product: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Sum the levels (products of slices i and j with the same i + j), smallest first, always in this order."""
        levels = []
        for order in reversed(range(2 * self._slices - 1)):
            members = [(k, order - k) for k in range(self._slices) if 0 <= order - k < self._slices]
            level = _sum(product(left[i], right[j]) for i, j in members)  # exact: integers below 2**53
            if self.similarity == "euclidean":
                own_left = _sum((left[i] * left[j]).sum(dim=-1) for i, j in members)
                own_right = _sum((right[i] * right[j]).sum(dim=-1) for i, j in members)
                if level.ndim > own_left.ndim:  # a tile or blocks, not single pairs
                    own_left, own_right = own_left.unsqueeze(-1), own_right.unsqueeze(-2)
                level = 2 * level - own_left - own_right
            levels.append(level * 2.0 ** (-self._bits * (order + 2)))
        return _sum(levels)

    def _squares(self, vectors: Tensor) -> Float[Tensor, "items"]:
        """Squared lengths, summed exactly as the product of a vector with itself is."""
        squares = []
        for index in torch.arange(len(vectors), device=self.device).split(ROWS_AT_ONCE):
            slices = self._split(vectors, index)
            orders = reversed(range(2 * self._slices - 1))
            levels = (
                _sum(
                    (slices[k] * slices[order - k]).sum(dim=1)
                    for k in range(self._slices)
                    if 0 <= order - k < self._slices
                )
                * 2.0 ** (-self._bits * (order + 2))
                for order in orders
            )
            squares.append(_sum(levels))
        return torch.cat(squares)


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum, from the first to the last."""
    return reduce(torch.add, tensors)


def _row_scales(vectors: Tensor) -> Float[Tensor, "items"]:
    """For each row the smallest power of two that no component exceeds; 1 for a row of zeros."""
    largest = torch.cat([part.double().abs().amax(dim=1) for part in vectors.split(16384)])
    _, exponent = torch.frexp(largest)
    return torch.ldexp(torch.ones_like(largest), exponent).masked_fill(largest == 0, 1.0)


def rounded(values: Float[Tensor, "*shape"], dtype: torch.dtype, *, up: bool) -> Float[Tensor, "*shape"]:
    """Float64 values in a narrower dtype, never on the wrong side: at least (`up`) or at most the value."""
    if values.dtype == dtype:
        return values
    narrow = values.to(dtype)
    limit = torch.full_like(narrow, torch.inf if up else -torch.inf)
    wrong = (narrow.double() < values) if up else (narrow.double() > values)
    return torch.where(wrong, torch.nextafter(narrow, limit), narrow)
