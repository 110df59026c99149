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
from copy import copy
from functools import reduce
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional.kernels import compiled_kernels
from fewshot_callbacks.functional.processes import ALONE, Processes

Similarity = Literal["cosine", "dot", "euclidean", "hamming"]
"""`cosine`: cosine of the angle, 0 for a zero vector. `dot`: inner product. `euclidean`: minus the Euclidean distance.
`hamming`: minus the number of bits in which two binary codes differ; see `codes`, which `ScoreTiles` does not know."""

HALF, SINGLE, DOUBLE, EXACT = 0, 1, 2, 3
"""The rungs of `ScoreTiles.tile`: half-precision product, float32 product, float64 product, the keys themselves."""

ROUNDED = 4
"""A float64 product of the operands of `SINGLE`: only they are rounded. For single pairs."""

PART = 128
"""Components that one float32 product sums up on the CPU. The error grows with their number, not with the dimension: the
products of several parts are added afterwards, which costs little and leaves fewer pairs open."""

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
        device: where tiles are computed; the vectors stay where they are and come over in slices. By default their own.
        processes: who else holds queries and gallery items. What bounds or scales the scores of all is made common.
    """

    def __init__(
        self,
        queries: Tensor,
        gallery: Tensor,
        similarity: Similarity,
        device: torch.device | None = None,
        processes: Processes = ALONE,
    ) -> None:
        check_similarity(similarity)
        if similarity == "hamming":
            raise ValueError("ScoreTiles: binary codes are packed, and compared by codes.CodePass.")
        self.queries, self.gallery, self.similarity = queries, gallery, similarity
        self.dim = queries.shape[1]
        self.device = queries.device if device is None else device
        # float16 has three bits more than bfloat16, and cosines stay far inside its range
        self.half = torch.float16 if self.device.type == "cuda" and similarity == "cosine" else torch.bfloat16
        self.part = PART if self.device.type == "cpu" else self.dim
        self.compiled = compiled_kernels() if self.device.type == queries.device.type == "cpu" else None
        slices = 3 if similarity == "euclidean" or torch.float64 in (queries.dtype, gallery.dtype) else 2
        spare = 3 if similarity == "euclidean" else 1  # |q|^2 + |g|^2 - 2 q.g has four terms
        self.slices = slices
        self.bits = (53 - spare - math.ceil(math.log2(max(self.dim, 2)))) // 2
        self._query_scale = self._row_scales(queries)
        self._gallery_scale = self._query_scale if gallery is queries else self._row_scales(gallery)
        # One power of two for all pairs keeps dot products and distances in range; it changes no comparison.
        scales = torch.cat([self._query_scale, self._gallery_scale])
        self._query_unit, self._gallery_unit, inverse, plain = processes.largest(
            [
                _most(self._query_scale),
                _most(self._gallery_scale),
                _most(1 / scales),
                float(self.compiled is None),
            ]
        )
        if similarity == "euclidean":
            self._query_unit = self._gallery_unit = max(self._query_unit, self._gallery_unit)
            inverse = 1 / self._query_unit if self._query_unit else 0.0
            self._query_scale = torch.full_like(self._query_scale, self._query_unit)
            self._gallery_scale = torch.full_like(self._gallery_scale, self._gallery_unit)
        if plain or not (max(self._query_unit, self._gallery_unit) < 2.0**400 and inverse < 2.0**400):
            self.compiled = None  # it multiplies in any order, and so with what float64 does not hold
        self._centre = torch.zeros(self.dim, dtype=torch.float64, device=self.device)
        if similarity == "euclidean":  # distances do not change when everything moves; the product's error does
            sums = processes.gather((len(gallery), gallery.sum(dim=0, dtype=torch.float64).cpu()))
            items = sum(count for count, _ in sums)
            self._centre = (_sum(part for _, part in sums) / max(1, items)).to(self.device)
        self._measure_queries()
        self._measure_gallery()
        self._largest = dict(
            zip(_LARGEST, processes.largest([_most(getattr(self, name)) for name in _LARGEST]), strict=True)
        )

    def against(self, gallery: Tensor) -> ScoreTiles:
        """The same queries against other items of the gallery, in the units and with the bounds of all.

        Args:
            gallery: (items, dim) of the dtype and device of those that were given.
        """
        other = copy(self)
        other.gallery = gallery
        other._gallery_scale = self._row_scales(gallery)
        if self.similarity == "euclidean":
            other._gallery_scale = torch.full_like(other._gallery_scale, self._gallery_unit)
        other._measure_gallery(shared=False)
        return other

    def among(self, queries: Tensor, gallery: Tensor) -> ScoreTiles:
        """Other vectors that were counted in when these scores were made, in the same units and with the same bounds.

        Args:
            queries: (queries, dim) of the dtype and device of those that were given.
            gallery: (items, dim); the very queries for one set.
        """
        other = copy(self)
        other.queries = queries
        other._query_scale = self._row_scales(queries)
        if self.similarity == "euclidean":
            other._query_scale = torch.full_like(other._query_scale, self._query_unit)
        other._measure_queries()
        if gallery is not queries:
            return other.against(gallery)
        other.gallery, other._gallery_scale = queries, other._query_scale
        other._measure_gallery()
        return other

    def _measure_queries(self) -> None:
        """Squared lengths in units of each vector's own scale, and lengths in the unit of the keys."""
        self._query_square, loss = self._squares(self.queries, self._query_scale)
        self._query_norm = self._query_square.sqrt()
        # a row is at least half as long as its scale, if it is not zero
        self._query_loss = loss / self._query_norm.clamp(min=0.25)
        if self.similarity != "cosine":
            self._query_norm = self._query_norm * (self._query_scale / self._query_unit)
        self._query_reach = self._centred_norms(self.queries)

    def _measure_gallery(self, *, shared: bool = True) -> None:
        """The same of the gallery, which is the queries' where it is the same set."""
        if shared and self.gallery is self.queries:
            self._gallery_square, self._gallery_norm = self._query_square, self._query_norm
            self._gallery_loss, self._gallery_reach = self._query_loss, self._query_reach
            return
        self._gallery_square, loss = self._squares(self.gallery, self._gallery_scale)
        self._gallery_norm = self._gallery_square.sqrt()
        self._gallery_loss = loss / self._gallery_norm.clamp(min=0.25)
        if self.similarity != "cosine":
            self._gallery_norm = self._gallery_norm * (self._gallery_scale / self._gallery_unit)
        self._gallery_reach = self._centred_norms(self.gallery)

    def _centred_norms(self, vectors: Tensor) -> Float[Tensor, "items"]:
        """Distances to the centre in the unit of the keys, and a little more; none but for `"euclidean"`."""
        if self.similarity != "euclidean":
            return torch.empty(0, dtype=torch.float64)
        unit, lengths = self._query_unit, []
        for index in torch.arange(len(vectors), device=self.device).split(ROWS_AT_ONCE):
            rows = self._rows(vectors, index).double()
            lengths.append(((rows - self._centre) / unit).square().sum(dim=1).sqrt() * (1 + 1e-9))
        return torch.cat(lengths)

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
        of_query, of_item = self._largest["_query_norm"], self._largest["_gallery_norm"]
        if self.similarity == "dot":
            bound = of_query * of_item
            return -bound * (1 + 1e-9), bound * (1 + 1e-9)
        return -((of_query + of_item) ** 2) * (1 + 1e-9), 0.0

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

    def pairs(self) -> Any:
        """Queries and gallery as the compiled kernels take them."""
        assert self.compiled is not None
        sides = []
        for vectors, scale, norm, unit, square in (
            (self.queries, self._query_scale, self._query_norm, self._query_unit, self._query_square),
            (self.gallery, self._gallery_scale, self._gallery_norm, self._gallery_unit, self._gallery_square),
        ):
            factor = torch.where(norm == 0, 0.0, 1 / norm) if self.similarity == "cosine" else scale / unit
            sides.append(self.compiled.Vectors(vectors.numpy(), (1 / scale).numpy(), factor.numpy(), square.numpy()))
        return self.compiled.Pairs(*sides, get_args(Similarity).index(self.similarity), self.slices, self.bits)

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
        left, right = self.operand(rows, rung, of_query=True), self.operand(columns, rung, of_query=False)
        if rung == HALF:
            estimates = self.half_product(left, right)
        elif rung == SINGLE:
            estimates = left[:, : self.part] @ right[:, : self.part].T  # (rows, columns)
            for start in range(self.part, left.shape[1], self.part):
                estimates += left[:, start : start + self.part] @ right[:, start : start + self.part].T
        else:
            estimates = left @ right.T  # (rows, columns)
        return estimates, self.error(rows, rung)

    def operand(self, index: Int[Tensor, "items"], rung: int, *, of_query: bool) -> Float[Tensor, "items components"]:
        """One side of a product of this rung, ready to be multiplied.

        At `HALF` the two last columns are to be left out of the product for `"euclidean"`: see `half_product`.
        """
        vectors = self.queries if of_query else self.gallery
        norm = self._query_norm if of_query else self._gallery_norm
        scale = self._query_scale if of_query else self._gallery_scale
        unit = self._query_unit if of_query else self._gallery_unit
        dtype = torch.float64 if rung == DOUBLE else torch.float32
        if self.compiled is not None and self.similarity != "euclidean" and dtype == torch.float32:
            factor = torch.where(norm == 0, 0.0, 1 / norm) if self.similarity == "cosine" else scale / unit
            out = torch.empty(len(index), self.dim)
            self.compiled.operand(vectors.numpy(), index.numpy(), scale.numpy(), factor.numpy(), out.numpy())
            return out
        rows = self._rows(vectors, index)
        if self.similarity == "cosine":
            factor = torch.where(norm == 0, 0.0, 1 / norm)[index].to(dtype).unsqueeze(1)
            rows = self._scaled(rows, scale[index]).to(dtype) * factor
        elif self.similarity == "dot":
            rows = self._scaled(rows, unit).to(dtype)
        else:
            rows = rows.double() / unit - self._centre / unit
            square = -rows.square().sum(1, keepdim=True)
            # -|q - g|^2 = 2 q.g - |q|^2 - |g|^2, all in one product of two more columns
            ones = torch.ones_like(square)
            more = (2 * rows, square, ones) if of_query else (rows, ones, square)
            rows = torch.cat(more, dim=1).to(dtype)
        return rows

    def _scaled(self, rows: Tensor, scale: Tensor | float) -> Tensor:
        """Rows divided by powers of two, which is exact as long as nothing falls below the smallest number."""
        if rows.dtype == torch.float32:
            # a scale beyond float32 would turn what it divides into zero or infinity
            wide = isinstance(scale, float) and not 2.0**-100 < scale < 2.0**100
            if isinstance(scale, Tensor):
                wide = bool(((scale < 2.0**-100) | (scale > 2.0**100)).any())
            if wide:
                rows = rows.double()
        if isinstance(scale, Tensor):
            return rows / scale.to(rows.dtype).unsqueeze(1)
        return rows / scale

    def _rows(self, vectors: Tensor, index: Tensor) -> Tensor:
        """Some vectors, on the device where they are multiplied."""
        if vectors.device == self.device:
            return vectors[index]
        chosen = index.to(vectors.device)
        if self.device.type != "cuda":
            return vectors[chosen].to(self.device)
        buffer = torch.empty((len(chosen), vectors.shape[1]), dtype=vectors.dtype, pin_memory=True)
        return torch.index_select(vectors, 0, chosen, out=buffer).to(self.device, non_blocking=True)

    def half_product(self, left: Tensor, right: Tensor) -> Float[Tensor, "rows columns"]:
        """Float32 estimates of the keys from a product in half precision of two operands of `HALF`."""
        left_half, right_half = left[:, : self.dim].to(self.half), right[:, : self.dim].to(self.half)
        return self.from_half(left_half @ right_half.T, left, right)

    def from_half(self, product: Tensor, left: Tensor, right: Tensor) -> Float[Tensor, "rows columns"]:
        """Float32 estimates from the half-precision product of the first `dim` columns of two operands."""
        estimates: Tensor = product.float()
        if self.similarity == "euclidean":
            estimates += left[:, self.dim, None]
            estimates += right[:, self.dim + 1]
        return estimates

    def error(self, index: Tensor, rung: int, *, of_query: bool = True) -> Float[Tensor, "items"]:
        """Largest distance between an estimate and its key, for each item, whatever it is compared with.

        A product of length n in a precision with unit roundoff u is off by at most n u / (1 - n u) times
        sum |q_i g_i| <= |q| |g|, in any order of summation, with or without fused multiply-add (Higham, "Accuracy and
        Stability of Numerical Algorithms", section 3.1); rounding the two operands adds a few u. Where products of several
        parts are added, n is the length of a part plus their number. Operands in half precision move a product by at
        most |q - q'| |g| + |q'| |g - g'|, and its own rounding to half precision comes on top. So do the slices that a
        key leaves out, and what lies below the smallest normal number.
        """
        side, other = ("_query", "_gallery") if of_query else ("_gallery", "_query")
        loss, norm = getattr(self, side + "_loss")[index], getattr(self, side + "_norm")[index]
        reach = getattr(self, side + "_reach")[index] if self.similarity == "euclidean" else norm
        return self._error(loss, norm, reach, rung, other)

    def _error(self, loss: Tensor, norm: Tensor, reach: Tensor, rung: int, other: str) -> Tensor:
        """`error` of items that lose so much in their slices, have this length, and lie so far from the centre.

        Args:
            loss: of each item.
            norm: of each item.
            reach: of each item.
            rung: see `tile`.
            other: the other side, `_query` or `_gallery`.
        """
        if rung == HALF:
            return self._half_error(loss, norm, reach, other)
        unit_roundoff = 2.0**-53 if rung == DOUBLE else 2.0**-24
        columns = self.dim + 2 if self.similarity == "euclidean" else self.dim
        terms = columns + 12
        if rung == SINGLE:
            terms = min(self.part, columns) + math.ceil(columns / self.part) + 12
        if rung == ROUNDED:  # to float32 up to three times on either side: the row, its factor, and their product
            terms, unit_roundoff = 8 + math.ceil(columns * 2.0**-29), 2.0**-24
        relative = 1.02 * (terms * unit_roundoff / (1 - terms * unit_roundoff) + 8 * 2.0**-53)
        smallest = self.dim * (2.0**-960 if rung == DOUBLE else 2.0**-120)
        # the slices leave out little of most rows, and nothing of many
        lost = 1.001 * (loss + self._largest[other + "_loss"])
        if self.similarity == "cosine":
            return relative + lost + smallest
        if self.similarity == "dot":
            return (relative + lost) * norm * self._largest[other + "_norm"] + smallest
        # a scaled component is at most 1, and so is off by half a unit of the last slice
        truncated = 4 * math.sqrt(self.dim) * 2.0 ** (-self.bits * self.slices)
        reach = (reach + self._largest[other + "_reach"]) ** 2
        return 2 * relative * reach + 4 * truncated * (self.dim + reach) + smallest

    def _half_rounding(self) -> tuple[float, float]:
        """Unit roundoff of half precision, and how far a vector of length one moves when it is rounded to it."""
        unit_roundoff = 2.0**-8 if self.half == torch.bfloat16 else 2.0**-11
        return unit_roundoff, unit_roundoff + math.sqrt(self.dim) * 2.0**-25

    def _half_error(self, loss: Tensor, norm: Tensor, reach: Tensor, other: str) -> Tensor:
        unit_roundoff, moved = self._half_rounding()
        single = self._error(loss, norm, reach, SINGLE, other)
        product = torch.ones_like(single)
        if self.similarity == "dot":
            product = norm * self._largest[other + "_norm"]
        elif self.similarity == "euclidean":
            product = 2 * reach * self._largest[other + "_reach"]
        relative = 2 * moved + moved * moved + (self.dim + 12) * 2.0**-22
        # the rounding of the result to half precision comes last; 2**-40 is for what it loses of a number near zero
        return single + 1.01 * product * (relative + unit_roundoff * (1 + relative)) + 2.0**-40

    def half_low(
        self, keys: Float[Tensor, "items"], index: Int[Tensor, "items"], *, of_query: bool
    ) -> Float[Tensor, "items"]:
        """For each item an estimate of `HALF` that no key from `keys` on falls short of.

        The result of a product is rounded relative to its size, so near a small key less is lost than `error` says.
        """
        if self.similarity != "cosine":
            return keys - self.error(index, HALF, of_query=of_query)
        unit_roundoff, moved = self._half_rounding()
        operands = 1.01 * (2 * moved + moved * moved + (self.dim + 12) * 2.0**-22)
        error = operands + self.error(index, SINGLE, of_query=of_query)
        low = keys - error - 1.01 * unit_roundoff * (keys.abs() + error) - 2.0**-40
        return torch.where(keys.isinf(), keys, low)  # where nothing is asked, inf - inf would be NaN

    def largest_error(self, rung: int) -> float:
        """No estimate of this rung, or of a more exact one, lies further from its key than this, in any process."""
        loss, norm, reach = (torch.tensor(self._largest["_query" + name], dtype=torch.float64) for name in _MEASURES)
        return float(self._error(loss, norm, reach, rung, "_gallery"))

    # ------------------------------------------------------------------------------------------------------------- keys

    def keys(self, rows: Int[Tensor, "rows"], columns: Int[Tensor, "columns"]) -> Float[Tensor, "rows columns"]:
        """The keys of rows x columns: exact products of slices."""
        return self._from_slices(
            self._slices(self.queries, rows),
            self._slices(self.gallery, columns),
            rows.unsqueeze(1),
            columns.unsqueeze(0),
            lambda left, right: left @ right.T,
        )

    def batched_keys(
        self, rows: Int[Tensor, "blocks rows"], columns: Int[Tensor, "blocks columns"]
    ) -> Float[Tensor, "blocks rows columns"]:
        """The keys of several blocks of the same shape at once."""
        return self._from_slices(
            [part.unflatten(0, rows.shape) for part in self._slices(self.queries, rows.flatten())],
            [part.unflatten(0, columns.shape) for part in self._slices(self.gallery, columns.flatten())],
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
            left, right = self._slices(self.queries, left_index), self._slices(self.gallery, right_index)
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

    def _slices(self, vectors: Tensor, index: Tensor) -> list[Tensor]:
        return self._split(vectors, index)[0]

    def _split(self, vectors: Tensor, index: Tensor) -> tuple[list[Tensor], Tensor]:
        """Integers in float64, |.| <= 2**bits: vector = scale * sum over k of slice_k 2**(-bits (k + 1)); and the rest."""
        scale = self._query_scale if vectors is self.queries else self._gallery_scale
        rest = self._rows(vectors, index).double() / scale[index].unsqueeze(1)  # (items, dim), within [-1, 1]
        slices = []
        for _ in range(self.slices):
            rest = rest * 2.0**self.bits
            whole = rest.round()
            slices.append(whole)
            rest = rest - whole
        return slices, rest

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
            lengths = _square_root(self._query_square[rows] * self._gallery_square[columns])
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
        for order in reversed(range(2 * self.slices - 1)):
            members = [(k, order - k) for k in range(self.slices) if 0 <= order - k < self.slices]
            level = _sum(product(left[i], right[j]) for i, j in members)  # exact: integers below 2**53
            if self.similarity == "euclidean":
                own_left = _sum((left[i] * left[j]).sum(dim=-1) for i, j in members)
                own_right = _sum((right[i] * right[j]).sum(dim=-1) for i, j in members)
                if level.ndim > own_left.ndim:  # a tile or blocks, not single pairs
                    own_left, own_right = own_left.unsqueeze(-1), own_right.unsqueeze(-2)
                level = 2 * level - own_left - own_right
            levels.append(level * 2.0 ** (-self.bits * (order + 2)))
        return _sum(levels)

    def _row_scales(self, vectors: Tensor) -> Float[Tensor, "items"]:
        """For each row the smallest power of two that no component exceeds; 1 for a row of zeros."""
        if self.compiled is not None:
            scales = np.empty(len(vectors))
            self.compiled.row_scales(vectors.numpy(), scales)
            return torch.from_numpy(scales)
        largest = torch.cat([part.abs().amax(dim=1).double() for part in vectors.split(ROWS_AT_ONCE)]).to(self.device)
        mantissa, _ = torch.frexp(largest)
        # exact, and not by torch.ldexp, whose power of two is a float32
        return torch.where(largest == 0, 1.0, largest / mantissa)

    def _squares(self, vectors: Tensor, scale: Tensor) -> tuple[Float[Tensor, "items"], Float[Tensor, "items"]]:
        """Squared lengths, summed exactly as the product of a vector with itself is; lengths of what slices leave out."""
        if self.compiled is not None:
            out, dropped = np.empty(len(vectors)), np.empty(len(vectors))
            self.compiled.squares(vectors.numpy(), 1 / scale.numpy(), self.slices, self.bits, out, dropped)
            return torch.from_numpy(out), torch.from_numpy(dropped)
        squares, losses = [], []
        for index in torch.arange(len(vectors), device=self.device).split(ROWS_AT_ONCE):
            slices, rest = self._split(vectors, index)
            losses.append(rest.square().sum(dim=1).sqrt() * 2.0 ** (-self.bits * self.slices))
            orders = reversed(range(2 * self.slices - 1))
            levels = (
                _sum(
                    (slices[k] * slices[order - k]).sum(dim=1)
                    for k in range(self.slices)
                    if 0 <= order - k < self.slices
                )
                * 2.0 ** (-self.bits * (order + 2))
                for order in orders
            )
            squares.append(_sum(levels))
        return torch.cat(squares), torch.cat(losses)


_MEASURES = ("_loss", "_norm", "_reach")
_LARGEST = tuple(side + name for side in ("_query", "_gallery") for name in _MEASURES)


def _most(values: Tensor) -> float:
    """The largest; 0 of nothing."""
    return float(values.max()) if values.numel() else 0.0


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum, from the first to the last."""
    return reduce(torch.add, tensors)


def _square_root(values: Tensor) -> Tensor:
    """Correctly rounded, as IEEE 754 wants it; torch may call a library for the CPU that is off by a bit."""
    if values.device.type != "cpu":
        return values.sqrt()
    return torch.from_numpy(np.sqrt(np.asarray(values.numpy())))
