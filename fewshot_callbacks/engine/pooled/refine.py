"""The plan of the second stage: the thresholds that the first stage leaves open, at which all pairs are counted exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.bins import ThresholdBins
from fewshot_callbacks.engine.pooled.bounds import CountBounds
from fewshot_callbacks.engine.pooled.intervals import Bools, Ints, merged, spaced
from fewshot_callbacks.engine.pooled.recount import Recount, most_thresholds
from fewshot_callbacks.engine.pooled.relevant_pairs import RelevantPairs

LISTED_THRESHOLDS = 2**10
"""Thresholds that cut an interval into pieces narrower than the error of float32 estimates, if it is a few bins long."""


class OpenQuestions(NamedTuple):
    """What the counts known so far leave open."""

    bins: ThresholdBins
    decisive: Bools
    """bins in which a threshold that is sought may lie"""
    likely: Ints
    """the decisive bins, the most likely ones first: if there are too many scores to count all, those in these bins are
    counted"""
    wanted: Sequence[float]
    """more thresholds at which the accepted pairs are counted"""
    sought: Sequence[tuple[float, float]]
    """intervals in which negatives of some rank lie"""
    early: Sequence[tuple[float, float]]
    """others that may be sought later, taken in if all pairs are scanned anyway"""


def plan_recount(
    matrix: ScoreMatrix, bounds: CountBounds, relevant: RelevantPairs, questions: OpenQuestions
) -> Recount:
    """Plan to count at each relevant score in the decisive bins, or, if too many, at some of them and at spaced scores.

    Near its maximum F1 is flat, and many bins can hold it. The scores of the most likely ones are then counted one by
    one, which as a rule settles the others, of which less is known.
    """
    bins = questions.bins
    index = np.flatnonzero(questions.decisive)
    low, high = bins.low[index], bins.high[index]
    capacity = -int(matrix.processes.largest([-most_thresholds(matrix)])[0])  # threads may differ
    alone = np.append(True, np.diff(index) > 1)[: len(index)]  # bins that follow each other are one interval
    last = np.append(alone[1:], True)[: len(index)]
    intervals = merged(low[alone], np.maximum.accumulate(high)[last])
    # recomputing the scores, where they are not held, would be wasted if they exceed the capacity
    may_fit = matrix.symmetric_ranks or int(bins.positives[questions.decisive].sum()) <= capacity
    thresholds = relevant.distinct_within(intervals, capacity) if may_fit else None
    if thresholds is None:
        singly = capacity * 7 // 8
        fitting = np.cumsum(bins.positives[questions.likely]) <= singly
        likely = np.sort(questions.likely[fitting])
        some = relevant.distinct_within(merged(bins.low[likely], bins.high[likely]), singly)
        intervals = merged(low, high)
        each = max(2, (capacity - singly) // max(1, len(intervals)))
        thresholds = np.linspace(intervals[:, 0], intervals[:, 1], each).ravel()
        if some is not None:
            thresholds = np.concatenate([thresholds, some])
    lowest = min([*questions.wanted, *intervals[:1, 0].tolist(), *(low for low, _ in questions.sought)])
    known = lowest >= bounds.highest.exact_above
    ranked = np.array([*questions.sought, *(() if known else questions.early)], np.float64).reshape(-1, 2)
    if len(ranked):
        # where the scores of these negatives will be listed, spaced ones only make sure that there is an end; else they
        # save scans, at a cost that is small beside a scan's
        listed = known or matrix.scores.compiled is None
        count = LISTED_THRESHOLDS if listed else max(LISTED_THRESHOLDS, min(capacity // 2, matrix.everyone.pairs // 64))
        spaced_out = (spaced(low, high, count // len(ranked) + 3) for low, high in ranked)
        thresholds = np.concatenate([thresholds, *spaced_out])
    return Recount(matrix, thresholds, intervals, questions.wanted, ranked, bounds)
