"""The numbers of `embedding_health`, from moments, classes, pairs and neighbours."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.functional._notes import ReportFields
from fewshot_callbacks.functional.discriminant_ratio import ClassMoments, unit_rows
from fewshot_callbacks.functional.items import Items, ItemSets
from fewshot_callbacks.functional.knn import NeighbourSearch, Votes
from fewshot_callbacks.functional.moments import DECAY, FEWEST_EIGENVALUES, TILE, Moments, MomentsOfClasses, gram
from fewshot_callbacks.functional.retrieval.settings import memory_bytes
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval, normal_quantile
from fewshot_callbacks.storage.stored_rows import as_one_tensor
from fewshot_callbacks.system.words import counted

CALL = "embedding_health"
# Class means per block when all pairs of class means are compared.
CLASSES_AT_ONCE = 512
# Size of the sample for the uniformity of a larger set: half a million pairs in 8 MB.
SAMPLE = 1024
# Number of hubs in a report.
SHOWN_HUBS = 5
# A variance below this is rounding.
LEAST_VARIANCE = 1e-20
# Squared distances below this share of the squared lengths are computed from differences, not from products.
NEAR = 1e-6
# Class means that differ by less than this share of their length may only differ by the rounding of float64.
ROUNDING_OF_MEANS = 1e-14


def numbers_from_moments(moments: Moments) -> ReportFields:
    """Return the numbers that need neither labels nor neighbours, without the uniformity."""
    rankme = moments.rankme()
    effective_rank = moments.effective_rank()
    spectral_decay = moments.spectral_decay()
    notes = []
    if math.isnan(rankme):
        notes.append("rankme is NaN, because all embeddings are zero.")
    if math.isnan(effective_rank):
        reason = "there is only one item" if moments.count == 1 else "all embeddings are equal"
        notes.append(f"effective_rank and spectral_decay are NaN, because {reason}.")
    elif math.isnan(spectral_decay):
        notes.append(
            f"spectral_decay is NaN, because the covariance has {counted(len(moments.eigenvalues), 'eigenvalue')} above "
            f"rounding, but the slope needs {DECAY[0] + FEWEST_EIGENVALUES - 1}."
        )
    fields = {"rankme": rankme, "effective_rank": effective_rank, "spectral_decay": spectral_decay}
    return ReportFields(fields | {"spread": moments.spread}, notes)


def numbers_from_classes(moments: Moments, class_moments: MomentsOfClasses) -> ReportFields:
    """Return the numbers on classes with at least two items."""
    is_repeated = class_moments.items.counts > 1
    number = int(is_repeated.sum())
    if not number:
        return ReportFields({"classes": 0}, ["nc1, cdnv and alignment are NaN, because no class has two items."])
    fields: dict[str, Any] = {"classes": number, "alignment": _alignment(class_moments.unit_vectors)}
    if number < 2:
        return ReportFields(
            fields,
            [
                "nc1 and cdnv are NaN, because they compare classes and only one class has at least two items. alignment is "
                "the value of this class."
            ],
        )
    notes = []
    if number < len(is_repeated):
        notes.append(
            f"nc1, cdnv and alignment use the {number:,} classes with at least two items; "
            f"{len(is_repeated) - number:,} have only one."
        )
    counts = class_moments.items.counts.double()
    means = class_moments.items.means - moments.mean
    within = moments.scatter - gram(means * counts.sqrt()[:, None])
    counts = counts[is_repeated]
    means = means[is_repeated]
    centred = means - (counts / counts.sum()) @ means
    nc1 = _nc1(within, counts, centred)
    if nc1 is None:
        notes.append("nc1 and cdnv are NaN, because all classes have the same mean.")
        return ReportFields(fields, notes)
    rounding = (ROUNDING_OF_MEANS * float(moments.mean.norm())) ** 2
    cdnv = _distance_normalized_variance(centred, class_moments.items.scatter[is_repeated] / counts, rounding)
    if math.isnan(cdnv):
        notes.append("cdnv is NaN, because all items of two classes are equal, so that it divides 0 by 0.")
    if math.isinf(cdnv):
        notes.append("cdnv is infinite, because two classes have the same mean.")
    return ReportFields(fields | {"nc1": nc1, "cdnv": cdnv}, notes)


def _alignment(unit_vectors: ClassMoments) -> float:
    """Return the mean squared distance of two items of a class, given the moments of unit vectors."""
    pairs = (unit_vectors.counts * (unit_vectors.counts - 1)).sum()
    return float(2 * (unit_vectors.counts * unit_vectors.scatter).sum() / pairs)


def _nc1(
    within: Float[Tensor, "dim dim"], counts: Float[Tensor, "classes"], centred: Float[Tensor, "classes dim"]
) -> float | None:
    """Return tr(S_W pinv(S_B)) / classes; None if all class means are equal up to rounding.

    `within` is the scatter within the classes, summed over items. `centred` has the class means minus the overall mean.
    """
    classes = len(counts)
    values, directions = torch.linalg.eigh(gram(centred) / classes)
    is_positive = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
    values = values[is_positive]
    directions = directions[:, is_positive]
    if not len(values):
        return None
    nc1 = float(((within @ directions) * directions).sum(dim=0).div(values).sum() / counts.sum() / classes)
    return max(0.0, nc1)  # rounding may make it negative if each class is a point


def _distance_normalized_variance(
    means: Float[Tensor, "classes dim"], variances: Float[Tensor, "classes"], rounding: float
) -> float:
    """Return the mean over ordered pairs of classes of the variance of the first over their squared distance.

    `means` are relative to the overall mean. `variances` are mean squared distances of items to their class mean.
    `rounding` is the squared distance that rounding of the overall mean may cause.
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
    """Return squared distances, given the sum of the squared lengths per pair."""
    distances = torch.addmm(lengths, left, right.T, alpha=-2)
    # If two long means are close, the product has lost the digits of their difference.
    near = (distances <= NEAR * lengths).nonzero()
    for pairs in near.split(max(1, TILE * CLASSES_AT_ONCE // left.shape[1])):
        rows, columns = pairs.T
        distances[rows, columns] = (left[rows] - right[columns]).square().sum(dim=1)
    return distances


def numbers_from_pairs(rows: Float[Tensor, "items dim"], items: int, processes: Processes) -> ReportFields:
    """Return the uniformity and its interval, from all pairs of items or of a sample. *Collective*.

    `items` is the number of items of all processes.
    """
    unit_vectors = unit_rows(torch.cat(processes.gather(_sampled(rows, items, processes).double())))
    number = len(unit_vectors)
    if number < 2:
        fields = {"uniformity": math.nan, "uniformity_interval": UNKNOWN}
        return ReportFields(fields, ["uniformity is NaN, because a single item has no pair."])
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
    """Return the rows of this process in a random sample of all items, or all rows of a small set. *Collective*.

    The sample does not depend on the order of the items, because it is drawn from the rows ordered by a hash of their bits.
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
    return torch.cat(sums) * 0x5851F42D4C957F2D  # spreads the keys of similar rows


def _reach_of_sample(sum_of_item: Float[Tensor, "sample"], total: Float[Tensor, ""], items: int) -> float:
    """Return half the width of the 95 % interval of the uniformity of all pairs, by a jackknife over the sampled items.

    `sum_of_item` has the sum of the kernel over the pairs of each sampled item. The sample was drawn from `items` items
    without replacement.
    """
    number = len(sum_of_item)
    without_item = ((total - 2 * sum_of_item) / ((number - 1) * (number - 2))).log()
    deviations = float((without_item - without_item.mean()).square().sum())
    variance = deviations * (number - 1) / number * (1 - number / items)
    return normal_quantile(0.95) * math.sqrt(variance)


def numbers_from_neighbours(items: Items, processes: Processes, k: int) -> ReportFields:
    """Return hubness and intrinsic dimension, from one k-neighbour search among the distinct rows. *Collective*."""
    if items.length <= k:
        note = (
            f"hubness, antihubs and intrinsic_dimension are NaN, because {counted(k, 'neighbour')} need more than "
            f"{counted(items.length, 'item')}. Pass a k that is smaller than the number of items."
        )
        return ReportFields({}, [note])
    counts = _search_neighbours(_rows_of_all(items, processes), processes, k)
    notes = []
    dimension = _intrinsic_dimension(counts.log_ratios)
    if math.isnan(dimension):
        notes.append(
            "intrinsic_dimension is NaN, because no item has two nearest neighbours at different non-zero distances."
        )
    hubness = _skewness(counts.times_named)
    if math.isnan(hubness):
        notes.append("hubness is NaN, because all items are neighbours equally often.")
    # Counts are sums of fractions. Rounding them makes equal counts equal, so that the first item comes first.
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
    """Return the rows of all processes, in the order of their places. *Collective*."""
    by_rank = processes.gather((as_one_tensor(items.rows), items.places))
    rows_of_all = torch.cat([rows for rows, _ in by_rank]) + 0.0  # so that -0.0 equals 0.0 bit for bit
    return rows_of_all[torch.cat([places for _, places in by_rank]).argsort()]


class _NeighbourCounts(NamedTuple):
    """The result of a neighbour search for all items."""

    times_named: Float[Tensor, "items"]
    """how often each item is among the k nearest neighbours of other items"""
    log_ratios: list[float]
    """log of the ratio of the second to the first distance, for each item without an equal item"""
    duplicates: int
    """number of items with an equal item"""


def _search_neighbours(rows: Float[Tensor, "items dim"], processes: Processes, k: int) -> _NeighbourCounts:
    """Return how often each item is a neighbour; each process searches for a part of the distinct rows. *Collective*."""
    number = len(rows)
    items = Items(rows, torch.arange(number), number, {"labels": torch.zeros(number, dtype=torch.int64)})
    sets = ItemSets(items, items, torch.arange(number), "euclidean", ALONE, memory_bytes(CALL, None))
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
    """Return the logs of the ratio of the second to the first distance, for queries without an equal item.

    `copies` is the number of items that equal each query, including itself.
    """
    nearest = np.flatnonzero(votes.begins)[copies == 1]
    following = np.minimum(nearest + 1, len(votes.score) - 1)
    # If several items share the nearest row, the second neighbour is as near as the first.
    second = np.where(votes.items[nearest] > 1, nearest, following)
    ratios: list[float] = np.log(votes.score[second] / votes.score[nearest]).tolist()
    return ratios


def _intrinsic_dimension(log_ratios: list[float]) -> float:
    """Return the dimension by TwoNN; NaN if there is only one ratio, or if all distances are equal."""
    total = math.fsum(log_ratios)
    return (len(log_ratios) - 1) / total if len(log_ratios) > 1 and total > 0 else math.nan


def _skewness(values: Float[Tensor, "items"]) -> float:
    """Return the skewness of values; NaN if they are equal up to rounding."""
    deviations = values - values.mean()
    variance = float(deviations.square().mean())
    return float(deviations.pow(3).mean()) / variance**1.5 if variance > LEAST_VARIANCE else math.nan
