"""Two sets of vectors prepared for one similarity: exact scores, operands of products, and the proved error of these.

A score in this package is the exact similarity times a power of two, `unit`, so that products stay in the range of
float32; of a distance it is minus the square of the rounded distance, and of codes the number of bits less twice the
distance. All scores lie in [-1, 1]. Nothing else here knows which similarity it serves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine import device, exact
from fewshot_callbacks.engine.compiled import kernel
from fewshot_callbacks.engine.layout import Layout, plan_layout
from fewshot_callbacks.engine.options import Precision, split, work_off
from fewshot_callbacks.stored import LEAST_ROWS, READ_SHARE, Stored, ahead, spans

Floats = NDArray[np.float64]
# `cosine`: cosine of the angle, 0 for a zero vector. `dot`: inner product. `euclidean`: minus the Euclidean distance.
# `hamming`: minus the number of bits in which two codes of -1 and +1 differ.
Similarity = Literal["cosine", "dot", "euclidean", "hamming"]

_KINDS = {"cosine": exact.COSINE, "dot": exact.DOT, "euclidean": exact.EUCLIDEAN, "hamming": exact.DOT}
ROUNDOFF: dict[str, float] = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
DTYPES = {"bytes": torch.int8, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
# Binary exponents up to which float64 holds products of four numbers, and what rounding leaves of them, with room to
# spare.
_SAFE = 100


def check_similarity(similarity: str) -> None:
    """Refuse an unknown similarity, and name the known ones."""
    if similarity not in get_args(Similarity):
        raise ValueError(f"similarity={similarity!r} is unknown. Choose one of {', '.join(get_args(Similarity))}.")


class Operand(NamedTuple):
    """One side of a product; an estimate is product * scale * scale + offset + offset, where there are scales."""

    rows: Tensor  # (items, columns)
    scale: NDArray[np.float32] | None = None  # (items,) of bytes
    offset: NDArray[np.float32] | None = None  # (items,)

    def part(self, some: Any) -> Operand:
        """Return some of its rows."""
        rows = self.rows[some] if isinstance(some, slice) else self.rows.index_select(0, torch.from_numpy(some))
        if self.scale is None or self.offset is None:
            return Operand(rows)
        return Operand(rows, self.scale[some], self.offset[some])


# What steers collective calls has to be the same in all processes.
STEERING = ("kept", "coded", "stored", "knots", "collected")


class Vectors:
    """Queries and gallery; with one set both are the same.

    Args:
        queries: (queries, dim) finite, contiguous float32 or float64; codes of -1 and +1 as int8.
        gallery: (items, dim); None for one set; `Stored` where most rows stay where they are, and visit.
        similarity: How they are compared.
        threads: To prepare with.
        processes: Each has rows of its own; scales, centre and error are those of all.
    """

    def __init__(
        self,
        queries: Tensor,
        gallery: Tensor | Stored | None,
        similarity: Similarity,
        *,
        threads: int = 1,
        processes: Processes = ALONE,
    ) -> None:
        self.similarity, self.kind, self.threads, self.processes = similarity, _KINDS[similarity], threads, processes
        self.one_set = gallery is None
        self._stored = gallery if isinstance(gallery, Stored) else None
        self._pieces = 2**60 if self._stored is None else self._stored.piece
        first = gallery.read(slice(0, gallery.resident)) if isinstance(gallery, Stored) else gallery
        sides = [queries] if first is None else [queries, first]
        codes = similarity == "hamming"
        doubles = torch.float64 in (*(side.dtype for side in sides), None if gallery is None else gallery.dtype)
        double = bool(processes.largest([doubles])[0])
        self._dtype = torch.int8 if codes else torch.float64 if double else torch.float32
        rows = [side.detach().to(self._dtype).contiguous().numpy() for side in sides]
        self._shift: int | None = 0  # binary exponent by which rows are divided; None: each by its own
        if double:
            self._shift = self._far(rows)
            rows = [self._in_range(side) for side in rows]
        self._factor = math.ldexp(1.0, -self._shift) if self._shift else 1.0
        norms = [self._norms_of(side, single=not double) for side in rows]
        self.norms = [norm[:, 0] for norm in norms]
        tops = [float(norm.max(initial=0.0)) for norm in self.norms]
        for values in self._rest() if self.kind != exact.COSINE else ():
            tops[-1] = max(tops[-1], float(self._norms_of(values, single=not double)[:, 0].max()))
        tops = processes.largest(tops)
        largest = [2.0 ** math.ceil(math.log2(top)) if top else 1.0 for top in tops]
        if self.kind == exact.EUCLIDEAN:
            largest = [2.0 * max(largest)] * len(largest)  # twice: rows are moved to their centre
        scales = [1.0 if self.kind == exact.COSINE else 1.0 / number for number in (largest[0], largest[-1])]
        self._scales, self.unit, self.dim = scales, scales[0] * scales[1], rows[0].shape[1]
        twins = [_twins(side) for side in rows]
        self.pairs = exact.Pairs(
            rows[0], rows[-1], norms[0], norms[-1], twins[0], twins[-1], self.kind, not double, codes, self.unit
        )
        self._centre = np.zeros(self.dim)
        self._longest = tops[-1] * scales[1] * (1 + 1e-9) if self.kind == exact.DOT else 1.0
        if self.kind == exact.EUCLIDEAN:
            # distances do not change when all vectors move; near their centre they round less
            own = [values.sum(0, dtype=np.float64) for values in (rows[-1], *self._rest())]
            sums, counts = zip(*processes.gather((sum(own), self.items)), strict=True)
            self._centre = sum(sums) / max(1, sum(counts))
            lengths = [self._lengths(-1), *(self.with_gallery(values, 0)._lengths(-1) for values in self._rest())]
            self._longest = processes.largest([max(float(of_some.max(initial=0.0)) for of_some in lengths)])[0]
        self._remainders: list[float] = []
        self._codes: dict[int, tuple[Operand, Floats]] = {}

    def _far(self, rows: list[NDArray[Any]]) -> int | None:
        """Return the binary exponent to divide rows of float64 by, where squares leave its range; None: each by its own."""
        tops = np.concatenate([np.abs(side).max(1, initial=0.0) for side in (*rows, *self._rest())])
        if self.kind == exact.COSINE:
            far = float(np.abs(np.frexp(tops)[1]).max(initial=0))
            return 0 if self.processes.largest([far])[0] <= _SAFE else None
        top = self.processes.largest([float(tops.max(initial=0.0))])[0]
        exponent = max(-1000, int(np.frexp(top)[1]))  # float64 does not hold 2**1024
        return 0 if top == 0.0 or abs(exponent) <= _SAFE else exponent

    def _in_range(self, rows: NDArray[Any]) -> NDArray[Any]:
        if self._shift == 0:
            return rows
        own = np.frexp(np.abs(rows).max(1, initial=0.0))[1][:, None] if self._shift is None else self._shift
        divided: NDArray[Any] = np.ldexp(rows, -own)
        return divided

    # ----------------------------------------------------------------------------------------- rows that are read

    @property
    def items(self) -> int:
        """Gallery items of this process, those that are read among them."""
        return len(self.pairs.gallery) if self._stored is None else len(self._stored)

    @property
    def are_read(self) -> bool:
        """Whether some of the items are in a file."""
        return self._stored is not None

    @property
    def pieces(self) -> int:
        """In how many pieces the gallery of this process has to be read, or travels."""
        return -(-self.items // self._pieces)

    def read(self, wanted: Iterable[slice]) -> Iterator[tuple[slice, NDArray[Any]]]:
        """Yield gallery items of this process, some at a time."""
        if self._stored is None:
            return ((some, self.pairs.gallery[some]) for some in wanted)
        return ahead(wanted, self._read)

    def _read(self, some: slice) -> NDArray[Any]:
        assert self._stored is not None
        return self._in_range(self._stored.read(some, self._dtype).numpy())

    def _rest(self) -> Iterator[NDArray[Any]]:
        """Yield the gallery items that are not in memory."""
        if self._stored is not None:
            every = spans(self._stored.resident, len(self._stored), self._stored.piece)
            yield from (values for _, values in ahead(every, self._read))

    def _norms_of(self, values: NDArray[Any], *, single: bool) -> Floats:
        out = np.zeros((len(values), 2))

        def fill(some: slice, work: Floats) -> None:
            exact.exact_norms(values[some], single, out[some], work)

        work_off(split(len(values)), fill, self.threads, exact.workspace)
        return out

    # --------------------------------------------------------------------------------------------------- other vectors

    def with_gallery(self, values: NDArray[Any], first: int) -> Vectors:
        """Return the same queries with other items, whose equal rows are numbered from `first` on."""
        other, norm = copy(self), self._norms_of(values, single=self.pairs.single)
        other._codes, other._stored = {}, None
        other.norms, other.one_set = [self.norms[0], norm[:, 0]], False
        other.pairs = self.pairs._replace(gallery=values, gallery_norm=norm, gallery_twin=first + _twins(values))
        return other

    def take(self, queries: NDArray[Any], items: Any) -> Vectors:
        """Return some of the queries and some of the items."""
        if self._stored is not None:
            values = self._in_range(self._stored.pick(items).to(self._dtype).numpy())
            return self.with_gallery(values, 0).take(queries, slice(None))
        other, pairs = copy(self), self.pairs
        other.norms = [self.norms[0][queries], self.norms[-1][items]]
        other.one_set = self.one_set and np.array_equal(queries, items)
        other._codes = {}
        for side, some in enumerate((queries, items)[: other.sides]):  # one set may become two
            if side % self.sides in self._codes:
                made, left = self._codes[side % self.sides]
                other._codes[side] = made.part(some), left[some]
        own = {name: getattr(pairs, name)[queries] for name in ("queries", "query_norm", "query_twin")}
        turned = pairs.turned()
        others = own if other.one_set else {name: getattr(turned, name)[items] for name in own}
        renamed = zip(("gallery", "gallery_norm", "gallery_twin"), others.values(), strict=True)
        other.pairs = pairs._replace(**own, **dict(renamed))
        return other

    # ------------------------------------------------------------------------------------------------------- estimates

    @property
    def sides(self) -> int:
        """Number of operands that differ."""
        return 1 if self.one_set and self.kind != exact.EUCLIDEAN else 2

    @property
    def columns(self) -> int:
        """Components of an operand."""
        return int(self.dim) + (2 if self.kind == exact.EUCLIDEAN else 0)

    def layout(self, memory: float, relevant: int, *, on_device: bool = False) -> Layout:
        """Return the sizes that keep to a budget in bytes with so many relevant pairs."""
        sizes, threads = (len(self.pairs.queries), len(self.pairs.gallery), self.columns), self.threads
        self._pieces = min(self._pieces, max(LEAST_ROWS, int(READ_SHARE * min(memory, 2.0**60) / (8 * self.dim))))
        memory, read = memory * (1 if self._stored is None else self._stored.share), self.items - sizes[1]
        own = plan_layout(memory, *sizes, relevant, read=read, sides=self.sides, threads=threads, on_device=on_device)
        everyone = [one._asdict() for one in self.processes.gather(own)]
        return own._replace(**{name: min(one[name] for one in everyone) for name in STEERING})

    def precisions(self, on: torch.device | None = None) -> list[Precision]:
        """Return what products can be made in, beside float32 and float64: sums of bytes have to fit 32 bits."""
        if on is not None:
            return ["float16"] if device.multiplies_halves(on) else []
        # of one column each, torch 2.14 multiplies what lies beside the rows
        return ["bytes"] if 1 < self.dim < 2**31 // 127**2 and largest_code() else []

    def possible(self, named: Precision | None, *, kept: bool, on: torch.device | None = None) -> Precision:
        """Return this precision, or float32 where it cannot be had; products of bytes need operands that are kept."""
        able = [*(["float16"] if on else []), *self.precisions(on), "float64"]
        return named if named in able and (kept or named != "bytes") else "float32"

    def new_operand(self, rows: int, precision: Precision) -> Operand:
        """Return room for some rows of an operand."""
        columns = self.dim if precision == "bytes" else self.columns
        tables = np.zeros((2, rows), np.float32) if precision == "bytes" else (None, None)
        return Operand(torch.empty(rows, columns, dtype=DTYPES[precision]), *tables)

    def operand(self, side: int, precision: Precision) -> Operand:
        """Return one whole side (0: queries, -1: gallery) as an operand."""
        if precision == "bytes":
            return self._coded(side)[0]
        out = self.new_operand(len(self._values(side)), precision)
        work_off(split(len(out.rows)), lambda some, _: self.fill(side, some, out.part(some)), self.threads)
        return out

    def fill(self, side: int, some: slice, out: Operand) -> None:
        """Make some rows of an operand."""
        rows = torch.empty(out.rows.shape) if out.rows.dtype == torch.float16 else out.rows
        extra = 0 if self.kind != exact.EUCLIDEAN else 1 if side == 0 else 2
        _place_rows(self._values(side)[some], self._centre, self._divisors(side, some), extra, rows.numpy())
        if rows is not out.rows:
            out.rows.copy_(rows)

    def _values(self, side: int) -> NDArray[Any]:
        values: NDArray[Any] = (self.pairs.queries, self.pairs.gallery)[side]
        return values

    def _divisors(self, side: int, some: slice) -> Floats:
        """Return what each row is divided by before it is multiplied: its norm for cosines, else a power of two."""
        norms = self.norms[side][some]
        if self.kind == exact.COSINE:
            return np.where(norms > 0, norms, 1.0)
        return np.full(len(norms), 1 / self._scales[side])

    def _coded(self, side: int) -> tuple[Operand, Floats]:
        """Return one whole side in bytes, and the norm of what rounding leaves of each row; made once."""
        kept = side % self.sides
        if kept not in self._codes:
            out, left = self.new_operand(len(self._values(side)), "bytes"), np.empty(len(self._values(side)))
            assert out.scale is not None
            assert out.offset is not None
            tables, most = (out.rows.numpy(), out.scale, out.offset), 1 if self.pairs.whole else largest_code()
            twice = 2 if self.kind == exact.EUCLIDEAN and side == 0 else 1

            def fill(some: slice, work: Floats) -> None:
                own = self._values(side)[some], self._centre, self._divisors(side, some)
                made = tuple(table[some] for table in (*tables, left))
                _code_rows(*own, most, twice, self.kind == exact.EUCLIDEAN, made, work)

            work_off(split(len(left)), fill, self.threads, lambda: np.empty(self.dim))
            self._codes[kept] = out, left * (1 + 1e-6) + 2.0**-60
        return self._codes[kept]

    def forget_codes(self) -> None:
        """Free what was made in bytes."""
        self._codes.clear()

    def error(self, precision: Precision, side: int = 0) -> Floats:
        """Return for each query, or item of one set, how far any of its estimates can lie from the exact score.

        `columns` products are summed in any order (Higham, section 3.1); 12 more roundings are for the operands, their norms
        and this formula. Operands in float16 add their rounding, 2.1 units, and 2**-25 for what is too small for it, and a
        GPU may cut off where it sums them; bytes what rounding to integers leaves (Cauchy and Schwarz: |q.g - q'.g'| <=
        |q - q'| |g| + |q'| |g - g'|), and 2**-20 for their scales.
        """
        if self.pairs.whole:
            return np.zeros(len(self._values(side)))
        lengths, twice = self._lengths(side), 2 if self.kind == exact.EUCLIDEAN else 1
        sizes = (lengths + self._longest) ** 2 if twice == 2 else lengths * self._longest
        if precision == "bytes":
            own = self._coded(side)[1]
            if not self._remainders:  # the largest of the items of all processes
                left = [self._coded(-1)[1], *(self.with_gallery(values, 0)._coded(-1)[1] for values in self._rest())]
                largest = max(float(of_some.max(initial=0.0)) for of_some in left)
                self._remainders.append(self.processes.largest([largest])[0])
            other = self._remainders[0]
            return twice * (own * self._longest + (lengths + own) * other + 2.0**-20 * (sizes + other))
        halves = precision == "float16"
        # halves are summed up in float32
        of_sum = (1 + halves) * min(ROUNDOFF[precision], 2.0**-24) * (self.columns + 12)
        relative = 1.02 * of_sum / (1 - of_sum) + 2.0**-50 + halves * 2.1 * ROUNDOFF["float16"]
        tiniest = self.columns * (2.0**-960 if precision == "float64" else 2.0**-120)  # what is too small to be held
        if halves:
            tiniest = math.sqrt(self.columns) * 2.0**-23  # on either side, of rows no longer than 1
        return twice * relative * sizes + tiniest

    def _lengths(self, side: int) -> Floats:
        """Return the norm of each row as it is multiplied."""
        if self.kind == exact.COSINE:
            return np.ones(len(self.norms[side]))
        if self.kind == exact.DOT:
            return self.norms[side] * self._scales[side]
        out = np.empty(len(self._values(side)))

        def fill(some: slice, _: None) -> None:
            rows = self.new_operand(some.stop - some.start, "float64").rows.numpy()
            _place_rows(self._values(side)[some], self._centre, self._divisors(side, some), 2, rows)
            out[some] = np.sqrt(rows[:, -1])

        work_off(split(len(out)), fill, self.threads)
        return out * (1 + 1e-9)

    # ------------------------------------------------------------------------------------------- what a user reads

    def to_user(self, scores: Floats) -> Floats:
        """Return the similarities that scores stand for, in the units of the data."""
        found: Floats
        if self.similarity == "hamming":
            found = (scores / self.unit - self.dim) / 2
        elif self.kind == exact.EUCLIDEAN:
            found = -np.sqrt(np.maximum(-scores / self.unit, 0.0)) / self._factor
        else:
            with np.errstate(over="ignore"):
                found = scores / self.unit / self._factor / self._factor
        return found + 0.0  # no zero is negative

    def from_user(self, scores: Any) -> Any:
        """Return the scores of similarities; an infinite one stays as it is."""
        scores = np.asarray(scores, np.float64)
        if self.similarity == "hamming":
            return (2 * scores + self.dim) * self.unit
        with np.errstate(over="ignore", invalid="ignore"):
            if self.kind == exact.EUCLIDEAN:
                distance = scores * self._factor
                return np.where(scores <= 0, -distance * distance * self.unit, np.inf)  # no distance is negative
            return scores * self.unit * self._factor * self._factor

    def exact(self, rows: NDArray[Any], columns: NDArray[Any]) -> Floats:
        """Return the scores of some pairs."""
        out = np.empty(len(rows))

        def fill(some: slice, work: Floats) -> None:
            exact.exact_scores(self.pairs, rows[some], columns[some], out[some], work)

        work_off(split(len(rows), 2**12), fill, self.threads, exact.workspace)
        return out


@kernel
def _place_rows(values, centre, divisors, extra, out):
    """Move rows to a centre and divide them; -|q - g|**2 = 2 q.g - |q|**2 - |g|**2 in one product of two more columns.

    Args:
        values: (rows, dim).
        centre: (dim,).
        divisors: (rows,).
        extra: 0: no more columns; 1: those of a query, 2: those of an item.
        out: (rows, dim or dim + 2).
    """
    dim = values.shape[1]
    for r in range(values.shape[0]):
        square, divisor = 0.0, divisors[r]
        for k in range(dim):
            value = (np.float64(values[r, k]) - centre[k]) / divisor
            square += value * value
            out[r, k] = 2 * value if extra == 1 else value
        if extra > 0:
            out[r, dim], out[r, dim + 1] = (-square, -1.0) if extra == 1 else (1.0, square)


@kernel
def _code_rows(values, centre, divisors, most, twice, squared, tables, work):
    """Round rows, moved to a centre and divided, to integers times a scale.

    Args:
        values: (rows, dim).
        centre: (dim,).
        divisors: (rows,).
        most: Largest integer.
        twice: 2 for a side whose products count twice.
        squared: Whether minus the squared norm is added to each estimate.
        tables: (rows, dim) the integers; (rows,) scales, offsets, and norms of what rounding leaves.
        work: (dim,) to work in.
    """
    codes, scales, offsets, left = tables
    for r in range(values.shape[0]):
        row, code, divisor, top = values[r], codes[r], divisors[r], 0.0
        for k in range(row.shape[0]):
            work[k] = (np.float64(row[k]) - centre[k]) / divisor
        for k in range(row.shape[0]):
            top = max(top, abs(work[k]))
        offsets[r] = -exact.plain_sum(work, work, False) if squared else 0.0
        scale = np.float64(np.float32(max(top / most, 2.0**-100)))  # which float32 still divides by
        for k in range(row.shape[0]):
            nearest = min(max(np.rint(work[k] / scale), -most), most)
            code[k] = np.int8(nearest)
            work[k] -= nearest * scale
        scales[r], left[r] = twice * scale, np.sqrt(exact.plain_sum(work, work, False))


@kernel
def scale_product(product, left, left_offset, right, right_offset, out):
    """Write into `out` the estimates that a product in bytes stands for."""
    for r in range(product.shape[0]):
        row, estimates, scale, offset = product[r], out[r], left[r], left_offset[r]
        for c in range(row.shape[0]):
            estimates[c] = np.float32(row[c]) * (scale * right[c]) + (offset + right_offset[c])


@functools.cache
def largest_code() -> int:
    """Return up to which size products of bytes are exact on this processor; 0 where there are none that could pay.

    Without VNNI, oneDNN adds two products of bytes, one of them moved by 128, in 16 bits: of codes up to 63 the sum cannot
    saturate, (63 + 128) * 63 * 2 = 24,066; of larger ones it does.
    """
    if not torch.backends.mkldnn.is_available():
        return 0  # torch then multiplies in a plain loop
    signs = torch.ones(64, 64, dtype=torch.int8)
    signs[::2], signs[::3, ::5] = -1, 1
    for largest in (127, 63):
        left, right = largest * signs, largest * signs.flip(1)
        try:
            product = torch._int_mm(left, right.T)
        except (AttributeError, RuntimeError):  # a private function of torch, 2.6 to 2.15 at least
            return 0
        if torch.equal(product.double(), left.double() @ right.double().T):
            return largest
    return 0


def _twins(values: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each row the number of the first that equals it."""
    bits = values.view({8: np.int64, 4: np.int32, 1: np.int8}[values.itemsize])
    odd, some = np.random.default_rng(0).integers(2**62, size=bits.shape[1]) | 1, split(len(bits))
    mixed = (bits[rows] ^ (bits[rows] >> (4 * bits.itemsize - 3)) for rows in some)  # small integers end in zeros
    hashes = np.concatenate([np.empty(0, np.int64), *(rows @ odd for rows in mixed)])
    _, first, number = np.unique(hashes, return_index=True, return_inverse=True)
    twin = first[number]
    same = [(bits[rows] == bits[twin[rows]]).all(1) for rows in some]  # rows whose hashes meet stay apart
    return np.where(np.concatenate([np.empty(0, bool), *same]), twin, np.arange(len(bits)))
