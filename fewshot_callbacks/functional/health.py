"""The health of an embedding without a ranking: collapse, number of used directions, class geometry and hubs.

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

`uniformity` is computed from the pairs of a sample. `hubness` and `intrinsic_dimension` are computed from one neighbour
search. All other numbers are computed from moments, which can be merged over disjoint sets in any order.

To add a number, add a field with `_logged` to `EmbeddingHealth`, and compute it in a function of `_health_numbers.py`. The
printed table and the keys of the monitor follow. Two tables are written by hand: the table above, and the table of
`docs/metrics/index.md`.
"""  # noqa: E501 - a table

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._health_numbers import (
    CALL,
    numbers_from_classes,
    numbers_from_moments,
    numbers_from_neighbours,
    numbers_from_pairs,
)
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional.discriminant_ratio import unit_rows
from fewshot_callbacks.functional.item_reader import read_items
from fewshot_callbacks.functional.items import EVERYTHING, Share
from fewshot_callbacks.functional.moments import moments_of_all
from fewshot_callbacks.functional.neighbours import positive_whole
from fewshot_callbacks.functional.statistics import Interval
from fewshot_callbacks.storage.stored_rows import as_one_tensor
from fewshot_callbacks.system.words import counted

# Vectors that differ by less than this share of their length only differ by the rounding of float32.
ROUNDING = 1e-6
# A rank below this is a collapse. In docs/research/embedding_health_study.md, all networks that collapsed ended below it,
# and no other network did.
FEWEST_DIRECTIONS = 5
# With fewer dimensions or items, a collapse to few directions is not judged.
FEWEST_TO_JUDGE = 50


class _Logged(NamedTuple):
    """How a monitor logs a number of `EmbeddingHealth`."""

    better: Literal["higher", "lower"] | None
    needs: Literal["labels", "neighbours"] | None


def _logged(
    better: Literal["higher", "lower"] | None = None, needs: Literal["labels", "neighbours"] | None = None
) -> dict[str, _Logged]:
    """Return the metadata of a field that a monitor logs.

    `better` is None if neither direction is better. `needs` is what the number needs in addition to embeddings.
    """
    return {"logged": _Logged(better, needs)}


@equal_with_nan
@dataclass(frozen=True)
class EmbeddingHealth:
    """The result of `embedding_health`; `print` shows a table.

    A number is NaN if it cannot be computed, and `notes` gives the reason. The module docstring has the definitions.

    Attributes:
        items: Number of items.
        dim: Number of dimensions.
        k: Number of neighbours in the search; None without a search.
        rankme: Number of directions that the embeddings fill evenly, from 1 to min(items, dim). Larger means less
            collapsed. A mean far from the origin lowers it.
        effective_rank: The same number for the covariance, so the mean does not lower it.
        spectral_decay: Speed at which the eigenvalues of the covariance fall. Near 1 they fall slowly. Far above 1, few
            directions contain almost all variance.
        spread: Length of the deviations from the mean relative to the length of the embeddings, from 0 to 1. Below
            1e-6, all embeddings are equal up to rounding.
        uniformity: From about -4 to 0; lower means more evenly spread over the sphere. All pairs of up to 1,024 items,
            or all pairs of a random sample of 1,024 items that does not depend on their order.
        uniformity_interval: 95 % interval of the uniformity of all pairs. Its width is 0 if all pairs were taken.
        classes: Number of classes with at least two items, used for `nc1`, `cdnv` and `alignment`; None without labels.
        nc1: Scatter within classes relative to the scatter between classes, at least 0. Smaller means that items are
            closer to their class mean.
        cdnv: Variance of two classes over the squared distance of their means, at least 0. Smaller is easier for a
            nearest-class-mean classifier.
        alignment: Mean squared distance of two items of a class as unit vectors, from 0 to 4. Smaller means closer.
        hubness: Skewness of the number of times that an item is among the k nearest neighbours of other items. 0 if
            there are no hubs; above about 1, some items are hubs.
        antihubs: Share of items that are not a neighbour of any item.
        hubs: Index of the five largest hubs, and how often each is a neighbour. The average over all items is k.
        intrinsic_dimension: Dimension of the manifold that the items are on, estimated from their two nearest
            neighbours.
        duplicates: Number of items that equal another item. They are left out of the intrinsic dimension. None without
            neighbours.
        notes: Reasons for each NaN.

    Examples:
        >>> import torch
        >>> health = embedding_health(torch.eye(4).repeat(3, 1), torch.arange(12) % 4, k=2)
        >>> round(health.rankme, 3), health.alignment, health.duplicates
        (4.0, 0.0, 12)
    """

    items: int
    dim: int
    k: int | None
    rankme: float = field(metadata=_logged("higher"))
    effective_rank: float = field(metadata=_logged("higher"))
    spectral_decay: float = field(metadata=_logged())
    spread: float
    uniformity: float = field(metadata=_logged("lower"))
    uniformity_interval: Interval
    classes: int | None = None
    nc1: float = field(default=math.nan, metadata=_logged("lower", "labels"))
    cdnv: float = field(default=math.nan, metadata=_logged("lower", "labels"))
    alignment: float = field(default=math.nan, metadata=_logged("lower", "labels"))
    hubness: float = field(default=math.nan, metadata=_logged("lower", "neighbours"))
    antihubs: float = field(default=math.nan, metadata=_logged("lower", "neighbours"))
    hubs: tuple[tuple[int, float], ...] = ()
    intrinsic_dimension: float = field(default=math.nan, metadata=_logged(needs="neighbours"))
    duplicates: int | None = None
    notes: tuple[str, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the numbers by the names that a monitor logs."""
        return {name: getattr(self, name) for name in names_of(labels=self.classes is not None, k=self.k)}

    @property
    def collapse(self) -> str | None:
        """A sentence on the collapse, with its numbers; None if the embedding has not collapsed (see `collapse_of`)."""
        return collapse_of(self.items, self.dim, self.classes, self.rankme, self.effective_rank, self.spread)

    def __str__(self) -> str:
        """Return a table with one line per number, and the notes."""
        head = f"{counted(self.items, 'item')}, {counted(self.dim, 'dimension')}"
        if self.classes is not None:
            head += f", {self.classes:,} classes with at least two items"
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
    """Return the names of the numbers that exist with or without labels, and with or without neighbours."""
    absent = set()
    if not labels:
        absent.add("labels")
    if k is None:
        absent.add("neighbours")
    return [name for name, logged in _logged_numbers().items() if logged.needs not in absent]


def better_values() -> dict[str, Literal["higher", "lower"] | None]:
    """Return name of a number -> which of its values are better; None if neither are."""
    return {name: logged.better for name, logged in _logged_numbers().items()}


def _logged_numbers() -> dict[str, _Logged]:
    """Return name -> how it is logged, for each logged number of `EmbeddingHealth`."""
    return {number.name: number.metadata["logged"] for number in fields(EmbeddingHealth) if "logged" in number.metadata}


def collapse_of(
    items: int, dim: int, classes: int | None, rankme: float, effective_rank: float, spread: float
) -> str | None:
    """Return a sentence if an embedding has collapsed to a point or to few directions; None if it has not.

    In a collapse to a point, items only differ by the rounding of float32. In a collapse to few directions, RankMe and the
    effective rank are both below 5, although there are at least 50 dimensions and items. Both must be low, because a mean
    far from the origin lowers RankMe, and outliers lower the effective rank. With up to 10 classes this is not judged,
    because a good embedding may use one direction per class.
    """
    if items > 1 and spread < ROUNDING:
        return (
            f"The embedding has collapsed to a point: {counted(items, 'item')} differ by {spread:.1e} of their length, "
            "which is only rounding."
        )
    is_judged = min(items, dim) >= FEWEST_TO_JUDGE and (classes is None or classes > 2 * FEWEST_DIRECTIONS)
    if is_judged and max(rankme, effective_rank) < FEWEST_DIRECTIONS:
        return (
            f"The embedding has collapsed to few directions: RankMe is {rankme:.2f} and the effective rank is "
            f"{effective_rank:.2f}, of at most {min(items, dim)}."
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
    """Return numbers on the health of an embedding: collapse, used directions, class geometry and hubs. *Collective*.

    The module docstring has the definitions and their sources. The order of the items does not change the numbers. The
    number of processes only changes their last digits. Except for the neighbour search, the memory is one (dim, dim) matrix
    in addition to the embeddings.

    Args:
        embeddings: (items, dim) finite floating-point rows of any scale, or `Shards`. All rows of `Shards` are loaded.
        labels: (items,) integers or strings, for `nc1`, `cdnv` and `alignment`.
        ids: (items,) id of each item, if some items are repeated. Only the first item of each id counts.
        k: Number of neighbours for the hubness, at least 2, by Euclidean distance. Items that tie with the last neighbour
            share its count. With None, there is no neighbour search. The search takes most of the time, and with several
            processes it needs all embeddings in each process.
        normalize: Scale each embedding to length 1 first. The neighbours are then the cosine neighbours.
        share: The part of the items that this process has; see `Share`.

    Raises:
        ValueError: If embeddings are not a finite (items, dim) matrix with at least one item, the number of labels differs
            from the number of items, k is below 2, or the processes pass different arguments. Every process raises the
            same error.

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
            k = positive_whole(CALL, "k", k, "Pass the number of neighbours, such as 10, or None.", least=2)
        share.refuse_other_settings(CALL, {"k": k, "normalize": normalize})
        items = read_items(CALL, embeddings, None, {"query_labels": labels, "query_ids": ids}, share=share).queries
        rows = as_one_tensor(items.rows)
        codes = items.of_rows("labels") if "labels" in items.columns else None
        moments, class_moments = moments_of_all(rows, codes, processes, normalize=normalize)
        if normalize:
            rows = unit_rows(rows.double()).to(rows.dtype)
        dim = len(moments.mean)
        findings = [numbers_from_moments(moments)]
        if class_moments is not None:
            findings.append(numbers_from_classes(moments, class_moments))
        findings.append(numbers_from_pairs(rows, moments.count, processes))
        if k is not None:
            findings.append(numbers_from_neighbours(replace(items, rows=rows), processes, k))
    fields: dict[str, Any] = {}
    for finding in findings:
        fields |= finding.fields
    notes = tuple(note for finding in findings for note in finding.notes)
    return EmbeddingHealth(items=moments.count, dim=dim, k=k, notes=notes, **fields)
