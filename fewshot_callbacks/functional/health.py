"""What an embedding shows without a ranking: whether it has collapsed, how many directions it uses, who is whose neighbour.

| number | definition | source |
| --- | --- | --- |
| `rankme` | exp of the entropy of p = s / sum(s) + 1e-7, s the singular values of the (items, dim) matrix, not centred | Garrido et al., "RankMe", ICML 2023 |
| `effective_rank` | exp of the entropy of the eigenvalues of the covariance, divided by their sum | Roy and Vetterli, "The effective rank", EUSIPCO 2007 |
| `spectral_decay` | minus the slope of log eigenvalue over log index, by least squares over the indices of `DECAY` | Agrawal et al., "alpha-ReQ", NeurIPS 2022 |
| `nc1` | tr(S_W pinv(S_B)) / classes | Papyan, Han and Donoho, PNAS 2020 |
| `cdnv` | mean over pairs of classes of (v_i + v_j) / (2 distance of their means squared) | Galanti, György and Hutter, ICLR 2022 |
| `alignment` | mean squared distance of two items of a class, of unit vectors | Wang and Isola, ICML 2020 |
| `uniformity` | log of the mean of exp(-2 squared distance) over pairs of unit vectors | Wang and Isola, ICML 2020 |
| `hubness` | skewness of N_k, how often an item is among the k nearest of others | Radovanović et al., JMLR 2010 |
| `intrinsic_dimension` | (n - 1) / sum of log(r2 / r1), r1 and r2 the distances of the two nearest | Facco et al., "TwoNN", 2017 |

The first five come from moments, of which those of disjoint sets merge in any order. The last two come from one search.
"""  # noqa: E501 - a table

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes, presence
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.functional import _scatter_kernel
from fewshot_callbacks.functional._labels import Labels, check_labels, encode, read_labels
from fewshot_callbacks.functional._reading import as_tensor, check_embeddings, computable, default_mode
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, unit_rows
from fewshot_callbacks.functional.knn import NeighbourSearch, Votes
from fewshot_callbacks.functional.neighbours import positive_whole
from fewshot_callbacks.functional.retrieval.inputs import EVERYTHING, Share, check_places, refuse_other_dims
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval, normal_quantile

_CALL = "embedding_health"
# Indices of the eigenvalues, from 1, that the decay is fitted to: the first ones are those of the classes, and the last
# ones of a long spectrum are noise.
DECAY = (3, 100)
# Fewer points do not show a slope.
FEWEST_EIGENVALUES = 3
# Rows that are turned into float64 at a time.
TILE = 2048
# Means of classes that are compared with as many at a time.
CLASSES_AT_ONCE = 512
# Items whose pairs give the uniformity of a larger set: half a million pairs, in 8 MB.
SAMPLE = 1024
# Squared distances of means below this share of their squared lengths are computed from the differences.
NEAR = 1e-6
# Means of classes that differ by less than this share of their length may differ by the rounding of float64 alone.
ROUNDING_OF_MEANS = 1e-14
# Where vectors differ by less than this share of their length, only float32's rounding is left of them.
ROUNDING = 1e-6
# Ranks below this are a collapse: in docs/embedding_health.md all networks that collapsed had fewer in the end, and no
# other had. It takes ten times as many dimensions and items to tell.
FEWEST_DIRECTIONS, FEWEST_TO_JUDGE = 5, 50


@dataclass(frozen=True)
class Moments:
    """The count, the mean and the scatter matrix of a set of items, in float64; those of disjoint sets merge in any order.

    Examples:
        >>> import torch
        >>> items = torch.randn(60, 8)
        >>> parts = Moments.of(items[:13]).merge(Moments.of(items[13:]))
        >>> torch.testing.assert_close(parts.scatter, Moments.of(items).scatter)
    """

    count: int
    origin: Float[Tensor, "dim"]
    """an item, from which the mean is measured, so that no offset costs a digit"""
    offset: Float[Tensor, "dim"]
    """mean minus origin"""
    scatter: Float[Tensor, "dim dim"]
    """sum over items of (item - mean)(item - mean)'"""

    @classmethod
    def of(cls, items: Float[Tensor, "items dim"]) -> Moments:
        """Compute the moments of at least one item."""
        origin = items[0].double()
        shifted = items - origin  # float64, whatever the items are
        offset = shifted.mean(dim=0)
        shifted -= offset
        return cls(len(items), origin, offset, _gram(shifted))

    def merge(self, other: Moments) -> Moments:
        """Merge the moments of two sets."""
        count = self.count + other.count
        step = (other.origin - self.origin) + (other.offset - self.offset)
        apart = step.outer(step) * (self.count * other.count / count)
        offset = self.offset + step * (other.count / count)
        return Moments(count, self.origin, offset, self.scatter + other.scatter + apart)

    @property
    def mean(self) -> Float[Tensor, "dim"]:
        """The mean of all items."""
        return self.origin + self.offset

    @cached_property
    def eigenvalues(self) -> Float[Tensor, "rank"]:
        """Those of the scatter matrix that are more than rounding, the largest first."""
        return _positive(self.scatter)

    def rankme(self) -> float:
        """Compute RankMe, from 1 to the smaller of items and dimensions; NaN if all items are 0."""
        second = self.scatter + self.count * self.mean.outer(self.mean)
        singular = _positive(second).sqrt()
        missing = max(0, min(self.count, len(self.mean)) - len(singular))
        return _entropy_rank(torch.cat([singular, singular.new_zeros(missing)]), 1e-7)

    def effective_rank(self) -> float:
        """Compute the effective rank of the covariance, at least 1; NaN if all items are equal."""
        return _entropy_rank(self.eigenvalues, 0.0)

    def spectral_decay(self) -> float:
        """Compute how fast the eigenvalues of the covariance fall; NaN where there are too few of them."""
        first, last = DECAY
        values = self.eigenvalues[first - 1 : last].log()
        if len(values) < FEWEST_EIGENVALUES:
            return math.nan
        index = torch.arange(first, first + len(values), dtype=torch.float64, device=values.device).log()
        index = index - index.mean()
        return -float((index @ values) / (index @ index))

    @property
    def spread(self) -> float:
        """Length of the deviations from the mean, root mean square, relative to that of the items."""
        deviation = float(self.scatter.trace())
        total = deviation + self.count * float(self.mean.square().sum())
        return math.sqrt(deviation / total) if total else 0.0


def _gram(rows: Float[Tensor, "items dim"]) -> Float[Tensor, "dim dim"]:
    """Multiply the columns of a matrix with each other."""
    dim = rows.shape[1]
    found, step = rows.new_empty(dim, dim), max(1, -(-dim // 4))
    for at in range(0, dim, step):  # what lies below the diagonal is known
        block = rows[:, at : at + step].T @ rows[:, at:]
        found[at : at + step, at:], found[at:, at : at + step] = block, block.T
    return found


def _positive(matrix: Float[Tensor, "dim dim"]) -> Float[Tensor, "rank"]:
    """Return the eigenvalues of a symmetric matrix that are more than rounding, the largest first."""
    values: Tensor = torch.linalg.eigvalsh(matrix).flip(0)
    return values[values > values[0].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps]


def _entropy_rank(values: Float[Tensor, "n"], floor: float) -> float:
    if not len(values) or float(values[0]) == 0:
        return math.nan
    share = values / values.sum() + floor
    return math.exp(-float(torch.special.xlogy(share, share).sum()))


@dataclass(frozen=True)
class EmbeddingHealth:
    """What an embedding shows without a ranking; a number is NaN where it cannot be computed, and a note says why.

    None of the numbers has an interval but the uniformity of a sample. `print` shows them in a table.

    Examples:
        >>> import torch
        >>> health = embedding_health(torch.eye(4).repeat(3, 1), torch.arange(12) % 4, k=2)
        >>> round(health.rankme, 3), health.alignment, health.duplicates
        (4.0, 0.0, 12)
    """

    items: int
    dim: int
    k: int | None
    """neighbours that were searched"""
    rankme: float
    """how many directions the embeddings fill evenly, from 1 to the smaller of items and dim; larger is less collapsed. A
    mean far from the origin lowers it"""
    effective_rank: float
    """the same of the covariance, which does not see the mean"""
    spectral_decay: float
    """how fast the eigenvalues of the covariance fall: near 1 they fall slowly, far above few directions hold all"""
    spread: float
    """length of the deviations from the mean relative to that of the embeddings, from 0 to 1; below 1e-6 all are equal but
    for rounding"""
    uniformity: float
    """at most 0, and at least about -4; lower is more evenly spread over the sphere. Of all pairs of up to 1,024 items,
    else of all pairs of 1,024 drawn whatever their order"""
    uniformity_interval: Interval
    """95 % interval of the uniformity of all pairs; without width where they are all taken"""
    classes: int | None = None
    """classes with two items and more, which the next three numbers are of; None without labels"""
    nc1: float = math.nan
    """scatter within classes in units of that between them, at least 0; smaller is more collapsed onto the class means"""
    cdnv: float = math.nan
    """variance of two classes over the squared distance of their means, at least 0; smaller is easier for a classifier
    by the nearest class mean"""
    alignment: float = math.nan
    """mean squared distance of two items of a class as unit vectors, from 0 to 4; smaller is closer"""
    hubness: float = math.nan
    """skewness of how often an item is among the k nearest of others: 0 where all are alike; some are hubs above about 1"""
    antihubs: float = math.nan
    """share of items that are nobody's neighbour"""
    hubs: tuple[tuple[int, float], ...] = ()
    """index of the five largest hubs, and how often each is a neighbour; k on average"""
    intrinsic_dimension: float = math.nan
    """dimension of the surface that the items lie on, by their two nearest neighbours"""
    duplicates: int | None = None
    """items with another one that is equal, which are left out of the intrinsic dimension; None without neighbours"""
    notes: tuple[str, ...] = ()
    """why numbers are NaN"""

    def metrics(self) -> dict[str, float]:
        """Return the numbers by the names under which a monitor logs them."""
        return {name: getattr(self, name) for name in names_of(labels=self.classes is not None, k=self.k)}

    @property
    def collapse(self) -> str | None:
        """Say that the embedding has collapsed, with the number that shows it; None if it has not (see `collapse_of`)."""
        return collapse_of(self.items, self.dim, self.classes, self.rankme, self.effective_rank, self.spread)

    def __str__(self) -> str:
        """Return a table with a number a line, and the notes."""
        head = f"{self.items:,} items, {self.dim} dimensions"
        head += "" if self.classes is None else f", {self.classes:,} classes with two items and more"
        lines = [head, *(f"{name:<20} {value:10.4g}" for name, value in self.metrics().items())]
        if self.hubs:
            lines.append("largest hubs         " + ", ".join(f"{item} ({number:g})" for item, number in self.hubs))
        return "\n".join([*lines, *filter(None, [self.collapse]), *self.notes])

    def __repr__(self) -> str:
        return str(self)


def names_of(*, labels: bool, k: int | None) -> list[str]:
    """List the numbers that there are with or without labels, with or without neighbours."""
    names = ["rankme", "effective_rank", "spectral_decay", "uniformity"]
    names += ["nc1", "cdnv", "alignment"] if labels else []
    return names + (["hubness", "antihubs", "intrinsic_dimension"] if k is not None else [])


def collapse_of(
    items: int, dim: int, classes: int | None, rankme: float, effective_rank: float, spread: float
) -> str | None:
    """Say that an embedding has collapsed, to a point or to few directions; None if it has not.

    A point: what items differ by is the rounding of float32. Few directions: of many that there are, both RankMe, which a
    mean far from the origin lowers, and the effective rank, which outliers lower, show fewer than 5. That is sound for
    few classes, which may lie in a direction each: up to 10 are not judged.
    """
    if items > 1 and spread < ROUNDING:
        return (
            f"The embedding has collapsed to a point: {items:,} items differ by {spread:.1e} of their length, which is "
            "rounding."
        )
    is_judged = min(items, dim) >= FEWEST_TO_JUDGE and (classes is None or classes > 2 * FEWEST_DIRECTIONS)
    if is_judged and max(rankme, effective_rank) < FEWEST_DIRECTIONS:
        return (
            f"The embedding has collapsed to few directions: RankMe is {rankme:.2f} of {min(items, dim)}, the effective "
            f"rank {effective_rank:.2f}."
        )
    return None


@default_mode()
def embedding_health(
    embeddings: Any,
    labels: Any | None = None,
    *,
    k: int | None = 10,
    normalize: bool = False,
    share: Share = EVERYTHING,
) -> EmbeddingHealth:
    """Compute what an embedding shows without a ranking (see the module docstring).

    The numbers do not depend on the order of the items, and on the number of processes in the last digits alone; all but
    the neighbours take one matrix of (dim, dim) beyond the embeddings.

    Args:
        embeddings: (items, dim) finite floating-point rows of any scale.
        labels: (items,) integers or strings; without them there are no `nc1`, `cdnv` and `alignment`.
        k: Neighbours of the hubness, at least 2, by their Euclidean distance; items as near as the last of them share the
            places that are left. None leaves out what needs neighbours, which takes most of the time and, with several
            processes, all embeddings in each of them.
        normalize: Scale each embedding to length 1 first; neighbours are then those of the cosine.
        share: Which part of the items this process holds, see `Share`.

    Raises:
        ValueError: If embeddings are not a finite (items, dim) matrix with at least one item, labels are not one for each
            item, k is below 2, or processes that make the call together make it in different ways; the same in every
            process.

    Examples:
        >>> import torch
        >>> generator = torch.Generator().manual_seed(0)
        >>> line = torch.linspace(0, 1, 40)[:, None] + 0.001 * torch.randn(40, 8, generator=generator)
        >>> health = embedding_health(line)
        >>> round(health.effective_rank, 1), health.classes
        (1.0, None)
    """
    processes = share.processes
    with processes.together():
        if k is not None:
            k = positive_whole(_CALL, "k", k, "Pass the number of neighbours, such as 10, or None.", least=2)
        places = presence(share.query_places)
        processes.refuse_other_calls(
            _CALL, {"k": k, "normalize": normalize, "labels": presence(labels), "query_places": places}
        )
        rows, codes = _read(embeddings, labels, share)
        # float64 is scaled, whose squares may overflow; a power of two costs no digit
        largest = float(rows.abs().max()) if rows.dtype == torch.float64 and rows.numel() else 0.0
        unit = 2.0 ** math.frexp(max(processes.gather(largest)))[1]
        everyone = processes.gather(_moments(rows, codes, unit, normalize=normalize))
        moments, classes, of_units = (_merged(each) for each in zip(*everyone, strict=True))
        if normalize:
            rows = unit_rows(rows.double()).to(rows.dtype)
        rows = rows.reshape(len(rows), len(moments.mean))  # of a process without items, too
        found: dict[str, Any] = {"items": moments.count, "dim": len(moments.mean), "k": k, "notes": []}
        _of_moments(moments, found)
        if classes is not None:
            _of_classes(moments, classes, of_units, found)
        _of_sample(rows, processes, found)
        if k is not None:
            _of_neighbours(rows, share, k, found)
    return EmbeddingHealth(**found | {"notes": tuple(found["notes"])})


def _read(embeddings: Any, labels: Any, share: Share) -> tuple[Tensor, Tensor | None]:
    """Return rows that can be computed with, and the codes of their labels. *Collective*; a process may have no row."""
    rows, processes = as_tensor(embeddings, "embeddings", _CALL).cpu(), share.processes
    items = len(rows) if rows.ndim else 0
    if items or processes.count == 1:
        check_embeddings(rows, "embeddings", _CALL)
    read = None if labels is None else read_labels(labels, items, "labels", "embeddings", _CALL)
    places = share.query_places
    if places is not None:
        places = check_labels(places, items, "places", "embeddings", _CALL)
    everyone = processes.gather((rows.shape[-1] if rows.ndim else 0, items, places))
    dims = {rank: dim for rank, (dim, number, _) in enumerate(everyone) if number}
    if not dims:
        raise ValueError(f"{_CALL}: embeddings is empty (shape (0, 0)) in every process. Pass at least one item.")
    refuse_other_dims(_CALL, "embeddings", dims)
    codes = None if read is None else encode(_CALL, {"labels": read}, processes)[0][0]
    if places is not None:
        check_places(_CALL, "embeddings", torch.cat([held for *_, held in everyone if held is not None]))
    return computable(rows), codes


def _moments(
    rows: Tensor, codes: Tensor | None, unit: float, *, normalize: bool
) -> tuple[Moments | None, ClassMoments | None, ClassMoments | None]:
    """Return the moments of all rows, of each class, and of each class as unit vectors; None where there are none."""
    if not len(rows):
        return None, None, None
    parts = (unit_rows(part.double()) if normalize else part / unit for part in rows.split(TILE))
    moments = reduce(Moments.merge, (Moments.of(part) for part in parts))
    if codes is None:
        return moments, None, None
    lengths = torch.from_numpy(_scatter_kernel.lengths(rows.numpy()))
    of_units = _class_moments(rows, codes, lengths)
    return moments, of_units if normalize else _class_moments(rows, codes, torch.full_like(lengths, unit)), of_units


def _class_moments(
    rows: Float[Tensor, "items dim"], codes: Int[Tensor, "items"], lengths: Float[Tensor, "items"]
) -> ClassMoments:
    """Return the moments of each class of rows that are divided by their lengths, from one reading of the rows."""
    present, number, counts = codes.unique(return_inverse=True, return_counts=True)
    origin = number.sort(stable=True).indices[counts.cumsum(0) - counts]  # the first item of each class
    given = (each.numpy() for each in (rows, lengths, number, origin))
    sums, squares = map(torch.from_numpy, _scatter_kernel.class_sums(*given))
    offsets = sums / counts[:, None]
    # The origin is an item: what is subtracted is at most n times what is left, and its rounding n 2^-53 of it.
    scatter = (squares - counts * offsets.square().sum(dim=1)).clamp(min=0)
    return ClassMoments(
        Labels(present.long()), counts, rows[origin].double() / lengths[origin, None], offsets, scatter.sqrt()
    )


def _merged(parts: Sequence[Any]) -> Any:
    """Merge the moments that are there; None for none."""
    given = [part for part in parts if part is not None]
    return reduce(lambda one, other: one.merge(other), given) if given else None


def _of_moments(moments: Moments, found: dict[str, Any]) -> None:
    found |= {"rankme": moments.rankme(), "effective_rank": moments.effective_rank(), "spread": moments.spread}
    found["spectral_decay"] = moments.spectral_decay()
    if math.isnan(found["rankme"]):
        found["notes"].append("rankme is NaN: all embeddings are zero.")
    if math.isnan(found["effective_rank"]):
        why = "there is a single item" if moments.count == 1 else "all embeddings are equal"
        found["notes"].append(f"effective_rank and spectral_decay are NaN: {why}.")
    elif math.isnan(found["spectral_decay"]):
        found["notes"].append(
            f"spectral_decay is NaN: the covariance has {len(moments.eigenvalues)} eigenvalues that are more than "
            f"rounding, and the slope needs {DECAY[0] + FEWEST_EIGENVALUES - 1}."
        )


def _of_classes(moments: Moments, classes: ClassMoments, of_units: ClassMoments, found: dict[str, Any]) -> None:
    several = classes.counts > 1
    found["classes"] = number = int(several.sum())
    if not number:
        found["notes"].append("nc1, cdnv and alignment are NaN: no class has two items.")
        return
    if number < len(several):
        found["notes"].append(
            f"nc1, cdnv and alignment are of the {number:,} classes with two items and more; {len(several) - number:,} have "
            "one."
        )
    pairs = (of_units.counts * (of_units.counts - 1)).sum()
    found["alignment"] = float(2 * (of_units.counts * of_units.scatter).sum() / pairs)
    if number < 2:
        found["notes"].append("nc1 and cdnv are NaN: they compare classes, and one class has two items and more.")
        return
    counts, means = classes.counts.double(), classes.means - moments.mean
    within = moments.scatter - _gram(means * counts.sqrt()[:, None])
    counts, means = counts[several], means[several]
    apart = means - (counts / counts.sum()) @ means
    values, directions = torch.linalg.eigh(_gram(apart) / number)
    kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    values, directions = values[kept], directions[:, kept]
    if not len(values):
        found["notes"].append("nc1 and cdnv are NaN: all classes have the same mean.")
        return
    nc1 = float(((within @ directions) * directions).sum(dim=0).div(values).sum() / counts.sum() / number)
    found["nc1"] = max(0.0, nc1)  # where each class is a point, rounding may lie below
    rounding = (ROUNDING_OF_MEANS * float(moments.mean.norm())) ** 2
    found["cdnv"] = _distance_normalized_variance(apart, classes.scatter[several] / counts, rounding)
    if math.isnan(found["cdnv"]):
        found["notes"].append("cdnv is NaN: two classes are one point, so that it divides 0 by 0.")
    if math.isinf(found["cdnv"]):
        found["notes"].append("cdnv is infinite: two classes have the same mean.")


def _distance_normalized_variance(
    means: Float[Tensor, "classes dim"], variance: Float[Tensor, "classes"], rounding: float
) -> float:
    """Average the variance of a class over its squared distance to another one, over all ordered pairs.

    Args:
        means: Mean of each class, less that of all items.
        variance: Mean squared distance of the items of each class to its mean.
        rounding: Squared distance that means may have by rounding alone, beside that of their own lengths.
    """
    total = 0.0
    parts = [part.split(CLASSES_AT_ONCE) for part in (means, means.square().sum(dim=1), variance)]
    for place, (some, of_some, varied) in enumerate(zip(*parts, strict=True)):
        for others, of_others, also in zip(*(part[place:] for part in parts), strict=True):
            lengths = of_some[:, None] + of_others
            squared = torch.addmm(lengths, some, others.T, alpha=-2)
            # a small difference of two long means has lost its digits in the product
            for near in (squared <= NEAR * lengths).nonzero().split(max(1, TILE * CLASSES_AT_ONCE // some.shape[1])):
                one, other = near.T
                squared[one, other] = (some[one] - others[other]).square().sum(dim=1)
            squared.masked_fill_(squared <= rounding + ROUNDING_OF_MEANS**2 * lengths, 0.0)
            ratios = (varied[:, None] + also) / squared
            total += float((ratios.triu(1) if others is some else ratios).sum())
    return total / (len(means) * (len(means) - 1))


def _of_sample(rows: Float[Tensor, "items dim"], processes: Processes, found: dict[str, Any]) -> None:
    """Find the uniformity, of all pairs of some items: drawn by their places in an order that their bits decide."""
    items = found["items"]
    if items > SAMPLE:
        keys = processes.gather(_keys(rows))
        first = sum(len(held) for held in keys[: processes.rank])
        drawn = torch.randperm(items, generator=torch.Generator().manual_seed(0))[:SAMPLE]
        drawn = torch.cat(keys).argsort(stable=True)[drawn] - first
        rows = rows[drawn[(drawn >= 0) & (drawn < len(rows))].sort().values]
    units = unit_rows(torch.cat(processes.gather(rows.double())))
    found |= {"uniformity": math.nan, "uniformity_interval": UNKNOWN}
    number = len(units)
    if number < 2:
        found["notes"].append("uniformity is NaN: a single item has no pair.")
        return
    length = units.square().sum(dim=1)
    kernel = (length[:, None] + length - 2 * units @ units.T).clamp_(min=0).mul_(-2).exp_().fill_diagonal_(0.0)
    of_item = kernel.sum(dim=1)
    total = of_item.sum()
    found["uniformity"] = value = min(0.0, float((total / (number * (number - 1))).log()))
    if number == items:
        found["uniformity_interval"] = Interval(value, value)
        return
    # jackknife over items, of which a sample without repetition leaves a part
    without = ((total - 2 * of_item) / ((number - 1) * (number - 2))).log()
    variance = float((without - without.mean()).square().sum()) * (number - 1) / number * (1 - number / items)
    reach = normal_quantile(0.95) * math.sqrt(variance)
    found["uniformity_interval"] = Interval(value - reach, value + reach)


def _keys(rows: Float[Tensor, "items dim"]) -> Int[Tensor, "items"]:
    """Return a number for each row that its bits decide: equal rows have equal ones, others other ones by chance."""
    bits = rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int64)
    factors = torch.randint(2**31 - 1, (rows.shape[1],), generator=torch.Generator().manual_seed(1)).to(bits.dtype)
    parts = [(part * factors).sum(dim=1) for part in bits.split(TILE)]  # what overflows, wraps
    return torch.cat(parts) * 0x5851F42D4C957F2D  # spreads what differs in a few bits


def _of_neighbours(rows: Float[Tensor, "items dim"], share: Share, k: int, found: dict[str, Any]) -> None:
    """Find hubness and intrinsic dimension, from one search among the distinct rows."""
    items, processes, notes = found["items"], share.processes, found["notes"]
    if items <= k:
        notes.append(
            f"hubness, antihubs and intrinsic_dimension are NaN: {k} neighbours need more than {items} items. Pass k of at "
            "most the number of other items."
        )
        return
    held = processes.gather((rows, share.query_places))
    whole = torch.cat([part for part, _ in held]) + 0.0  # of two zeros of different sign
    if share.query_places is not None:
        whole = whole[torch.cat([torch.as_tensor(places) for _, places in held]).argsort()]
    with computing() as threads:
        vectors, alike = Vectors(whole, None, "euclidean", threads=threads), np.zeros(items, np.int64)
        first, number, counts = np.unique(vectors.pairs.query_first_duplicate, return_inverse=True, return_counts=True)
        own = np.arange(processes.rank, len(first), processes.count)
        often, logs = np.zeros(len(first)), list[float]()
        search = NeighbourSearch(
            whole, None, alike, alike, np.arange(len(alike)), "euclidean", memory_bytes(_CALL, None)
        )
        for some, votes in search.votes(vectors, first[own], k) if len(own) else ():
            [portion], equal = votes.portions([k]), counts[own[some]]
            often += np.bincount(votes.row, portion * votes.items * equal[votes.query], len(first))
            logs += _log_ratios(votes, equal)
    found["duplicates"] = int((counts[number] > 1).sum())
    everyone = processes.gather((often, logs))
    ratios = [ratio for _, some in everyone for ratio in some]
    total = math.fsum(ratios)
    found["intrinsic_dimension"] = (len(ratios) - 1) / total if len(ratios) > 1 and total > 0 else math.nan
    if math.isnan(found["intrinsic_dimension"]):
        notes.append(
            "intrinsic_dimension is NaN: no item has two nearest neighbours at different distances other than 0."
        )
    named = torch.from_numpy((sum(part for part, _ in everyone) / counts)[number])
    found["antihubs"] = float((named == 0).double().mean())
    largest = named.argsort(descending=True, stable=True)[:5].tolist()
    found["hubs"] = tuple((item, float(named[item])) for item in largest)
    apart = named - named.mean()
    variance = float(apart.square().mean())
    found["hubness"] = float(apart.pow(3).mean()) / variance**1.5 if variance > 1e-20 else math.nan  # beyond rounding
    if math.isnan(found["hubness"]):
        notes.append("hubness is NaN: all items are neighbours equally often.")


def _log_ratios(votes: Votes, equal: Int[np.ndarray, "queries"]) -> list[float]:
    """Return the logs of the second over the first distance, of queries without an equal item."""
    first = np.flatnonzero(votes.begins)[equal == 1]
    following = np.where(votes.items[first] > 1, first, np.minimum(first + 1, len(votes.score) - 1))
    ratios: list[float] = np.log(votes.score[following] / votes.score[first]).tolist()
    return ratios
