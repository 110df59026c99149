"""Scores of pairs: one exact value for each, and fast products that come close to it with a proved bound.

Larger is always closer. The *exact score* of a pair is its true cosine, dot product or minus its distance, computed from the
two rows as real numbers and rounded once to float64: it depends on nothing else, no tile, thread, machine or order of
summation (`kernels.exact` and `exact_scores` say how). Ranks, ties and thresholds are defined by it. Its *key* is what
scores are compared by: the same number in a unit that keeps all of them in range, and for distances minus its square.

A matrix product gives only an estimate of a key, whose rounding depends on the tile; `ScoreTiles.tile` therefore hands
out each estimate together with the distance that it can be off.

Every finite float32 (and narrower) row is served. For float64 rows the true value must lie in the range of float64: a score
below 2**-960 times the largest (2**-480 for distances), or components of one row that span more than 2**480, may be lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from functools import reduce
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.budget import rows_at_once
from fewshot_callbacks.engine.options import compiled_kernels
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.scores import exact as exact_scores

Similarity = Literal["cosine", "dot", "euclidean", "hamming"]
"""`cosine`: cosine of the angle, 0 for a zero vector. `dot`: inner product. `euclidean`: minus the Euclidean distance.
`hamming`: minus the number of bits in which two binary codes differ; see `codes`, which `ScoreTiles` does not know."""


PART = 128
"""Components that one float32 product sums up on the CPU. The error grows with their number, not with the dimension: the
products of several parts are added afterwards, which costs little and leaves fewer pairs open."""

PAIRS_AT_ONCE = {"cpu": 2**14, "cuda": 2**20}
"""Pairs whose exact scores PyTorch makes together: their sums stay in a processor's cache, or fill a GPU."""
COMPONENTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""And components of their rows, in float64."""
TINIEST = 2.0**-1022


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
            raise ValueError("ScoreTiles: binary codes are packed, and compared by codes.HammingPass.")
        self.queries, self.gallery, self.similarity = queries, gallery, similarity
        self.dim = queries.shape[1]
        self.device = queries.device if device is None else device
        # float16 has three bits more than bfloat16, and cosines stay far inside its range
        self.half = torch.float16 if self.device.type == "cuda" and similarity == "cosine" else torch.bfloat16
        self.part = PART if self.device.type == "cpu" else self.dim
        self.compiled = compiled_kernels() if self.device.type == queries.device.type == "cpu" else None
        self.single = torch.float64 not in (queries.dtype, gallery.dtype)
        self._query_scale = self._row_scales(queries)
        self._gallery_scale = self._query_scale if gallery is queries else self._row_scales(gallery)
        # One power of two for all pairs keeps dot products and distances in range; it changes no comparison.
        scales = torch.cat([self._query_scale, self._gallery_scale])
        if similarity == "euclidean":
            scales = scales[scales != TINIEST]
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

    def with_gallery(self, gallery: Tensor) -> ScoreTiles:
        """The same queries against other items of the gallery, in the units and with the bounds of all.

        Args:
            gallery: (items, dim) of the dtype and device of those that were given.
        """
        other = copy(self)
        other.gallery = gallery
        other._gallery_scale = self._row_scales(gallery)
        other._measure_gallery(shared=False)
        return other

    def with_vectors(self, queries: Tensor, gallery: Tensor) -> ScoreTiles:
        """Other vectors that were counted in when these scores were made, in the same units and with the same bounds.

        Args:
            queries: (queries, dim) of the dtype and device of those that were given.
            gallery: (items, dim); the very queries for one set.
        """
        other = copy(self)
        other.queries = queries
        other._query_scale = self._row_scales(queries)
        other._measure_queries()
        if gallery is not queries:
            return other.with_gallery(gallery)
        other.gallery, other._gallery_scale = queries, other._query_scale
        other._measure_gallery()
        return other

    def _measure_queries(self) -> None:
        """Squared norms of the scaled rows, and norms in the unit of the keys."""
        self._query_square, self._query_square_low = self._squares(self.queries, self._query_scale)
        self._query_norm = self._query_square.sqrt()
        if self.similarity != "cosine":
            self._query_norm = self._query_norm * (self._query_scale / self._query_unit)
        self._query_reach = self._centred_norms(self.queries)

    def _measure_gallery(self, *, shared: bool = True) -> None:
        """The same of the gallery, which is the queries' where it is the same set."""
        if shared and self.gallery is self.queries:
            self._gallery_square, self._gallery_square_low = self._query_square, self._query_square_low
            self._gallery_norm, self._gallery_reach = self._query_norm, self._query_reach
            return
        self._gallery_square, self._gallery_square_low = self._squares(self.gallery, self._gallery_scale)
        self._gallery_norm = self._gallery_square.sqrt()
        if self.similarity != "cosine":
            self._gallery_norm = self._gallery_norm * (self._gallery_scale / self._gallery_unit)
        self._gallery_reach = self._centred_norms(self.gallery)

    def _centred_norms(self, vectors: Tensor) -> Float[Tensor, "items"]:
        """Distances to the centre in the unit of the keys, and a little more; none but for `"euclidean"`."""
        if self.similarity != "euclidean":
            return torch.empty(0, dtype=torch.float64)
        unit, lengths = self._query_unit, []
        for index in torch.arange(len(vectors), device=self.device).split(rows_at_once(vectors)):
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
    def longest_item(self) -> tuple[int, float]:
        """Which gallery item is the longest, and how many times as long as the median.

        (-1, 1.0) for cosines, and where the median is zero.
        """
        norm = self._gallery_norm
        if self.similarity == "cosine" or not len(norm) or not norm.median():
            return -1, 1.0
        place = int(norm.argmax())
        return place, float(norm[place] / norm.median())

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
        distance = score / self._query_unit
        return -(distance * distance) if score <= 0 else math.inf  # `** 2` raises where the product is infinite

    def scores_of(self, keys: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`to_score` of many."""
        if self.similarity == "cosine":
            return keys
        if self.similarity == "dot":
            return keys * self._query_unit * self._gallery_unit
        return -(-keys).sqrt() * self._query_unit

    def keys_of(self, scores: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`to_key` of many, none of them a positive distance."""
        if self.similarity == "cosine":
            return scores
        if self.similarity == "dot":
            return scores / self._query_unit / self._gallery_unit
        return 0.0 - (scores / self._query_unit).square()

    def pairs(self) -> Any:
        """Queries and gallery as the compiled kernels take them."""
        assert self.compiled is not None
        sides = []
        for vectors, scale, norm, unit, square, square_low in (
            (self.queries, self._query_scale, self._query_norm, self._query_unit, self._query_square,
             self._query_square_low),
            (self.gallery, self._gallery_scale, self._gallery_norm, self._gallery_unit, self._gallery_square,
             self._gallery_square_low),
        ):  # fmt: skip
            factor = torch.where(norm == 0, 0.0, 1 / norm) if self.similarity == "cosine" else scale / unit
            arrays = (vectors, 1 / scale, factor, square, square_low)
            sides.append(self.compiled.Vectors(*(array.numpy() for array in arrays)))
        kind = get_args(Similarity).index(self.similarity)
        inverse_unit = 1 / self._query_unit if self._query_unit else 0.0
        return self.compiled.Pairs(*sides, kind, self.single, inverse_unit, self._relative_error(Precision.FLOAT64))

    # ------------------------------------------------------------------------------------------------------------ tiles

    def tile(
        self, rows: Int[Tensor, "rows"], columns: Int[Tensor, "columns"], precision: Precision
    ) -> tuple[Float[Tensor, "rows columns"], Float[Tensor, "rows"]]:
        """Estimates of the keys of rows x columns, and how far each row's estimates can lie from its keys.

        Args:
            rows: indices of queries.
            columns: indices of gallery items.
            precision: the precision of the product, or `Precision.EXACT`: the keys themselves, error 0.
        """
        if precision == Precision.EXACT:
            return self.keys(rows, columns), torch.zeros(len(rows), dtype=torch.float64, device=self.device)
        left, right = self.operand(rows, precision, of_query=True), self.operand(columns, precision, of_query=False)
        if precision == Precision.HALF:
            estimates = self.half_product(left, right)
        elif precision == Precision.FLOAT32:
            estimates = left[:, : self.part] @ right[:, : self.part].T  # (rows, columns)
            for start in range(self.part, left.shape[1], self.part):
                estimates += left[:, start : start + self.part] @ right[:, start : start + self.part].T
        else:
            estimates = left @ right.T  # (rows, columns)
        return estimates, self.error(rows, precision)

    def operand(
        self, index: Int[Tensor, "items"], precision: Precision, *, of_query: bool
    ) -> Float[Tensor, "items components"]:
        """One side of a product of this precision, ready to be multiplied.

        At `Precision.HALF` the two last columns are to be left out of the product for `"euclidean"`: see `half_product`.
        """
        vectors = self.queries if of_query else self.gallery
        norm = self._query_norm if of_query else self._gallery_norm
        scale = self._query_scale if of_query else self._gallery_scale
        unit = self._query_unit if of_query else self._gallery_unit
        dtype = torch.float64 if precision == Precision.FLOAT64 else torch.float32
        if self.compiled is not None and self.similarity != "euclidean" and dtype == torch.float32:
            factor = torch.where(norm == 0, 0.0, 1 / norm) if self.similarity == "cosine" else scale / unit
            out = torch.empty(len(index), self.dim)
            self.compiled.operand(vectors.numpy(), index.numpy(), scale.numpy(), factor.numpy(), out.numpy())
            return out
        rows = self._rows(vectors, index)
        if self.similarity == "cosine":
            factor = torch.where(norm == 0, 0.0, 1 / norm)[index].to(dtype).unsqueeze(1)
            rows = self._scaled(rows, scale[index]).to(dtype).mul_(factor)
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
        """Float32 estimates of the keys from a product in half precision of two operands of `Precision.HALF`."""
        left_half, right_half = left[:, : self.dim].to(self.half), right[:, : self.dim].to(self.half)
        return self.from_half(left_half @ right_half.T, left, right)

    def from_half(self, product: Tensor, left: Tensor, right: Tensor) -> Float[Tensor, "rows columns"]:
        """Float32 estimates from the half-precision product of the first `dim` columns of two operands."""
        estimates: Tensor = product.float()
        if self.similarity == "euclidean":
            estimates += left[:, self.dim, None]
            estimates += right[:, self.dim + 1]
        return estimates

    def error(self, index: Tensor, precision: Precision, *, of_query: bool = True) -> Float[Tensor, "items"]:
        """Largest distance between an estimate and its key, for each item, whatever it is compared with.

        A product of length n in a precision with unit roundoff u is off by at most n u / (1 - n u) times
        sum |q_i g_i| <= |q| |g|, in any order of summation, with or without fused multiply-add (Higham, "Accuracy and
        Stability of Numerical Algorithms", section 3.1); rounding the two operands adds a few u. Where products of several
        parts are added, n is the length of a part plus their number. Operands in half precision move a product by at
        most |q - q'| |g| + |q'| |g - g'|, and its own rounding to half precision comes on top. So do the rounding of the
        key, and what lies below the smallest normal number.
        """
        side, other = ("_query", "_gallery") if of_query else ("_gallery", "_query")
        norm = getattr(self, side + "_norm")[index]
        reach = getattr(self, side + "_reach")[index] if self.similarity == "euclidean" else norm
        return self._error(norm, reach, precision, other)

    def _relative_error(self, precision: Precision) -> float:
        """Error of a product of this precision, as a share of the product of the norms."""
        unit_roundoff = 2.0**-53 if precision == Precision.FLOAT64 else 2.0**-24
        columns = self.dim + 2 if self.similarity == "euclidean" else self.dim
        terms = columns + 12
        if precision == Precision.FLOAT32:
            terms = min(self.part, columns) + math.ceil(columns / self.part) + 12
        if (
            precision == Precision.FLOAT64_OF_FLOAT32
        ):  # to float32 up to three times on either side: the row, its factor, and their product
            terms, unit_roundoff = 8 + math.ceil(columns * 2.0**-29), 2.0**-24
        return 1.02 * (terms * unit_roundoff / (1 - terms * unit_roundoff) + 8 * 2.0**-53)

    def _error(self, norm: Tensor, reach: Tensor, precision: Precision, other: str) -> Tensor:
        """`error` of items from their norms.

        Args:
            norm: of each item.
            reach: distance of each item to the centre.
            precision: see `tile`.
            other: the other side, `_query` or `_gallery`.
        """
        if precision == Precision.HALF:
            return self._half_error(norm, reach, other)
        relative = self._relative_error(precision)
        smallest = self.dim * (2.0**-960 if precision == Precision.FLOAT64 else 2.0**-120)
        if self.similarity == "cosine":
            return torch.full_like(norm, relative + smallest)
        if self.similarity == "dot":
            return relative * norm * self._largest[other + "_norm"] + smallest
        return 2 * relative * (reach + self._largest[other + "_reach"]) ** 2 + smallest

    def _half_rounding(self) -> tuple[float, float]:
        """Unit roundoff of half precision, and how far a vector of length one moves when it is rounded to it."""
        unit_roundoff = 2.0**-8 if self.half == torch.bfloat16 else 2.0**-11
        return unit_roundoff, unit_roundoff + math.sqrt(self.dim) * 2.0**-25

    def _half_error(self, norm: Tensor, reach: Tensor, other: str) -> Tensor:
        unit_roundoff, moved = self._half_rounding()
        single = self._error(norm, reach, Precision.FLOAT32, other)
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
        """For each item an estimate of `Precision.HALF` that no key from `keys` on falls short of.

        The result of a product is rounded relative to its size, so near a small key less is lost than `error` says.
        """
        if self.similarity != "cosine":
            return keys - self.error(index, Precision.HALF, of_query=of_query)
        unit_roundoff, moved = self._half_rounding()
        operands = 1.01 * (2 * moved + moved * moved + (self.dim + 12) * 2.0**-22)
        error = operands + self.error(index, Precision.FLOAT32, of_query=of_query)
        low = keys - error - 1.01 * unit_roundoff * (keys.abs() + error) - 2.0**-40
        return torch.where(keys.isinf(), keys, low)  # where nothing is asked, inf - inf would be NaN

    def largest_error(self, precision: Precision) -> float:
        """No estimate of this precision, or of a more exact one, lies further from its key than this, in any process."""
        norm, reach = (torch.tensor(self._largest["_query" + name], dtype=torch.float64) for name in _MEASURES)
        return float(self._error(norm, reach, precision, "_gallery"))

    # ------------------------------------------------------------------------------------------------------------- keys

    def keys(self, rows: Int[Tensor, "rows"], columns: Int[Tensor, "columns"]) -> Float[Tensor, "rows columns"]:
        """The keys of rows x columns."""
        return self.batched_keys(rows[None], columns[None])[0]

    def batched_keys(
        self, rows: Int[Tensor, "blocks rows"], columns: Int[Tensor, "blocks columns"]
    ) -> Float[Tensor, "blocks rows columns"]:
        """The keys of several blocks of the same shape at once."""
        if self.compiled is not None:
            out = np.empty((*rows.shape, columns.shape[1]))
            self.compiled.block_keys(self.pairs(), rows.numpy(), columns.numpy(), out)
            return torch.from_numpy(out)
        return self._keys(rows.unsqueeze(2), columns.unsqueeze(1))

    def pair_keys(self, rows: Int[Tensor, "pairs"], columns: Int[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
        """The keys of single pairs (rows[i], columns[i])."""
        if self.compiled is not None:
            out = np.empty(len(rows))
            self.compiled.keys(self.pairs(), rows.numpy(), columns.numpy(), out)
            return torch.from_numpy(out)
        return self._keys(rows, columns)

    def _keys(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The keys of indices that are broadcast, in plain PyTorch."""
        kind = self.device.type if self.device.type in PAIRS_AT_ONCE else "cpu"
        items = max(1, COMPONENTS_AT_ONCE[kind] // self.dim)
        return exact_scores.in_pieces(self._some_keys, rows, columns, PAIRS_AT_ONCE[kind], items)

    def _some_keys(self, rows: Tensor, columns: Tensor) -> Tensor:
        distances = self.similarity == "euclidean"
        left, right = self._doubled(self.queries, rows), self._doubled(self.gallery, columns)
        scale, other_scale = self._query_scale[rows], self._gallery_scale[columns]
        if distances:
            own = torch.maximum(scale, other_scale)
            keys = exact_scores.distance_key(*exact_scores.squared_distance(left, right, own), self.dim)
            unit = own / self._query_unit if self._query_unit else own
            unit = unit * unit
        else:
            left, right = left / scale.unsqueeze(-1), right / other_scale.unsqueeze(-1)
            products = exact_scores.dot(left, right, single=self.single)
            unit = (scale / self._query_unit) * (other_scale / self._gallery_unit)
            if self.similarity == "dot":
                keys = exact_scores.nearest(*products)
            else:
                square = self._query_square[rows], self._query_square_low[rows]
                other = self._gallery_square[columns], self._gallery_square_low[columns]
                keys, unit = exact_scores.cosine(products, square, other, self.dim), torch.ones_like(unit)
        for place in keys.isnan().nonzero().tolist():  # about one pair in 2**40, or sums that cancel
            pair = tuple(place)
            one, two = (side.expand(*keys.shape, self.dim)[pair] for side in (left, right))
            if distances:
                one, two = one / own[pair], two / own[pair]
            keys[pair] = exact_scores.by_fractions(one.tolist(), two.tolist(), self.similarity)
        return keys * unit

    def _doubled(self, vectors: Tensor, index: Tensor) -> Tensor:
        """Rows in float64, with the shape of their indices."""
        rows: Tensor = self._rows(vectors, index.flatten()).double().unflatten(0, index.shape)
        return rows

    def _row_scales(self, vectors: Tensor) -> Float[Tensor, "items"]:
        """For each row the largest power of two not above its largest component."""
        # a row of zeros must not scale the row whose distance to it is taken; elsewhere any number does
        of_zeros = TINIEST if self.similarity == "euclidean" else 1.0
        if self.compiled is not None:
            scales = np.empty(len(vectors))
            self.compiled.row_scales(vectors.numpy(), of_zeros, scales)
            return torch.from_numpy(scales)
        largest = torch.cat([part.abs().amax(dim=1).double() for part in vectors.split(rows_at_once(vectors))])
        largest = largest.to(self.device)
        mantissa, _ = torch.frexp(largest)
        # exact, and not by torch.ldexp, whose power of two is a float32
        return torch.where(largest == 0, of_zeros, largest / (2 * mantissa))

    def _squares(self, vectors: Tensor, scale: Tensor) -> tuple[Float[Tensor, "items"], Float[Tensor, "items"]]:
        """Squared norms of the scaled rows, and what rounding these to float64 left out."""
        if self.compiled is not None:
            out = torch.empty(2, len(vectors), dtype=torch.float64)
            self.compiled.squares(vectors.numpy(), 1 / scale.numpy(), self.single, *out.numpy())
            return out[0], out[1]
        parts = []
        for index in torch.arange(len(vectors), device=self.device).split(rows_at_once(vectors)):
            rows = self._doubled(vectors, index) / scale[index].unsqueeze(1)
            parts.append(exact_scores.dot(rows, rows, single=self.single)[:2])
        if not parts:
            return torch.zeros_like(scale), torch.zeros_like(scale)
        high, low = (torch.cat(part) for part in zip(*parts, strict=True))
        return high, low


_MEASURES = ("_norm", "_reach")
_LARGEST = tuple(side + name for side in ("_query", "_gallery") for name in _MEASURES)


def _most(values: Tensor) -> float:
    """The largest; 0 of nothing."""
    return float(values.max()) if values.numel() else 0.0


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    """Their sum, from the first to the last."""
    return reduce(torch.add, tensors)
