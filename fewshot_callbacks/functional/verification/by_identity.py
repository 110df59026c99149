"""Intervals of numbers of pairs whose sides share identities: a jackknife that leaves out one identity at a time.

Two pairs that share an identity are not independent, and there are far more pairs than identities. Leaving out an identity
leaves out all pairs that it is on either side of; how far this moves a number is how much the number owes to it. A pair
of two identities is left out twice, once with each, which the sum over identities counts twice: the squares of what the
pairs of each two identities contribute are taken off once (Aronow, Samii and Assenova, "Cluster-robust variance
estimation for dyadic data", 2015). Degrees of freedom and scale are those of all intervals of metrics (`intervals.py`).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from fewshot_callbacks.functional.statistics import UNKNOWN, Interval, share_interval, t_quantile

# The fewest identities from which a spread is estimated at all.
FEWEST = 3


@dataclass(frozen=True, eq=False)
class Identities:
    """Who is on each side of each trial.

    Attributes:
        first: Number of the identity of the first side, from 0.
        second: The same of the second side; that of the first where `same`.
        same: Whether both sides have one identity.
        count: How many identities there are.
    """

    first: Int[np.ndarray, "trials"]
    second: Int[np.ndarray, "trials"]
    same: Bool[np.ndarray, "trials"]
    count: int

    @cached_property
    def _couples(self) -> Int[np.ndarray, "different"]:
        """Number of the two identities of each trial of two, in either order."""
        first, second = self.first[~self.same], self.second[~self.same]
        keys = np.minimum(first, second).astype(np.int64) * self.count + np.maximum(first, second)
        return np.unique(keys, return_inverse=True)[1]

    @cached_property
    def _trials(self) -> Float[np.ndarray, "2 identities"]:
        """Numbers of trials of each identity, with itself and with others."""
        return np.stack(self._sums(np.ones(len(self.same))))

    def _sums(self, values: Float[np.ndarray, "trials"]) -> tuple[np.ndarray, np.ndarray]:
        """Sum values over the trials of each identity, with itself and with others."""

        def summed(side: np.ndarray, some: np.ndarray) -> np.ndarray:
            return np.bincount(side[some], weights=values[some], minlength=self.count)

        return summed(self.first, self.same), summed(self.first, ~self.same) + summed(self.second, ~self.same)

    def interval(
        self,
        value: float,
        parts: Float[np.ndarray, "trials"],
        weights: tuple[float, float],
        top: float,
        confidence: float,
    ) -> Interval:
        """Return the interval of a number that moves with two means, one over the trials of each kind.

        Args:
            value: The number, at least 0.
            parts: What each trial adds to the mean over its kind.
            weights: By how much the number moves with the mean over trials of one identity, and over those of two.
            top: The largest value: 1, or infinite.
            confidence: Confidence level, in (0, 1).
        """
        totals = np.array([np.count_nonzero(self.same), np.count_nonzero(~self.same)])
        means = [float(parts[kind].mean()) for kind in (self.same, ~self.same)]
        owed = np.where(self.same, parts - means[0], parts - means[1])
        left = totals[:, None] - self._trials
        if self.count < FEWEST or not (left > 0).all():
            return UNKNOWN
        moves = sum(weight * of / rest for weight, of, rest in zip(weights, self._sums(owed), left, strict=True))
        largest = float(np.abs(moves).max())
        if largest == 0:
            return share_interval(value, 0.0, 1.0, self.count, confidence) if top == 1 else UNKNOWN
        twice = np.bincount(self._couples, weights=weights[1] / totals[1] * owed[~self.same]) / largest
        scaled = moves / largest  # their fourth powers underflow otherwise
        second, fourth = float((scaled**2).sum()), float((scaled**4).sum())
        # pairs of the same two identities may cancel what others add, and then half of the sum is the least there can be
        once = max(second - float((twice**2).sum()), second / 2)
        freedom = max(1.0, min(self.count - 1, 2 * second * second / fourth))
        error = largest * math.sqrt((self.count - 1) / self.count * once)
        if top == 1:
            return share_interval(value, error, freedom, self.count, confidence)
        reach = t_quantile(confidence, freedom) * error / value  # on the scale of its logarithm
        # beyond the largest number there is no bound, which a confidence near 1 asks for
        high = value * math.exp(reach) if reach < math.log(sys.float_info.max) else math.inf
        return Interval(value * math.exp(-reach), high)
