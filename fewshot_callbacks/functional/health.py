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
Compute it in a function of `_health_numbers.py`. Two tables for readers are written by hand: the one above, and that
of `docs/metrics/index.md`.
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

# Where vectors differ by less than this share of their length, only float32's rounding is left of them.
ROUNDING = 1e-6
# Ranks below this are a collapse: on the glyphs of docs/research/embedding_health_study.md all networks that collapsed
# had fewer in the end, and no other had.
FEWEST_DIRECTIONS = 5
# An embedding of fewer dimensions or items is not judged.
FEWEST_TO_JUDGE = 50


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
