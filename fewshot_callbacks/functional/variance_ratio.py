"""The variance ratio: variance between the classes of a population over variance within them, estimated from a sample.

J of noise is (k - 1) / (n - k) for k classes and n items, so J of a batch depends more on how the batch was drawn than on
the embedding. The ratio of the two variances can be compared between batches, samplers and sets. It is estimated from the
mean squares of a one-way analysis of variance (Searle, Casella and McCulloch, "Variance Components", 1992), over all
dimensions together:

    MSB = Tr(S_B) / (k - 1),  MSW = Tr(S_W) / (n - k),  n0 = (n - sum_c n_c^2 / n) / (k - 1)
    ratio = (MSB - MSW) / (n0 MSW)

It is near 0 for noise and may be slightly negative. A class with one item counts in MSB and n0, but not in MSW. Numerator
and denominator are computed from the same sums as J (discriminant_ratio.py explains their numerics).

The interval of a set treats its classes as a sample from a population. It is a t interval from the jackknife over classes,
on the scale of log(1 + n0 ratio) = log(MSB / MSW): J. N. Arvesen and T. H. Schmitz, "Robust procedures for variance
component problems using the jackknife", Biometrics 26, 1970. An F interval would only be valid for one normal dimension.
The degrees of freedom are Satterthwaite's, as in statistics.py. `benchmarks/variance_ratio.py --coverage` measures the
coverage.
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
    """Return an estimate of the variance between classes over the variance within classes. Larger is better separated.

    The ratio is a property of the population that the items were drawn from. So you can compare batches of any size,
    episodes and whole sets; they only differ in the uncertainty of the estimate. The result is on the device of the
    embeddings, and the call does not wait for the device. The module docstring has the formula and its source.

    Args:
        embeddings: (items, dim), any floating dtype. The computation is in float64 (in float32 on MPS, which has no
            float64).
        labels: (items,) integers of any value, or strings. A tensor must be on the same device.
        normalize: Scale each embedding to length 1 first.

    Returns:
        A scalar on the same device, without a gradient and without an upper limit. For pure noise its expected value is 0,
        and single values can be slightly negative. NaN if it is undefined: there are fewer than two classes, no class has
        two items, or the items within every class are equal. The dtype is float64 for float64 embeddings, else float32.

    Raises:
        ValueError: If embeddings are not (items, dim), or if labels are not one integer or string per item. Values are not
            checked, because that would wait for the device. NaN or Inf in the embeddings makes the ratio NaN.

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

    Attributes:
        value: The ratio; NaN if it is undefined.
        interval: Confidence interval of the ratio in the population of classes; NaN if it is unknown, as for fewer than
            three classes.
        classes: Number of classes.
        items: Number of items.
        undefined: Reason why the value is NaN; None if it is defined.
        interval_undefined: Reason why only the interval is NaN; None if the interval is known, or if the value is NaN,
            too.

    Examples:
        >>> import torch
        >>> embeddings = torch.tensor([[0.0], [2.0], [4.0], [6.0], [8.0], [9.0], [13.0], [15.0]])
        >>> found = variance_ratio_of_set(embeddings, torch.arange(8) // 2)
        >>> round(found.value, 2), round(found.interval.low, 2), round(found.interval.high, 2)
        (18.21, 1.27, 197.05)
    """

    value: float
    interval: Interval
    classes: int
    items: int
    undefined: str | None = None
    interval_undefined: str | None = None


def variance_ratio_of_set(
    embeddings: Any,
    labels: Any = None,
    *,
    normalize: bool = False,
    confidence: float = 0.95,
) -> VarianceRatioEstimate:
    """Return the variance ratio of a whole set, with its interval over classes (see the module docstring).

    Args:
        embeddings: (items, dim), any floating dtype; or the `ClassMoments` or `ClassScatter` of a set, merged over
            batches or processes.
        labels: (items,) integers or strings; None if `embeddings` are moments.
        normalize: Scale each embedding to length 1 first. This has no effect on moments.
        confidence: Confidence level of the interval, in (0, 1).

    Returns:
        The ratio and its interval. Both are NaN if they are undefined, and `undefined` then has the reason.

    Raises:
        ValueError: If embeddings are not (items, dim), labels are not one integer or string per item, or `confidence` is
            not in (0, 1).

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
                "variance_ratio_of_set(embeddings) needs labels. Pass one integer or string per embedding."
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
    scale = scatter.spread.max()  # above 0; without this scale the squares may overflow
    between = counts * (scatter.distances / scale).square()
    within = (scatter.spread / scale).square()
    squares = counts.square()
    ratio = float(estimated_ratio(between.sum() / within.sum(), items, classes, squares.sum()))
    # Leaving out a class moves the centre away from it, so the scatter loses n_c |mu_c - mu|^2 n / (n - n_c).
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
    fix = "Measure on a set with several classes and several items per class."
    reasons = (
        ("The set is empty.", classes == 0),
        ("Some embeddings are not finite.", not bool(lengths.isfinite().all())),
        (f"Each of the {classes} classes has one item. {fix}", bool((scatter.counts == 1).all())),
        (f"The set has a single class. {fix}", classes == 1),
        ("All embeddings are equal: the model has collapsed.", bool((lengths == 0).all())),
        (
            "The items of each class are equal, so there is no variance within classes to compare with.",
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
        "The interval leaves out one class at a time, and the ratio of the remaining classes is undefined or always the "
        "same. Measure on a set with more classes and several items per class."
    )


def _jackknife_interval(
    ratio: float,
    ratios_without: Float[Tensor, "classes"],
    shares: Float[Tensor, "classes"],
    n0: float,
    confidence: float,
) -> Interval:
    """Return a t interval on the scale of log(1 + n0 ratio).

    `ratios_without` are the ratios without each class, and `shares` the share of the items in each class. `n0` is the
    effective number of items per class (see the module docstring).
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
