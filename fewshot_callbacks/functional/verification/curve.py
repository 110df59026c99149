"""Sorted trials, and exact error rates at every threshold, from a single sort."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from fewshot_callbacks.engine.pooled.areas import share_in_right_order, twice_in_wrong_order
from fewshot_callbacks.functional.retrieval.operating_points import equal_error_rate
from fewshot_callbacks.functional.retrieval.pair_counts import BINS, MATCH_STEPS, RECALL_STEPS, PairCounts


@dataclass(frozen=True, eq=False)
class Curve:
    """Trials sorted by score, and the numbers of trials that each threshold accepts.

    Attributes:
        scores: Scores, ascending.
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
        """Distinct scores, ascending, and infinity. All thresholds between two of these accept the same trials."""
        return np.append(self.scores[self._starts], np.inf)

    @cached_property
    def accepted(self) -> Int[np.ndarray, "2 thresholds"]:
        """Numbers of target trials and of non-target trials with at least the score of each threshold."""
        trials_below = np.append(self._starts, len(self.same))
        targets_below = np.append(0, np.cumsum(self.same))[trials_below]
        targets = targets_below[-1] - targets_below
        nontargets = len(self.same) - trials_below - targets
        return np.stack([targets, nontargets])

    @property
    def targets(self) -> int:
        """Number of target trials."""
        return int(self.accepted[0, 0])

    @property
    def nontargets(self) -> int:
        """Number of non-target trials."""
        return int(self.accepted[1, 0])

    @cached_property
    def false_non_match_rate(self) -> Float[np.ndarray, "thresholds"]:
        """Share of the target trials that each threshold rejects."""
        rates: Float[np.ndarray, "thresholds"] = (self.targets - self.accepted[0]) / self.targets
        return rates

    @cached_property
    def false_match_rate(self) -> Float[np.ndarray, "thresholds"]:
        """Share of the non-target trials that each threshold accepts."""
        rates: Float[np.ndarray, "thresholds"] = self.accepted[1] / self.nontargets
        return rates

    def keeping(self, rate: float) -> int:
        """Return the index of the lowest threshold with a false match rate of at most `rate`."""
        # FMR falls with the threshold, so minus FMR is ascending.
        return int(np.searchsorted(-self.false_match_rate, -rate))

    def equal_error(self) -> tuple[float, float]:
        """Return the equal error rate and the score at which both rates cross."""
        fnmr = self.false_non_match_rate
        fmr = self.false_match_rate
        above = int(np.argmax(fnmr >= fmr))  # at least 1, because FNMR is 0 and FMR is 1 if all trials are accepted
        below = above - 1
        rate = equal_error_rate(float(fnmr[below]), float(fmr[below]), float(fnmr[above]), float(fmr[above]))
        return rate, float(self.thresholds[below])

    def area_under_roc(self) -> float:
        """Return the share of (target, non-target) pairs in the right order; a tie counts one half."""
        targets = self.accepted[0, :-1] - self.accepted[0, 1:]
        wrong = twice_in_wrong_order(targets, self.accepted[1, :-1], self.accepted[1, 1:])
        return share_in_right_order(wrong, self.targets, self.nontargets)

    def shares_in_right_order(self) -> Float[np.ndarray, "trials"]:
        """Return, per trial, the share of trials of the other kind that it is in the right order with.

        The mean over the trials of either kind is the area under the ROC curve.
        """
        # The mean of "at least" and "above" counts an equal score as one half.
        targets_above, nontargets_above = (self.accepted[:, :-1] + self.accepted[:, 1:]) / 2
        trials_of_score = np.diff(np.append(self._starts, len(self.same)))
        of_target = np.repeat(1 - nontargets_above / self.nontargets, trials_of_score)
        of_nontarget = np.repeat(targets_above / self.targets, trials_of_score)
        return np.where(self.same, of_target, of_nontarget)

    def slope(self, rate: float) -> float:
        """Return the decrease of FNMR per increase of FMR, near a false match rate.

        The curve is assumed to be linear in log FMR between half and twice the rate, as most curves are.
        """
        if not rate:
            return 0.0
        at_half = self.false_non_match_rate[self.keeping(rate / 2)]
        at_twice = self.false_non_match_rate[self.keeping(min(1.0, 2 * rate))]
        return float(at_half - at_twice) / (rate * math.log(4))

    def counts(self) -> PairCounts:
        """Return counts at a few hundred thresholds and in bins of the score, for plots."""
        low = float(self.scores[0])
        high = float(self.scores[-1])
        # The last edge is above all scores, so that the last bin contains the highest score, even if all scores are equal.
        edges = np.unique(np.linspace(low, high + 1e-6 * max(high - low, abs(high), 1e-30), BINS + 1))
        targets, nontargets = self.accepted[:, :-1]
        recall_steps = np.linspace(0, self.targets, RECALL_STEPS + 1)
        match_steps = np.geomspace(1, self.nontargets, MATCH_STEPS)
        recall_positions = np.searchsorted(-targets, -recall_steps)
        match_positions = np.searchsorted(-nontargets, -match_steps)
        edge_positions = np.searchsorted(self.thresholds, edges)
        positions = np.unique(np.concatenate([edge_positions, recall_positions, match_positions]))
        positions = positions.clip(max=len(targets) - 1)
        target_counts, nontarget_counts = -np.diff(self.accepted[:, edge_positions])
        return PairCounts(
            thresholds=self.thresholds[positions],
            true_positives=targets[positions],
            false_positives=nontargets[positions],
            relevant=self.targets,
            irrelevant=self.nontargets,
            edges=edges,
            relevant_counts=target_counts,
            irrelevant_counts=nontarget_counts,
        )


def best_threshold(scores: Float[np.ndarray, "trials"], same: Bool[np.ndarray, "trials"]) -> float:
    """Return the threshold with the most right decisions on sorted trials.

    All thresholds between two neighbouring scores are equally good, so the middle is returned. If several such intervals are
    best, it is the one with the highest scores. If it is best to accept all trials, the threshold is the lowest score. If it
    is best to accept none, the threshold is infinite.
    """
    curve = Curve(scores, same)
    right = curve.accepted[0] - curve.accepted[1]  # right decisions, up to a constant: the number of non-target trials
    is_best = right == right.max()
    last = int(np.flatnonzero(is_best)[-1])
    worse = np.flatnonzero(~is_best[:last])
    low = float(curve.thresholds[worse[-1]]) if len(worse) else -math.inf
    high = float(curve.thresholds[last])
    if math.isinf(low) or math.isinf(high):
        return high
    return max(low / 2 + high / 2, math.nextafter(low, math.inf))  # low + high might overflow
