"""In which bins of scores an operating point can lie: the rules of the pooled metrics, on bounds of the counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fewshot_callbacks.engine.pooled import ThresholdBins
from fewshot_callbacks.functional.retrieval.operating_points import Enclosure

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PooledRequest:
    """The pooled metrics that are requested, with their settings in scores."""

    precisions: Sequence[float] = ()
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """the smallest and the largest threshold that may be chosen for recall at a fixed precision"""
    thresholds: Sequence[float] = ()
    """fixed thresholds at which precision, recall and F1 are requested"""
    false_match_rates: Sequence[float] = ()
    equal_error_rate: bool = False
    average_precision: bool = False
    """whether the area under the precision-recall curve is wanted exactly; bounds are always reported"""

    def wanted(self, tp: Floats, fp: Floats, negatives: float) -> list[float]:
        """Estimate how many negatives each operating point accepts.

        Args:
            tp: Relevant pairs at and above ascending scores, by a sample.
            fp: Negatives at and above them.
            negatives: Number of all negatives.
        """
        relevant = tp[0]
        if not relevant:
            return []
        f1 = 2 * tp / (tp + fp + relevant)
        # near its maximum F1 is flat: the lowest of all thresholds that come close
        wanted = [float(fp[np.flatnonzero(f1 >= 0.95 * f1.max())[0]])]
        precision = tp / np.maximum(tp + fp, 1e-9)
        for asked in self.precisions:
            reaching = np.flatnonzero((precision >= asked) & (tp > 0))
            if len(reaching):  # those above the smallest such relevant score, and more until the precision is lost
                wanted += [float(fp[reaching[0]]), min(float(tp[reaching[0]]) * (1 / asked - 1), negatives)]
        wanted += [rate * negatives for rate in self.false_match_rates]
        if self.equal_error_rate and negatives:
            crossing = np.flatnonzero(1 - tp / relevant >= fp / negatives)
            wanted += [float(fp[crossing[0]])] if len(crossing) else []
        return wanted


def best_f1(bins: ThresholdBins) -> Bools:
    """Return the bins that can hold the threshold of the best F1."""
    highest = _f1(bins.tp, bins.fewest_fp, bins.relevant)
    reached = _f1(bins.tp, bins.most_fp, bins.relevant)
    return highest >= reached.max() if len(reached) else np.zeros(0, bool)


def likely_best_f1(bins: ThresholdBins, index: Ints) -> Ints:
    """Return some of the bins by descending F1, as it seems to be."""
    middle = _f1(
        bins.tp[index] - bins.positives[index] // 2, (bins.fewest_fp + bins.most_fp)[index] // 2, bins.relevant
    )
    likely: Ints = index[np.argsort(-middle, kind="stable")]
    return likely


def at_precision(bins: ThresholdBins, precision: float, low: float, high: float) -> Bools:
    """Return the bins that can hold the smallest relevant score in [low, high] with this precision as a threshold."""
    allowed = (bins.high >= low) & (bins.low <= high)
    possible = allowed & (precision_of(bins.tp, bins.fewest_fp) >= precision)
    certain = allowed & (bins.low >= low) & (bins.high <= high) & (precision_of(bins.tp, bins.most_fp) >= precision)
    return _up_to_first(possible, certain)


def at_false_match_rate(bins: ThresholdBins, rate: float) -> Bools:
    """Return the bins that can hold the smallest relevant score that, as a threshold, keeps this false match rate."""
    fewest, most = (false_match_rate(fp, bins.negatives) for fp in (bins.fewest_fp, bins.most_fp))
    return _up_to_first(fewest <= rate, most <= rate)


def equal_error_rate(bins: ThresholdBins) -> Bools:
    """Return the bins that can hold the lowest relevant score beyond which FNMR is no longer smaller than FMR."""
    if not bins.negatives:
        return np.zeros(len(bins.low), bool)
    rejected = bins.relevant - bins.tp  # below the bin
    fewest = (bins.fewest_fp - bins.tied) / bins.negatives
    most = (bins.most_fp - bins.tied) / bins.negatives
    possible = (rejected + bins.positives) / bins.relevant >= fewest
    certain = np.where(bins.single, possible, (rejected + 1) / bins.relevant >= most)
    return _up_to_first(possible, certain)


def crossing(bins: ThresholdBins, index: int) -> float:
    """The equal error rate, if FNMR and FMR cross at this single score or just before it."""
    before = (bins.relevant - bins.tp[index]) / bins.relevant
    after = before + bins.positives[index] / bins.relevant
    match_before = bins.fewest_fp[index] / bins.negatives
    match_after = (bins.fewest_fp[index] - bins.tied[index]) / bins.negatives
    if before >= match_before:
        return float(before)
    step = (match_before - before) / ((match_before - before) + (after - match_after))
    return float(before + step * (after - before))


def average_precision(bins: ThresholdBins) -> Enclosure:
    """Area under the precision-recall curve: sum of the precisions at the relevant pairs over their number."""
    single = bins.single
    tp, n = bins.tp.astype(np.float64), bins.positives.astype(np.float64)
    # inside a bin of several scores each relevant pair has between tp - n + 1 and tp true positives
    least = np.where(single, tp, tp - n + 1)
    low = n * least / (least + bins.most_fp)
    high = n * tp / (tp + bins.fewest_fp)
    return Enclosure(float(low.sum()) / bins.relevant, float(high.sum()) / bins.relevant)


def curve(
    bins: ThresholdBins, to_user_scores: Callable[[Tensor], Tensor], points: int
) -> tuple[tuple[float, float, float], ...]:
    """Threshold, precision and recall at bins that are about evenly spaced in recall."""
    recall = bins.tp / bins.relevant
    wanted = np.unique(np.searchsorted(-recall, -np.linspace(1, 0, points), side="left").clip(max=len(recall) - 1))
    chosen = wanted[::-1]
    fp = (bins.fewest_fp[chosen] + bins.most_fp[chosen]) / 2
    thresholds: list[float] = to_user_scores(torch.from_numpy(bins.low[chosen])).tolist()
    precision = bins.tp[chosen] / (bins.tp[chosen] + fp)
    return tuple(zip(thresholds, precision.tolist(), recall[chosen].tolist(), strict=True))


def _up_to_first(possible: Bools, certain: Bools) -> Bools:
    """Return what is possible, up to the first bin that is certain."""
    first = np.flatnonzero(possible & certain)
    if len(first):
        possible = possible.copy()
        possible[first[0] + 1 :] = False
    return possible


def _f1(tp: Ints, fp: Ints, relevant: int) -> Floats:
    values: Floats = 2 * tp.astype(np.float64) / (tp + fp + relevant)
    return values


# A rate is compared with the requested one as the correctly rounded quotient of two counts: the number that a report
# shows, and so 14 of 25 reaches 0.56, though this float64 number is a little more than 14/25. Float64 division rounds
# correctly, and counts below 2**53 are float64 numbers. Rounding is monotone, so fewer false positives never do worse.


def precision_of(tp: Ints, fp: Ints) -> Floats:
    """Share of the accepted pairs that are relevant; 0 where none is accepted."""
    values: Floats = tp / np.maximum(tp + fp, 1)
    return values


def false_match_rate(fp: Ints, negatives: int) -> Floats:
    """Share of the negatives that are accepted; 0 where there are none."""
    values: Floats = fp / max(negatives, 1)
    return values


def most_false_positives(tp: int, precision: float) -> int:
    """Return the largest number of false positives at which `tp` true positives have this precision."""
    accepted = int(tp / Fraction(float(precision)))  # within one of the answer, which rounding the quotient may move
    while tp / (accepted + 1) >= precision:
        accepted += 1
    while accepted > tp and tp / accepted < precision:
        accepted -= 1
    return accepted - tp
