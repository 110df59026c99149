"""Sorted trials, and the error rates at every threshold: one sort, after which each number is exact counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from fewshot_callbacks.functional.retrieval.operating_points import (
    BINS,
    MATCH_STEPS,
    RECALL_STEPS,
    PairCounts,
    equal_error_rate,
)


@dataclass(frozen=True, eq=False)
class Curve:
    """Trials in the order of their scores, and what each threshold accepts.

    Attributes:
        scores: Ascending.
        same: Whether both sides of each trial have one identity.
    """

    scores: Float[np.ndarray, "trials"]
    same: Bool[np.ndarray, "trials"]

    @cached_property
    def _starts(self) -> Int[np.ndarray, "distinct"]:
        """Index of the first trial of each distinct score."""
        return np.flatnonzero(np.append(True, self.scores[1:] != self.scores[:-1]))

    @cached_property
    def thresholds(self) -> Float[np.ndarray, "thresholds"]:
        """Each distinct score, ascending, and infinity: between two of these all thresholds accept the same trials."""
        return np.append(self.scores[self._starts], np.inf)

    @cached_property
    def accepted(self) -> Int[np.ndarray, "2 thresholds"]:
        """Numbers of genuine trials, and of impostor trials, whose scores reach each threshold."""
        same = np.append(0, np.cumsum(self.same))[np.append(self._starts, len(self.same))]
        everything = len(self.same) - np.append(self._starts, len(self.same))
        return np.stack([same[-1] - same, everything - (same[-1] - same)])

    @property
    def of_same(self) -> int:
        """Number of genuine trials."""
        return int(self.accepted[0, 0])

    @property
    def of_different(self) -> int:
        """Number of impostor trials."""
        return int(self.accepted[1, 0])

    @cached_property
    def false_non_match_rate(self) -> Float[np.ndarray, "thresholds"]:
        """Share of the genuine trials that each threshold rejects."""
        rates: Float[np.ndarray, "thresholds"] = (self.of_same - self.accepted[0]) / self.of_same
        return rates

    @cached_property
    def false_match_rate(self) -> Float[np.ndarray, "thresholds"]:
        """Share of the impostor trials that each threshold accepts."""
        rates: Float[np.ndarray, "thresholds"] = self.accepted[1] / self.of_different
        return rates

    def keeping(self, rate: float) -> int:
        """Return the index of the lowest threshold that keeps a false match rate."""
        # FMR falls with the threshold; searched upside down, the first that is not above the rate is found
        return int(np.searchsorted(-self.false_match_rate, -rate))

    def equal_error(self) -> tuple[float, float]:
        """Return the equal error rate, and the score at which both rates cross."""
        miss, match = self.false_non_match_rate, self.false_match_rate
        at = int(np.argmax(miss >= match))  # not the first: where all is accepted, one is 0 and the other 1
        crossing = equal_error_rate(*(float(rate) for rate in (miss[at - 1], match[at - 1], miss[at], match[at])))
        return crossing, float(self.thresholds[at - 1])

    def slope(self, rate: float) -> float:
        """Return by how much FNMR falls where FMR grows, near a false match rate.

        It is a secant from half the rate to twice, divided by what a curve that is linear in the logarithm of FMR, as they
        mostly are, would have between them.
        """
        ends = self.false_non_match_rate[[self.keeping(rate / 2), self.keeping(min(1.0, 2 * rate))]]
        return float(ends[0] - ends[1]) / (rate * math.log(4)) if rate else 0.0

    def counts(self) -> PairCounts:
        """Return the counts at a few hundred thresholds and in bins of the score, for plots."""
        low, high = float(self.scores[0]), float(self.scores[-1])
        # an edge above all scores, so that the highest is in the last bin, also where all are equal
        edges = np.unique(np.linspace(low, high + 1e-6 * max(high - low, abs(high), 1e-30), BINS + 1))
        tp, fp = self.accepted[:, :-1]
        steps = np.linspace(0, self.of_same, RECALL_STEPS + 1), np.geomspace(1, self.of_different, MATCH_STEPS)
        more = [np.searchsorted(-one, -wanted) for one, wanted in zip((tp, fp), steps, strict=True)]
        bins = np.searchsorted(self.thresholds, edges)
        chosen = np.unique(np.concatenate([bins, *more])).clip(max=len(tp) - 1)
        in_bins = -np.diff(self.accepted[:, bins])
        return PairCounts(
            self.thresholds[chosen], tp[chosen], fp[chosen], self.of_same, self.of_different, edges, *in_bins
        )


def best_threshold(scores: Float[np.ndarray, "trials"], same: Bool[np.ndarray, "trials"]) -> float:
    """Return the threshold at which most of some sorted trials are decided rightly.

    It is the middle of the interval of scores between which all thresholds are as good; of several intervals that of the
    highest scores. Where it is best to accept all it is the lowest score, and where it is best to accept none infinite.
    """
    curve = Curve(scores, same)
    right = curve.accepted[0] - curve.accepted[1]  # and the number of impostor trials, which is always the same
    best = right == right.max()
    last = int(np.flatnonzero(best)[-1])
    worse = np.flatnonzero(~best[:last])
    low, high = float(curve.thresholds[worse[-1]]) if len(worse) else -math.inf, float(curve.thresholds[last])
    if math.isinf(low) or math.isinf(high):
        return high
    return max(low / 2 + high / 2, math.nextafter(low, math.inf))  # the sum of both might overflow
