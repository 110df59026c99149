"""What is known of all pairs in runs of scores, how they are counted, and in which runs an operating point can lie."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from fewshot_callbacks.engine.pooled.intervals import (
    Bools,
    Floats,
    Ints,
)


@dataclass(frozen=True)
class Enclosure:
    """A value known up to a proved bound."""

    low: float
    high: float

    @property
    def value(self) -> float:
        """The middle."""
        return (self.low + self.high) / 2

    @property
    def error(self) -> float:
        """Half the width: the value is off by no more."""
        return (self.high - self.low) / 2


@runtime_checkable
class Scores(Protocol):
    """What turns keys into the scores that a user reads."""

    def to_score(self, key: float) -> float:
        """The score of a key."""


class ThresholdBins(NamedTuple):
    """Runs of keys in ascending order that hold relevant pairs, and what a threshold at one of these accepts."""

    low: Floats
    high: Floats
    single: Bools
    """one key, of which everything is known"""
    positives: Ints
    """relevant pairs inside"""
    tp: Ints
    """true positives at the lowest threshold; at the others there are fewer"""
    fewest_fp: Ints
    """at least so many false positives at each threshold"""
    most_fp: Ints
    """at most so many"""
    tied: Ints
    """of a single key: negatives with this very key"""
    relevant: int
    """number of all relevant pairs"""
    negatives: int
    """number of all other pairs"""

    def best_f1(self) -> Bools:
        """The cells that can hold the threshold of the best F1."""
        highest = _f1(self.tp, self.fewest_fp, self.relevant)
        reached = _f1(self.tp, self.most_fp, self.relevant)
        return highest >= reached.max() if len(reached) else np.zeros(0, bool)

    def likely_best_f1(self, index: Ints, positives: int) -> Ints:
        """Of these cells those whose F1 seems highest, ascending, as many as hold no more than so many relevant pairs."""
        middle = _f1(
            self.tp[index] - self.positives[index] // 2, (self.fewest_fp + self.most_fp)[index] // 2, self.relevant
        )
        order = np.argsort(-middle, kind="stable")
        fitting = np.cumsum(self.positives[index[order]]) <= positives
        chosen: Ints = np.sort(order[fitting])
        return chosen

    def at_precision(self, precision: float, low: float, high: float) -> Bools:
        """The cells that can hold the smallest relevant key in [low, high] that reaches this precision as a threshold."""
        allowed = (self.high >= low) & (self.low <= high)
        possible = allowed & (precision_of(self.tp, self.fewest_fp) >= precision)
        certain = allowed & (self.low >= low) & (self.high <= high) & (precision_of(self.tp, self.most_fp) >= precision)
        return _up_to_first(possible, certain)

    def at_false_match_rate(self, rate: float) -> Bools:
        """The cells that can hold the smallest relevant key that, as a threshold, keeps this false match rate."""
        fewest, most = (false_match_rate(fp, self.negatives) for fp in (self.fewest_fp, self.most_fp))
        return _up_to_first(fewest <= rate, most <= rate)

    def equal_error_rate(self) -> Bools:
        """The cells that can hold the lowest relevant key beyond which FNMR is no longer smaller than FMR."""
        if not self.negatives:
            return np.zeros(len(self.low), bool)
        rejected = self.relevant - self.tp  # below the cell
        fewest = (self.fewest_fp - self.tied) / self.negatives
        most = (self.most_fp - self.tied) / self.negatives
        possible = (rejected + self.positives) / self.relevant >= fewest
        certain = np.where(self.single, possible, (rejected + 1) / self.relevant >= most)
        return _up_to_first(possible, certain)

    def crossing(self, cell: int) -> float:
        """The equal error rate, if FNMR and FMR cross at this single key or just before it."""
        before = (self.relevant - self.tp[cell]) / self.relevant
        after = before + self.positives[cell] / self.relevant
        match_before = self.fewest_fp[cell] / self.negatives
        match_after = (self.fewest_fp[cell] - self.tied[cell]) / self.negatives
        if before >= match_before:
            return float(before)
        step = (match_before - before) / ((match_before - before) + (after - match_after))
        return float(before + step * (after - before))

    def average_precision(self) -> Enclosure:
        """Area under the precision-recall curve: sum of the precisions at the relevant pairs over their number."""
        single = self.single
        tp, n = self.tp.astype(np.float64), self.positives.astype(np.float64)
        # inside a run of several keys each relevant pair has between tp - n + 1 and tp true positives
        least = np.where(single, tp, tp - n + 1)
        low = n * least / (least + self.most_fp)
        high = n * tp / (tp + self.fewest_fp)
        return Enclosure(float(low.sum()) / self.relevant, float(high.sum()) / self.relevant)

    def of(self, chosen: Bools) -> ThresholdBins:
        """Some of the cells."""
        return ThresholdBins(
            self.low[chosen],
            self.high[chosen],
            self.single[chosen],
            self.positives[chosen],
            self.tp[chosen],
            self.fewest_fp[chosen],
            self.most_fp[chosen],
            self.tied[chosen],
            self.relevant,
            self.negatives,
        )

    def curve(self, scores: Scores, points: int) -> tuple[tuple[float, float, float], ...]:
        """Threshold, precision and recall at cells that are about evenly spaced in recall."""
        recall = self.tp / self.relevant
        wanted = np.unique(np.searchsorted(-recall, -np.linspace(1, 0, points), side="left").clip(max=len(recall) - 1))
        fp = (self.fewest_fp + self.most_fp) / 2
        return tuple(
            (scores.to_score(float(self.low[i])), float(self.tp[i] / (self.tp[i] + fp[i])), float(recall[i]))
            for i in reversed(wanted.tolist())
        )


def _up_to_first(possible: Bools, certain: Bools) -> Bools:
    """What is possible, up to the first cell that is certain."""
    first = np.flatnonzero(possible & certain)
    if len(first):
        possible = possible.copy()
        possible[first[0] + 1 :] = False
    return possible


def _f1(tp: Ints, fp: Ints, relevant: int) -> Floats:
    values: Floats = 2 * tp.astype(np.float64) / (tp + fp + relevant)
    return values


# A rate is compared with what was asked for as the correctly rounded quotient of two counts: the number that a report
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
    """The largest number of false positives at which so many true positives have this precision, by `precision_of`."""
    accepted = int(tp / Fraction(float(precision)))  # within one of the answer, which rounding the quotient may move
    while tp / (accepted + 1) >= precision:
        accepted += 1
    while accepted > tp and tp / accepted < precision:
        accepted -= 1
    return accepted - tp
