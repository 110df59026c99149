"""Intervals of trial metrics: a jackknife that leaves out one identity at a time.

Two trials that share an identity are not independent, and there are far more trials than identities. The jackknife leaves
out all trials with one identity on either side, which changes the value. The variance is the sum of the squared changes. A
trial of two identities is left out twice, once with each, so this sum counts it twice. Therefore the squared contributions
of each pair of identities are subtracted once (Aronow, Samii and Assenova, "Cluster-robust variance estimation for dyadic
data", 2015). Degrees of freedom and scale are the same as for all intervals of metrics (`statistics.py`).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from fewshot_callbacks.functional._jackknife import t_quantile
from fewshot_callbacks.functional.statistics import UNKNOWN, Interval, share_interval

# With fewer identities, there is no interval.
FEWEST = 3
# With fewer false matches, a value that depends on them has no interval. With 5 false matches, 95 % intervals covered the
# true value in 91 to 96 % of the cases; with 2, in 77 to 88 % (`benchmarks/trials.py --coverage`).
FEWEST_MISTAKES = 10


@dataclass(frozen=True, eq=False)
class Identities:
    """The identities of both sides of each trial.

    Attributes:
        first: Number of the identity of the first side, from 0.
        second: Number of the identity of the second side; equal to `first` if `same`.
        same: Whether both sides have one identity.
        count: Number of identities.
    """

    first: Int[np.ndarray, "trials"]
    second: Int[np.ndarray, "trials"]
    same: Bool[np.ndarray, "trials"]
    count: int

    @cached_property
    def _couples(self) -> Int[np.ndarray, "different"]:
        """Number of the (unordered) pair of identities of each non-target trial."""
        first = self.first[~self.same]
        second = self.second[~self.same]
        keys = np.minimum(first, second).astype(np.int64) * self.count + np.maximum(first, second)
        return np.unique(keys, return_inverse=True)[1]

    @cached_property
    def _trials(self) -> Float[np.ndarray, "2 identities"]:
        """Numbers of trials of each identity, with itself and with other identities."""
        return np.stack(self._sums(np.ones(len(self.same))))

    def chosen(self, mask: Bool[np.ndarray, "trials"]) -> Identities:
        """Return the identities of the trials in a mask, renumbered from 0."""
        first = self.first[mask]
        second = self.second[mask]
        is_present = np.zeros(self.count, bool)
        is_present[first] = True
        is_present[second] = True
        numbers = np.cumsum(is_present) - 1
        return Identities(numbers[first], numbers[second], self.same[mask], int(np.count_nonzero(is_present)))

    def _sums(self, values: Float[np.ndarray, "trials"]) -> tuple[np.ndarray, np.ndarray]:
        """Return, per identity, the sum of values over its target trials and over its non-target trials."""
        of_targets = self._sum_by(self.first, values, self.same)
        of_nontargets = self._sum_by(self.first, values, ~self.same) + self._sum_by(self.second, values, ~self.same)
        return of_targets, of_nontargets

    def _sum_by(
        self,
        identities: Int[np.ndarray, "trials"],
        values: Float[np.ndarray, "trials"],
        mask: Bool[np.ndarray, "trials"],
    ) -> Float[np.ndarray, "identities"]:
        """Return, per identity, the sum of values over the trials in a mask that have it on this side."""
        sums = np.bincount(identities[mask], weights=values[mask], minlength=self.count)
        return sums.astype(np.float64, copy=False)  # without trials, the sums are integers

    def interval(
        self,
        value: float,
        contributions: Float[np.ndarray, "trials"],
        weights: tuple[float, float],
        top: float,
        confidence: float,
    ) -> Interval:
        """Return the interval of a value that is a function of two means, one per kind of trial.

        If all trials are of one kind, it is a function of one mean.

        The value is at least 0, and at most `top`, 1 or infinity. `contributions` are of each trial to the mean over
        its kind. `weights` are the derivatives of the value by the mean over target trials and by the mean over
        non-target trials.
        """
        deviations = contributions.copy()
        for kind in (self.same, ~self.same):
            if kind.any():
                deviations[kind] -= contributions[kind].mean()
        totals = np.array([np.count_nonzero(self.same), np.count_nonzero(~self.same)])
        present = np.flatnonzero(totals)
        remaining = totals[:, None] - self._trials
        if self.count < FEWEST or not (remaining[present] > 0).all():
            return UNKNOWN
        sums = self._sums(deviations)
        moves = sum(weights[kind] * sums[kind] / remaining[kind] for kind in present)
        largest = float(np.abs(moves).max())
        if largest == 0:
            return share_interval(value, 0.0, 1.0, self.count, confidence) if top == 1 else UNKNOWN
        scaled = moves / largest  # without the scale, fourth powers underflow
        second = float((scaled**2).sum())
        fourth = float((scaled**4).sum())
        counted_twice = (
            np.bincount(self._couples, weights=weights[1] / max(1, totals[1]) * deviations[~self.same]) / largest
        )
        # The correction may be too large, so the variance is at least half of the sum.
        counted_once = max(second - float((counted_twice**2).sum()), second / 2)
        freedom = max(1.0, min(self.count - 1, 2 * second * second / fourth))
        error = largest * math.sqrt((self.count - 1) / self.count * counted_once)
        if top == 1:
            return share_interval(value, error, freedom, self.count, confidence)
        reach = t_quantile(confidence, freedom) * error / value  # on the log scale
        # With a confidence near 1, the upper end may exceed the largest float.
        high = value * math.exp(reach) if reach < math.log(sys.float_info.max) else math.inf
        return Interval(value * math.exp(-reach), high)
