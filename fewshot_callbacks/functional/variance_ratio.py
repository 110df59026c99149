"""The variance ratio: variance between the classes of a population over variance within them, estimated from a sample.

J of noise is (k - 1) / (n - k) for k classes and n items, and J of a batch depends more on how the batch was drawn than
on the embedding. What can be compared between batches, samplers and sets is the ratio of the two variances themselves,
from the mean squares of a one-way analysis of variance (Searle, Casella and McCulloch, "Variance Components", 1992),
here of all dimensions together:

    MSB = Tr(S_B) / (k - 1),  MSW = Tr(S_W) / (n - k),  n0 = (n - sum_c n_c^2 / n) / (k - 1)
    ratio = (MSB - MSW) / (n0 MSW)

It is near 0 for noise and may be slightly negative. A class with one item counts in MSB and n0, not in MSW. Numerator and
denominator come from the sums that J is made of (see discriminant_ratio.py, which says how they are kept exact).

The interval of a set takes its classes as drawn from a population. It is a t interval from the jackknife over classes, on
the scale of log(1 + n0 ratio), which is log(MSB / MSW): J. N. Arvesen and T. H. Schmitz, "Robust procedures for variance
component problems using the jackknife", Biometrics 26, 1970; an F interval would hold for one normal dimension alone. Its
degrees of freedom are Satterthwaite's, as in statistics.py. `benchmarks/variance_ratio.py --coverage` measures it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._equality import equal_with_nan
from fewshot_callbacks.functional._jackknife import t_quantile
from fewshot_callbacks.functional.discriminant_ratio import (
    ClassMoments,
    ClassScatter,
    batch_ratios,
    estimated_ratio,
    read_batch,
    unit_rows,
)
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval, normal_quantile


def variance_ratio(embeddings: Any, labels: Any, *, normalize: bool = False) -> Float[Tensor, ""]:
    """Return an estimate of the variance between classes over that within them, on the device of the embeddings.

    The ratio is a property of the population that the items were drawn from, so that batches of any size, episodes and
    whole sets can be compared; they differ only in the uncertainty of the estimate. The call does not wait for the
    device. The module docstring gives the formula and its source.

    Args:
        embeddings: (items, dim), any floating dtype; computed in float64 (in float32 on MPS, which has no float64).
        labels: (items,) integers of any value, on the same device if they are a tensor, or strings.
        normalize: Scale each embedding to length 1 first.

    Returns:
        A scalar on the same device, without a gradient; larger means better separated classes. For noise it is 0 in
        expectation, and may be slightly negative by chance; it has no upper limit. NaN where it is undefined: fewer
        than two classes, no class with two items, or items that are equal within every class. float64 for float64
        embeddings, else float32.

    Raises:
        ValueError: If embeddings are not (items, dim) or labels are not one integer or string for each item. Values are
            not checked, since that would wait for the device; NaN or Inf in the embeddings makes the ratio NaN.

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[0.0, 0.0], [0.0, 2.0], [4.0, 0.0], [4.0, 2.0]])
        >>> round(variance_ratio(embeddings, torch.tensor([0, 0, 1, 1])).item(), 6)  # MSB = 16, MSW = 2, n0 = 2
        3.5
    """
    return batch_ratios(embeddings, labels, normalize=normalize, call="variance_ratio")[1]


@equal_with_nan
@dataclass(frozen=True)
class VarianceRatioEstimate:
    """The variance ratio of a set, with its confidence interval; the result of `variance_ratio_of_set`.

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[0.0], [2.0], [4.0], [6.0], [8.0], [9.0], [13.0], [15.0]])
        >>> found = variance_ratio_of_set(embeddings, torch.arange(8) // 2)
        >>> round(found.value, 2), round(found.interval.low, 2), round(found.interval.high, 2)
        (18.21, 1.27, 197.05)
    """

    value: float
    """the ratio; NaN where it is undefined"""
    interval: Interval
    """confidence interval of the ratio in the population of classes; NaN where it is unknown, as for fewer than three
    classes"""
    classes: int
    items: int
    undefined: str | None = None
    """the reason why the value is NaN; None where it is defined"""
    interval_undefined: str | None = None
    """the reason why the interval alone is NaN; None where it is known, or the value is NaN, too"""


def variance_ratio_of_set(
    embeddings: Any,
    labels: Any = None,
    *,
    normalize: bool = False,
    confidence: float = 0.95,
) -> VarianceRatioEstimate:
    """Return the variance ratio of a whole set, with its interval over the classes (see the module docstring).

    Args:
        embeddings: (items, dim), any floating dtype; or the `ClassMoments` or `ClassScatter` of a set, merged from
            batches or processes.
        labels: (items,) integers or strings; None if `embeddings` are moments.
        normalize: Scale each embedding to length 1 first; has no effect on moments.
        confidence: Confidence level of the interval, in (0, 1).

    Returns:
        The ratio and its interval, both NaN where they are undefined; `undefined` then gives the reason.

    Raises:
        ValueError: If embeddings are not (items, dim), labels are not one integer or string for each item, or
            `confidence` is not in (0, 1).

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[0.0], [2.0], [4.0], [6.0], [8.0], [9.0], [13.0], [15.0]])
        >>> found = variance_ratio_of_set(embeddings, torch.arange(8) // 2)
        >>> round(found.value, 2), found.undefined
        (18.21, None)
    """
    normal_quantile(confidence)
    if not isinstance(embeddings, ClassMoments | ClassScatter):
        if labels is None:
            raise InputError(
                "variance_ratio_of_set(embeddings) needs labels. Pass one integer or string for each embedding."
            )
        rows, item_labels = read_batch(embeddings, labels, "variance_ratio_of_set")
        embeddings = ClassMoments.of(unit_rows(rows.double()) if normalize else rows, item_labels)
    scatter = embeddings.class_scatter() if isinstance(embeddings, ClassMoments) else embeddings
    counts = scatter.counts
    classes = len(counts)
    items = int(counts.sum())
    undefined = _why_undefined(scatter)
    if undefined is not None:
        return VarianceRatioEstimate(math.nan, UNKNOWN, classes, items, undefined)
    scale = scatter.spread.max()  # above 0; in other units the squares may overflow
    between = counts * (scatter.distances / scale).square()
    within = (scatter.spread / scale).square()
    squares = counts.square()
    ratio = float(estimated_ratio(between.sum() / within.sum(), items, classes, squares.sum()))
    # Leaving out a class moves the centre away from it: the scatter loses n_c |mu_c - mu|^2 n / (n - n_c).
    remaining = items - counts
    traces_without = (between.sum() - between * items / remaining) / (within.sum() - within)
    ratios_without = estimated_ratio(traces_without, remaining, classes - 1, squares.sum() - squares)
    n0 = float((items - squares.sum() / items) / (classes - 1))
    interval = _jackknife_interval(ratio, ratios_without, counts / items, n0, confidence)
    reason = _why_interval_is_undefined(classes) if math.isnan(interval.low) else None
    return VarianceRatioEstimate(ratio, interval, classes, items, interval_undefined=reason)


def _why_undefined(scatter: ClassScatter) -> str | None:
    """Return the reason why the ratio of a set is undefined; None if it is defined."""
    classes = len(scatter.counts)
    lengths = torch.cat([scatter.distances, scatter.spread])
    fix = "Measure on a set of several classes, with several items of each."
    reasons = (
        ("The set is empty.", classes == 0),
        ("Some embeddings are not finite.", not bool(lengths.isfinite().all())),
        (f"Each of the {classes} classes has one item. {fix}", bool((scatter.counts == 1).all())),
        (f"The set has a single class. {fix}", classes == 1),
        ("All embeddings are equal: the model has collapsed.", bool((lengths == 0).all())),
        (
            "The items of each class are equal: there is no variance within to compare with.",
            bool((scatter.spread == 0).all()),
        ),
    )
    for reason, holds in reasons:
        if holds:
            return reason
    return None


def _why_interval_is_undefined(classes: int) -> str:
    """Return the reason why the interval of a ratio that is defined is NaN."""
    if classes < 3:
        return f"The interval is over classes and needs three; the set has {classes}."
    return (
        "The interval leaves out one class at a time. Either it makes no difference which, or the ratio of the others is "
        "undefined. Measure on a set of more classes, with several items of each."
    )


def _jackknife_interval(
    ratio: float,
    ratios_without: Float[Tensor, "classes"],
    shares: Float[Tensor, "classes"],
    n0: float,
    confidence: float,
) -> Interval:
    """Return the interval, a t interval on the scale of log(1 + n0 ratio).

    Args:
        ratio: The ratio of all classes.
        ratios_without: The ratio without each class.
        shares: Share of the items that each class has.
        n0: The effective number of items of a class (see the module docstring).
        confidence: Confidence level.
    """
    classes = len(ratios_without)
    logs = (n0 * ratios_without).log1p()
    if classes < 3 or not bool(logs.isfinite().all()):
        return UNKNOWN
    moves = logs - logs.mean()
    largest = float(moves.abs().max())
    if largest == 0:
        return UNKNOWN
    scaled = moves / largest  # otherwise fourth powers underflow
    second = float(scaled.square().sum())
    fourth = float(scaled.pow(4).sum())
    # at least 1, at most the effective number of classes minus one: see statistics.py
    freedom = max(1.0, min(1 / float(shares.square().sum()) - 1, 2 * second * second / fourth))
    reach = t_quantile(confidence, freedom) * largest * math.sqrt((classes - 1) / classes * second)
    centre = math.log1p(n0 * ratio)
    low, high = (math.expm1(min(end, 700.0)) / n0 for end in (centre - reach, centre + reach))  # exp(710) overflows
    return Interval(low, high)
