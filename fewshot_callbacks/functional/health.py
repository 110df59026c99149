"""The health of an embedding without a ranking: whether it has collapsed, how many directions it uses, which items are hubs.

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

`uniformity` comes from the pairs of a sample, `hubness` and `intrinsic_dimension` from one search of neighbours, and all
others from moments, which can be merged over disjoint sets in any order.

To add a number, add a field with `_logged` to `EmbeddingHealth`: its row in the printed table and its key in a monitor follow.
Compute it in one of the functions that return `ReportFields`. Two tables for readers are written by hand: the one above, and that
of `docs/metrics.md`.
"""  # noqa: E501 - a table

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.functional import _scatter_kernel
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._labels import Labels
from fewshot_callbacks.functional._notes import ReportFields
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, unit_rows
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import EVERYTHING, Items, ItemSets, Share
from fewshot_callbacks.functional.knn import NeighbourSearch, Votes
from fewshot_callbacks.functional.neighbours import positive_whole
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval, normal_quantile
from fewshot_callbacks.storage.stored_rows import as_one_tensor
from fewshot_callbacks.system.words import counted

_CALL = "embedding_health"
# Indices of the eigenvalues, from 1, that the decay is fitted to: the first ones show the classes, and the last ones of a
# long spectrum are noise.
DECAY = (3, 100)
# Fewer points do not show a slope.
FEWEST_EIGENVALUES = 3
# Rows that are converted to float64 at a time.
TILE = 2048
# A block of class means that is compared with another block at a time.
CLASSES_AT_ONCE = 512
# Size of the sample whose pairs give the uniformity of a larger set: half a million pairs, in 8 MB.
SAMPLE = 1024
# Largest hubs that a report lists.
SHOWN_HUBS = 5
# A variance below this is rounding.
LEAST_VARIANCE = 1e-20
# Squared distances of means below this share of their squared lengths are computed from the differences.
NEAR = 1e-6
# Means of classes that differ by less than this share of their length may differ by the rounding of float64 alone.
ROUNDING_OF_MEANS = 1e-14
# Where vectors differ by less than this share of their length, only float32's rounding is left of them.
ROUNDING = 1e-6
# Ranks below this are a collapse: on the glyphs of docs/embedding_health_study.md all networks that collapsed had fewer in
# the end, and no other had.
FEWEST_DIRECTIONS = 5
# An embedding of fewer dimensions or items is not judged.
FEWEST_TO_JUDGE = 50


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
        """Return the moments of at least one item."""
        origin = items[0].double()
        shifted = items - origin  # float64, whatever the items are
        offset = shifted.mean(dim=0)
        shifted -= offset
        return cls(len(items), origin, offset, _gram(shifted))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the union of two disjoint sets."""
        count = self.count + other.count
        step = (other.origin - self.origin) + (other.offset - self.offset)  # from one mean to the other
        between = step.outer(step) * (self.count * other.count / count)
        offset = self.offset + step * (other.count / count)
        return Moments(count, self.origin, offset, self.scatter + other.scatter + between)

    @property
    def mean(self) -> Float[Tensor, "dim"]:
        """The mean of all items."""
        return self.origin + self.offset

    @cached_property
    def eigenvalues(self) -> Float[Tensor, "rank"]:
        """Eigenvalues of the scatter matrix that are more than rounding, the largest first."""
        return _positive(self.scatter)

    def rankme(self) -> float:
        """Return RankMe, from 1 to the smaller of items and dimensions; NaN if all items are 0."""
        second_moment = self.scatter + self.count * self.mean.outer(self.mean)
        singular = _positive(second_moment).sqrt()
        missing = max(0, min(self.count, len(self.mean)) - len(singular))
        return _entropy_rank(torch.cat([singular, singular.new_zeros(missing)]), 1e-7)

    def effective_rank(self) -> float:
        """Return the effective rank of the covariance, at least 1; NaN if all items are equal."""
        return _entropy_rank(self.eigenvalues, 0.0)

    def spectral_decay(self) -> float:
        """Return how fast the eigenvalues of the covariance fall; NaN where there are too few of them."""
        first, last = DECAY
        logs = self.eigenvalues[first - 1 : last].log()
        if len(logs) < FEWEST_EIGENVALUES:
            return math.nan
        log_index = torch.arange(first, first + len(logs), dtype=torch.float64, device=logs.device).log()
        centred = log_index - log_index.mean()
        return -float((centred @ logs) / (centred @ centred))

    @property
    def spread(self) -> float:
        """Root mean square length of the deviations from the mean over that of the items; 0 if all items are 0."""
        deviation = float(self.scatter.trace())
        total = deviation + self.count * float(self.mean.square().sum())
        return math.sqrt(deviation / total) if total else 0.0


def _gram(rows: Float[Tensor, "items dim"]) -> Float[Tensor, "dim dim"]:
    """Return the products of the columns of a matrix with each other."""
    dim = rows.shape[1]
    products = rows.new_empty(dim, dim)
    step = max(1, -(-dim // 4))
    for first in range(0, dim, step):
        # The products below the diagonal are those above it.
        block = rows[:, first : first + step].T @ rows[:, first:]
        products[first : first + step, first:] = block
        products[first:, first : first + step] = block.T
    return products


def _positive(matrix: Float[Tensor, "dim dim"]) -> Float[Tensor, "rank"]:
    """Return the eigenvalues of a symmetric matrix that are more than rounding, the largest first."""
    values: Tensor = torch.linalg.eigvalsh(matrix).flip(0)
    return values[values > values[0].clamp(min=0) * len(values) * torch.finfo(values.dtype).eps]


def _entropy_rank(values: Float[Tensor, "n"], floor: float) -> float:
    """Return exp of the entropy of the shares of some descending values, plus a floor; NaN if all are 0."""
    if not len(values) or float(values[0]) == 0:
        return math.nan
    share = values / values.sum() + floor
    return math.exp(-float(torch.special.xlogy(share, share).sum()))


class _Logged(NamedTuple):
    """How a number of `EmbeddingHealth` is logged."""

    better: Literal["higher", "lower"] | None
    needs: Literal["labels", "neighbours"] | None


def _logged(
    better: Literal["higher", "lower"] | None = None, needs: Literal["labels", "neighbours"] | None = None
) -> dict[str, _Logged]:
    """Return the metadata of a field that is a number of an embedding.

    Args:
        better: Which values are better; None where neither are.
        needs: What the number needs beside embeddings.
    """
    return {"logged": _Logged(better, needs)}


@equal_with_nan
@dataclass(frozen=True)
class EmbeddingHealth:
    """The result of `embedding_health`; a number is NaN where it cannot be computed, and a note says why.

    Only the uniformity of a sample has an interval. `print` shows the numbers in a table.

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
    rankme: float = field(metadata=_logged("higher"))
    """how many directions the embeddings fill evenly, from 1 to the smaller of items and dim; larger is less collapsed. A
    mean far from the origin lowers it"""
    effective_rank: float = field(metadata=_logged("higher"))
    """the same of the covariance, which does not see the mean"""
    spectral_decay: float = field(metadata=_logged())
    """how fast the eigenvalues of the covariance fall: near 1 they fall slowly, far above few directions hold all"""
    spread: float
    """length of the deviations from the mean relative to that of the embeddings, from 0 to 1; below 1e-6 all are equal but
    for rounding"""
    uniformity: float = field(metadata=_logged("lower"))
    """at most 0, and at least about -4; lower is more evenly spread over the sphere. Of all pairs of up to 1,024 items,
    else of all pairs of 1,024 drawn whatever their order"""
    uniformity_interval: Interval
    """95 % interval of the uniformity of all pairs; without width where they are all taken"""
    classes: int | None = None
    """classes with two items and more, which the next three numbers are of; None without labels"""
    nc1: float = field(default=math.nan, metadata=_logged("lower", "labels"))
    """scatter within classes in units of that between them, at least 0; smaller is more collapsed onto the class means"""
    cdnv: float = field(default=math.nan, metadata=_logged("lower", "labels"))
    """variance of two classes over the squared distance of their means, at least 0; smaller is easier for a classifier
    by the nearest class mean"""
    alignment: float = field(default=math.nan, metadata=_logged("lower", "labels"))
    """mean squared distance of two items of a class as unit vectors, from 0 to 4; smaller is closer"""
    hubness: float = field(default=math.nan, metadata=_logged("lower", "neighbours"))
    """skewness of how often an item is among the k nearest of others: 0 where all are alike; some are hubs above about 1"""
    antihubs: float = field(default=math.nan, metadata=_logged("lower", "neighbours"))
    """share of items that are nobody's neighbour"""
    hubs: tuple[tuple[int, float], ...] = ()
    """index of the five largest hubs, and how often each is a neighbour; k on average"""
    intrinsic_dimension: float = field(default=math.nan, metadata=_logged(needs="neighbours"))
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
        """A sentence on the collapse, with the number that shows it; None if there is none (see `collapse_of`)."""
        return collapse_of(self.items, self.dim, self.classes, self.rankme, self.effective_rank, self.spread)

    def __str__(self) -> str:
        """Return a table with a number a line, and the notes."""
        head = f"{counted(self.items, 'item')}, {counted(self.dim, 'dimension')}"
        if self.classes is not None:
            head += f", {self.classes:,} classes with two items and more"
        lines = [head, *(f"{name:<20} {value:10.4g}" for name, value in self.metrics().items())]
        if self.hubs:
            hubs = ", ".join(f"{item} ({number:g})" for item, number in self.hubs)
            lines.append(f"largest hubs         {hubs}")
        if self.collapse is not None:
            lines.append(self.collapse)
        return "\n".join([*lines, *self.notes])

    def __repr__(self) -> str:
        return str(self)


def names_of(*, labels: bool, k: int | None) -> list[str]:
    """Return the names of the numbers that there are, with or without labels, with or without neighbours."""
    absent = set()
    if not labels:
        absent.add("labels")
    if k is None:
        absent.add("neighbours")
    return [name for name, logged in _logged_numbers().items() if logged.needs not in absent]


def better_values() -> dict[str, Literal["higher", "lower"] | None]:
    """Return name of a number -> which of its values are better; None where neither are."""
    return {name: logged.better for name, logged in _logged_numbers().items()}


def _logged_numbers() -> dict[str, _Logged]:
    """Return name -> how it is logged, for each number of `EmbeddingHealth`."""
    return {number.name: number.metadata["logged"] for number in fields(EmbeddingHealth) if "logged" in number.metadata}


def collapse_of(
    items: int, dim: int, classes: int | None, rankme: float, effective_rank: float, spread: float
) -> str | None:
    """Return a sentence on an embedding that has collapsed to a point or to few directions; None if it has not.

    A point: items differ by the rounding of float32 alone. Few directions: both RankMe and the effective rank are below 5,
    though there are many dimensions and items. A mean far from the origin lowers the first alone, and outliers the second.
    Embeddings of up to 10 classes are not judged, since each class may well lie in one direction.
    """
    if items > 1 and spread < ROUNDING:
        return (
            f"The embedding has collapsed to a point: {counted(items, 'item')} differ by {spread:.1e} of their length, "
            "which is rounding."
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
    ids: Any | None = None,
    k: int | None = 10,
    normalize: bool = False,
    share: Share = EVERYTHING,
) -> EmbeddingHealth:
    """Compute numbers that show the health of an embedding without a ranking (see the module docstring). Collective.

    The numbers do not depend on the order of the items. The number of processes changes their last digits alone. All but
    the neighbours take one matrix of (dim, dim) beyond the embeddings.

    Args:
        embeddings: (items, dim) finite floating-point rows of any scale, or `Shards`, whose rows are all loaded.
        labels: (items,) integers or strings; without them there are no `nc1`, `cdnv` and `alignment`.
        ids: (items,) identity of each item, where some come several times: the first of each id is counted.
        k: Neighbours of the hubness, at least 2, by their Euclidean distance; items as near as the last of them share the
            count that remains. None leaves out what needs neighbours, which takes most of the time and, with several
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
        share.refuse_other_settings(_CALL, {"k": k, "normalize": normalize})
        items = read_items(_CALL, embeddings, None, {"query_labels": labels, "query_ids": ids}, share=share).queries
        rows = as_one_tensor(items.rows)
        codes = items.of_rows("labels") if "labels" in items.columns else None
        moments, class_moments = _moments_of_all(rows, codes, processes, normalize=normalize)
        if normalize:
            rows = unit_rows(rows.double()).to(rows.dtype)
        dim = len(moments.mean)
        findings = [_from_moments(moments)]
        if class_moments is not None:
            findings.append(_from_classes(moments, class_moments))
        findings.append(_from_pairs(rows, moments.count, processes))
        if k is not None:
            findings.append(_from_neighbours(replace(items, rows=rows), processes, k))
    fields: dict[str, Any] = {}
    for finding in findings:
        fields |= finding.fields
    notes = tuple(note for finding in findings for note in finding.notes)
    return EmbeddingHealth(items=moments.count, dim=dim, k=k, notes=notes, **fields)


# ----------------------------------------------------------------------------------------------------------------- moments


class _MomentsOfClasses(NamedTuple):
    """The moments of each class, of the items and of the items as unit vectors."""

    items: ClassMoments
    unit_vectors: ClassMoments


def _moments_of_all(
    rows: Tensor, codes: Tensor | None, processes: Processes, *, normalize: bool
) -> tuple[Moments, _MomentsOfClasses | None]:
    """Return the moments of the items of all processes, and of each class if there are labels. Collective."""
    # Float64 is scaled, since its squares may overflow; a power of two costs no digit.
    largest = float(rows.abs().max()) if rows.dtype == torch.float64 and rows.numel() else 0.0
    largest_of_all = max(processes.gather(largest))
    if largest_of_all > 2.0**1000:  # the length of a row may be infinite
        rows = rows * 2.0**-500
        largest_of_all *= 2.0**-500
    scale = 2.0 ** math.frexp(largest_of_all)[1]
    by_rank = processes.gather(_moments_here(rows, codes, scale, normalize=normalize))
    moments, of_items, of_unit_vectors = (_merged(moments_by_rank) for moments_by_rank in zip(*by_rank, strict=True))
    return moments, None if of_items is None else _MomentsOfClasses(of_items, of_unit_vectors)


def _moments_here(
    rows: Tensor, codes: Tensor | None, scale: float, *, normalize: bool
) -> tuple[Moments | None, ClassMoments | None, ClassMoments | None]:
    """Return the moments of the rows of this process, of each class, and of each class as unit vectors; None without rows.

    Args:
        rows: (items, dim).
        codes: (items,) the class of each item; None without labels, and without moments of classes.
        scale: Length that is taken as 1.
        normalize: Whether rows are scaled to length 1 instead.
    """
    if not len(rows):
        return None, None, None
    tiles = (unit_rows(tile.double()) if normalize else tile / scale for tile in rows.split(TILE))
    moments = reduce(Moments.merge, (Moments.of(tile) for tile in tiles))
    if codes is None:
        return moments, None, None
    lengths = torch.from_numpy(_scatter_kernel.lengths(rows.numpy()))
    of_unit_vectors = _class_moments(rows, codes, lengths)
    of_items = of_unit_vectors if normalize else _class_moments(rows, codes, torch.full_like(lengths, scale))
    return moments, of_items, of_unit_vectors


def _class_moments(
    rows: Float[Tensor, "items dim"], codes: Int[Tensor, "items"], lengths: Float[Tensor, "items"]
) -> ClassMoments:
    """Return the moments of each class of rows that are divided by some lengths, from one reading of the rows."""
    present, number, counts = codes.unique(return_inverse=True, return_counts=True)
    origin = number.sort(stable=True).indices[counts.cumsum(0) - counts]  # the first item of each class
    sums, squares = _scatter_kernel.class_sums(rows.numpy(), lengths.numpy(), number.numpy(), origin.numpy())
    offsets = torch.from_numpy(sums) / counts[:, None]
    # The origin is an item: what is subtracted is at most n times the remaining scatter, and its rounding n 2^-53 of it.
    scatter = (torch.from_numpy(squares) - counts * offsets.square().sum(dim=1)).clamp(min=0)
    origins = rows[origin].double() / lengths[origin, None]
    return ClassMoments(Labels(present.long()), counts, origins, offsets, scatter.sqrt())


def _merged(moments_by_rank: Sequence[Any]) -> Any:
    """Return the merged moments of the processes that have some; None for none."""
    present = [moments for moments in moments_by_rank if moments is not None]
    return reduce(lambda merged, moments: merged.merge(moments), present) if present else None


def _from_moments(moments: Moments) -> ReportFields:
    """Return the numbers that need neither labels nor neighbours, except the uniformity."""
    rankme = moments.rankme()
    effective_rank = moments.effective_rank()
    spectral_decay = moments.spectral_decay()
    notes = []
    if math.isnan(rankme):
        notes.append("rankme is NaN: all embeddings are zero.")
    if math.isnan(effective_rank):
        reason = "there is a single item" if moments.count == 1 else "all embeddings are equal"
        notes.append(f"effective_rank and spectral_decay are NaN: {reason}.")
    elif math.isnan(spectral_decay):
        notes.append(
            f"spectral_decay is NaN: the covariance has {counted(len(moments.eigenvalues), 'eigenvalue')} above rounding, "
            f"and the slope needs {DECAY[0] + FEWEST_EIGENVALUES - 1}."
        )
    fields = {"rankme": rankme, "effective_rank": effective_rank, "spectral_decay": spectral_decay}
    return ReportFields(fields | {"spread": moments.spread}, notes)


# ----------------------------------------------------------------------------------------------------------------- classes


def _from_classes(moments: Moments, class_moments: _MomentsOfClasses) -> ReportFields:
    """Return the numbers that compare items of one class, and classes with two items and more."""
    is_repeated = class_moments.items.counts > 1
    number = int(is_repeated.sum())
    if not number:
        return ReportFields({"classes": 0}, ["nc1, cdnv and alignment are NaN: no class has two items."])
    fields: dict[str, Any] = {"classes": number, "alignment": _alignment(class_moments.unit_vectors)}
    if number < 2:
        return ReportFields(
            fields,
            [
                "nc1 and cdnv are NaN: they compare classes, and one class has two items and more. alignment is of this "
                "class."
            ],
        )
    notes = []
    if number < len(is_repeated):
        notes.append(
            f"nc1, cdnv and alignment are of the {number:,} classes with two items and more; "
            f"{len(is_repeated) - number:,} have one."
        )
    counts = class_moments.items.counts.double()
    means = class_moments.items.means - moments.mean
    within = moments.scatter - _gram(means * counts.sqrt()[:, None])
    counts = counts[is_repeated]
    means = means[is_repeated]
    centred = means - (counts / counts.sum()) @ means
    nc1 = _nc1(within, counts, centred)
    if nc1 is None:
        notes.append("nc1 and cdnv are NaN: all classes have the same mean.")
        return ReportFields(fields, notes)
    rounding = (ROUNDING_OF_MEANS * float(moments.mean.norm())) ** 2
    cdnv = _distance_normalized_variance(centred, class_moments.items.scatter[is_repeated] / counts, rounding)
    if math.isnan(cdnv):
        notes.append("cdnv is NaN: two classes are one point, so that it divides 0 by 0.")
    if math.isinf(cdnv):
        notes.append("cdnv is infinite: two classes have the same mean.")
    return ReportFields(fields | {"nc1": nc1, "cdnv": cdnv}, notes)


def _alignment(unit_vectors: ClassMoments) -> float:
    """Return the mean squared distance of two items of a class, given the moments of unit vectors."""
    pairs = (unit_vectors.counts * (unit_vectors.counts - 1)).sum()
    return float(2 * (unit_vectors.counts * unit_vectors.scatter).sum() / pairs)


def _nc1(
    within: Float[Tensor, "dim dim"], counts: Float[Tensor, "classes"], centred: Float[Tensor, "classes dim"]
) -> float | None:
    """Return tr(S_W pinv(S_B)) / classes; None if all class means are equal but for rounding.

    Args:
        within: Scatter within the classes, summed over items.
        counts: Number of items of each class.
        centred: Mean of each class, less the mean of their items.
    """
    classes = len(counts)
    values, directions = torch.linalg.eigh(_gram(centred) / classes)
    is_positive = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    values = values[is_positive]
    directions = directions[:, is_positive]
    if not len(values):
        return None
    nc1 = float(((within @ directions) * directions).sum(dim=0).div(values).sum() / counts.sum() / classes)
    return max(0.0, nc1)  # where each class is a point, rounding may be negative


def _distance_normalized_variance(
    means: Float[Tensor, "classes dim"], variances: Float[Tensor, "classes"], rounding: float
) -> float:
    """Return the mean, over all ordered pairs of classes, of the variance of a class over their squared distance.

    Args:
        means: Mean of each class, less that of all items.
        variances: Mean squared distance of the items of each class to its mean.
        rounding: Squared distance that means may have by rounding alone, beside that of their own lengths.
    """
    total = 0.0
    blocks = torch.arange(len(means)).split(CLASSES_AT_ONCE)
    squares = means.square().sum(dim=1)
    for number, left in enumerate(blocks):
        for right in blocks[number:]:
            lengths = squares[left][:, None] + squares[right]
            distances = _squared_distances(means[left], means[right], lengths)
            distances.masked_fill_(distances <= rounding + ROUNDING_OF_MEANS**2 * lengths, 0.0)
            ratios = (variances[left][:, None] + variances[right]) / distances
            if right is left:
                ratios = ratios.triu(1)
            total += float(ratios.sum())
    return total / (len(means) * (len(means) - 1))


def _squared_distances(
    left: Float[Tensor, "left dim"], right: Float[Tensor, "right dim"], lengths: Float[Tensor, "left right"]
) -> Float[Tensor, "left right"]:
    """Return squared distances, given the sum of the squared lengths of each pair."""
    distances = torch.addmm(lengths, left, right.T, alpha=-2)
    # A small difference of two long means has lost its digits in the product.
    near = (distances <= NEAR * lengths).nonzero()
    for pairs in near.split(max(1, TILE * CLASSES_AT_ONCE // left.shape[1])):
        rows, columns = pairs.T
        distances[rows, columns] = (left[rows] - right[columns]).square().sum(dim=1)
    return distances


# -------------------------------------------------------------------------------------------------------------- uniformity


def _from_pairs(rows: Float[Tensor, "items dim"], items: int, processes: Processes) -> ReportFields:
    """Return the uniformity and its interval, from all pairs of the items or of a sample. Collective.

    Args:
        rows: Rows of this process.
        items: Number of items of all processes.
        processes: All processes.
    """
    unit_vectors = unit_rows(torch.cat(processes.gather(_sampled(rows, items, processes).double())))
    number = len(unit_vectors)
    if number < 2:
        fields = {"uniformity": math.nan, "uniformity_interval": UNKNOWN}
        return ReportFields(fields, ["uniformity is NaN: a single item has no pair."])
    lengths = unit_vectors.square().sum(dim=1)
    kernel = (
        (lengths[:, None] + lengths - 2 * unit_vectors @ unit_vectors.T)
        .clamp_(min=0)
        .mul_(-2)
        .exp_()
        .fill_diagonal_(0.0)
    )
    sum_of_item = kernel.sum(dim=1)
    total = sum_of_item.sum()
    uniformity = min(0.0, float((total / (number * (number - 1))).log()))
    reach = 0.0 if number == items else _reach_of_sample(sum_of_item, total, items)
    interval = Interval(uniformity - reach, uniformity + reach)
    return ReportFields({"uniformity": uniformity, "uniformity_interval": interval}, [])


def _sampled(rows: Float[Tensor, "items dim"], items: int, processes: Processes) -> Float[Tensor, "sampled dim"]:
    """Return the rows of this process in a random sample of all items, or all rows of a small set. Collective.

    The sample does not depend on the order of the items: it is drawn from an order that the bits of the rows decide.
    """
    if items <= SAMPLE:
        return rows
    keys = processes.gather(_keys(rows))
    first = sum(len(keys_of_rank) for keys_of_rank in keys[: processes.rank])
    drawn = torch.randperm(items, generator=torch.Generator().manual_seed(0))[:SAMPLE]
    number = torch.cat(keys).argsort(stable=True)[drawn] - first
    return rows[number[(number >= 0) & (number < len(rows))].sort().values]


def _keys(rows: Float[Tensor, "items dim"]) -> Int[Tensor, "items"]:
    """Return a hash of the bits of each row."""
    bits = rows.view(torch.int32 if rows.dtype == torch.float32 else torch.int64)
    factors = torch.randint(2**31 - 1, (rows.shape[1],), generator=torch.Generator().manual_seed(1)).to(bits.dtype)
    sums = [(tile * factors).sum(dim=1) for tile in bits.split(TILE)]  # an overflow wraps around
    return torch.cat(sums) * 0x5851F42D4C957F2D  # rows that differ in few bits get keys far apart


def _reach_of_sample(sum_of_item: Float[Tensor, "sample"], total: Float[Tensor, ""], items: int) -> float:
    """Return half the width of the 95 % interval of the uniformity of all pairs: a jackknife over the sampled items.

    Args:
        sum_of_item: Sum of the kernel over the pairs of each sampled item.
        total: Sum over all items.
        items: Number of all items, from which the sample was drawn without repetition.
    """
    number = len(sum_of_item)
    without_item = ((total - 2 * sum_of_item) / ((number - 1) * (number - 2))).log()
    deviations = float((without_item - without_item.mean()).square().sum())
    variance = deviations * (number - 1) / number * (1 - number / items)
    return normal_quantile(0.95) * math.sqrt(variance)


# -------------------------------------------------------------------------------------------------------------- neighbours


def _from_neighbours(items: Items, processes: Processes, k: int) -> ReportFields:
    """Return hubness and intrinsic dimension, from one search among the distinct rows. Collective.

    Args:
        items: The items, with the rows that are compared.
        processes: All processes.
        k: Number of neighbours.
    """
    if items.length <= k:
        note = (
            f"hubness, antihubs and intrinsic_dimension are NaN: {counted(k, 'neighbour')} need more than "
            f"{counted(items.length, 'item')}. Pass k of at most the number of other items."
        )
        return ReportFields({}, [note])
    counts = _search_neighbours(_rows_of_all(items, processes), processes, k)
    notes = []
    dimension = _intrinsic_dimension(counts.log_ratios)
    if math.isnan(dimension):
        notes.append(
            "intrinsic_dimension is NaN: no item has two nearest neighbours at different distances other than 0."
        )
    hubness = _skewness(counts.times_named)
    if math.isnan(hubness):
        notes.append("hubness is NaN: all items are neighbours equally often.")
    # Counts are sums of fractions. Those that differ by rounding are equal, and the first item comes first.
    largest = counts.times_named.round(decimals=9).argsort(descending=True, stable=True)[:SHOWN_HUBS]
    hubs = zip(items.to_origins(largest).tolist(), counts.times_named[largest].tolist(), strict=True)
    fields = {
        "duplicates": counts.duplicates,
        "intrinsic_dimension": dimension,
        "antihubs": float((counts.times_named == 0).double().mean()),
        "hubs": tuple(hubs),
        "hubness": hubness,
    }
    return ReportFields(fields, notes)


def _rows_of_all(items: Items, processes: Processes) -> Float[Tensor, "all_items dim"]:
    """Return the rows of all processes, in the order of their places. Collective."""
    by_rank = processes.gather((as_one_tensor(items.rows), items.places))
    rows_of_all = torch.cat([rows for rows, _ in by_rank]) + 0.0  # so that -0.0 equals 0.0 bit for bit
    return rows_of_all[torch.cat([places for _, places in by_rank]).argsort()]


class _NeighbourCounts(NamedTuple):
    """What a search of the neighbours of all items has found."""

    times_named: Float[Tensor, "items"]
    """how often each item is among the k nearest of others"""
    log_ratios: list[float]
    """log of the second over the first distance of each item without an equal item"""
    duplicates: int
    """number of items with an equal item"""


def _search_neighbours(rows: Float[Tensor, "items dim"], processes: Processes, k: int) -> _NeighbourCounts:
    """Return how often each item is a neighbour. Each process searches for its share of the distinct rows. Collective."""
    number = len(rows)
    items = Items(rows, torch.arange(number), number, {"labels": torch.zeros(number, dtype=torch.int64)})
    sets = ItemSets(items, items, torch.arange(number), "euclidean", ALONE, memory_bytes(_CALL, None))
    search = NeighbourSearch.of(sets.hashed())
    first = search.rows.first_items
    row_of_item = search.rows.row_of_item
    copies = np.bincount(row_of_item)
    log_ratios: list[float] = []
    with computing() as threads:
        rows_here = np.arange(processes.rank, len(first), processes.count)
        times_named = np.zeros(len(first))
        for positions, votes in search.votes(threads, first[rows_here], k) if len(rows_here) else ():
            [portion] = votes.portions([k])
            copies_of_query = copies[rows_here[positions]]
            times_named += np.bincount(votes.row, portion * votes.items * copies_of_query[votes.query], len(first))
            log_ratios += _log_ratios(votes, copies_of_query)
    by_rank = processes.gather((times_named, log_ratios))
    # Equal items share the count of their row.
    times_named_of_item = sum(times_of_rank for times_of_rank, _ in by_rank) / copies
    return _NeighbourCounts(
        times_named=torch.from_numpy(times_named_of_item[row_of_item]),
        log_ratios=[ratio for _, ratios_of_rank in by_rank for ratio in ratios_of_rank],
        duplicates=int((copies[row_of_item] > 1).sum()),
    )


def _log_ratios(votes: Votes, copies: Int[np.ndarray, "queries"]) -> list[float]:
    """Return the logs of the second over the first distance, for queries without an equal item.

    Args:
        votes: The neighbours of some queries.
        copies: Number of items that equal each query, itself included.
    """
    nearest = np.flatnonzero(votes.begins)[copies == 1]
    following = np.minimum(nearest + 1, len(votes.score) - 1)
    # Where several items share the nearest row, the second neighbour is as near as the first.
    second = np.where(votes.items[nearest] > 1, nearest, following)
    ratios: list[float] = np.log(votes.score[second] / votes.score[nearest]).tolist()
    return ratios


def _intrinsic_dimension(log_ratios: list[float]) -> float:
    """Return the dimension by TwoNN; NaN if there is a single ratio, or if all distances are equal."""
    total = math.fsum(log_ratios)
    return (len(log_ratios) - 1) / total if len(log_ratios) > 1 and total > 0 else math.nan


def _skewness(values: Float[Tensor, "items"]) -> float:
    """Return the skewness of some values; NaN if all are equal but for rounding."""
    deviations = values - values.mean()
    variance = float(deviations.square().mean())
    return float(deviations.pow(3).mean()) / variance**1.5 if variance > LEAST_VARIANCE else math.nan
