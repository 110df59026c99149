"""Bounds of the number of negatives at any score. To close bounds is to make them equal."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.counted_values import CountedValues
from fewshot_callbacks.engine.counting import ERROR_FACTOR, FloatArray
from fewshot_callbacks.engine.pooled.bounds import NO_BOUNDS, ListedNegatives
from fewshot_callbacks.engine.pooled.collector import LEAST_CAPACITY, Collector, range_of_binary_codes
from fewshot_callbacks.engine.pooled.sample import Sample
from fewshot_callbacks.engine.precision import OPEN_PRICE_OF_RECOUNT, cheapest, possible_precisions, recorded
from fewshot_callbacks.engine.ranks import recount
from fewshot_callbacks.engine.relevance import Ints
from fewshot_callbacks.engine.scale import Floats
from fewshot_callbacks.engine.tiles import Estimates


class Negatives:
    """Bounds of the number of negatives that reach a score. All methods are collective.

    `close` makes bounds equal, and keeps the counts that it finds. No other method changes anything.

    Args:
        estimates: The tiles.
        collector: Contains the collected negatives.
        seen: Number of negatives that the tiles of this process stand for.
        sample: Estimates of a sample of negatives. It decides what is tried first, but never a result.
        listed: The negatives of the queries of this process that are in no tile.
    """

    def __init__(
        self,
        estimates: Estimates,
        collector: Collector,
        seen: int,
        sample: Sample,
        listed: ListedNegatives,
    ) -> None:
        self.estimates = estimates.without_progress()
        self.processes = estimates.processes
        self.sample = sample
        self.passes = 1
        # number of negatives in the tiles of this process
        self._own_total = estimates.directions * seen
        self._listed = listed
        self.total = int(self._summed(np.array([self._own_total + listed.total]))[0])
        self.error_bound = collector.error_bound
        # collected pairs whose exact scores are not known, and their values
        self._collected = collector.collected()
        self._values = CountedValues.of(self._collected.values, self._collected.copies)
        # exact scores of the other collected pairs
        nothing = np.zeros(len(self._collected.values), bool)
        self._exact = self._values.where(nothing)
        # all pairs that reach this score are collected
        (self.cutoff,) = self.processes.largest([self._collected.cutoff])
        if estimates.vectors.pairs.exact_estimates:  # the estimates of binary codes are their exact scores
            self._exact = self._values._replace(values=self._values.values.astype(np.float64))
            self._values = self._values.where(nothing)
            self._collected = self._collected.where(nothing)
        self._known_bounds = NO_BOUNDS
        if collector.bins is not None and collector.bins == range_of_binary_codes(estimates):
            self._add_counts_of_binary_codes(*collector.histogram())
        elif collector.bins is not None:
            self._add_histogram(*collector.histogram())

    def _add_histogram(self, edges: Floats, reaching: Ints) -> None:
        """Add the bounds that a histogram of estimates gives at its edges.

        Args:
            edges: (bins,) lower edge of each bin.
            reaching: (bins,) number of estimates that reach each edge; the first number also counts masked pairs.
        """
        # An estimate is off by at most ceil(error bound / width) bins. Rounding moves its position by less than one further
        # bin (`_histogram_range`).
        shift = 1 + math.ceil((self.estimates.largest_error_bound * ERROR_FACTOR + 2.0**-125) / (edges[1] - edges[0]))
        if shift >= len(edges):
            return
        directions = self.estimates.directions
        fewest = directions * np.append(reaching[shift:], np.zeros(shift, np.int64))
        most = np.append(np.full(shift + 1, self._own_total), directions * reaching[1:-shift])
        self._known_bounds = self._known_bounds.with_more(edges, fewest, most)

    def _add_counts_of_binary_codes(self, edges: Floats, reaching: Ints) -> None:
        """Add the exact counts of a histogram with one bin for each score of binary codes. No pass could find more.

        Args:
            edges: (bins,) lower edge of each bin, one unit below its score.
            reaching: (bins,) number of scores that reach each edge; the first number also counts masked pairs.
        """
        counts = self.estimates.directions * reaching[1 : self.estimates.vectors.scale.dim + 2]
        scores = edges[1 : self.estimates.vectors.scale.dim + 2] + self.estimates.vectors.scale.score_factor
        self._add_counts(scores, counts, np.append(counts[1:], 0))

    def _summed(self, values: Ints) -> Ints:
        return self.processes.summed(values) if self.processes.count > 1 else values

    def _margins(self, scores: Floats) -> Floats:
        """Return how far a value must be from each score to be on the same side as its exact score."""
        size = np.minimum(np.abs(scores), 2.0)  # infinite scores are possible; 2**-50 of the size is rounding
        return self.error_bound + size * 2.0**-50

    # ------------------------------------------------------------------------------------------------------------ bounds

    def bounds(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return the fewest and the most negatives that can reach each of the ascending scores."""
        fewest, most = self._summed(np.stack(self._own_bounds(scores)))
        return fewest, most

    def _own_bounds(self, scores: Floats) -> tuple[Ints, Ints]:
        """Return the bounds for the negatives of this process.

        They follow from the values of the collected pairs up to their margins, from exact scores, and from bounds at other
        scores.
        """
        directions = self.estimates.directions
        margins = self._margins(scores)
        exact = self._exact.count_reaching(scores)
        fewest = directions * (self._values.count_reaching(scores + margins) + exact)
        most = directions * (self._values.count_reaching(scores - margins) + exact)
        most[scores - margins < self.cutoff] = self._own_total
        known_fewest, known_most = self._known_bounds.at(scores, self._own_total)
        listed_fewest, listed_most = self._listed.bounds(scores)
        return np.maximum(fewest, known_fewest) + listed_fewest, np.minimum(most, known_most) + listed_most

    def estimate(self, scores: Floats) -> Ints:
        """Return about how many negatives reach each of the ascending scores.

        From the cut-off on, the counts are correct for scores that differ by at most `error_bound`; listed negatives
        are counted by their lower bound. Below the cut-off, the counts are interpolated with the sample.
        """
        fewest, most = self.bounds(scores)
        collected = self._values.count_reaching(scores) + self._exact.count_reaching(scores)
        listed_fewest, _ = self._listed.bounds(scores)
        counts = self._summed(self.estimates.directions * collected + listed_fewest)
        if math.isinf(self.cutoff):
            return np.clip(counts, fewest, most)
        below = scores < self.cutoff + self.error_bound
        at_cutoff = counts[~below][0] if (~below).any() else 0
        sample = self.sample
        sampled_at_cutoff = sample.reaching(np.array([self.cutoff]))[0]
        sampled_below = max(1.0, sample.total - sampled_at_cutoff)
        share = np.clip((sample.reaching(scores) - sampled_at_cutoff) / sampled_below, 0.0, 1.0)
        interpolated = np.rint(at_cutoff + (self.total - at_cutoff) * share).astype(np.int64)
        return np.clip(np.where(below, interpolated, counts), fewest, most)

    def highest_values(self) -> Floats:
        """Return ascending values of collected pairs of all processes. They include the highest values.

        Pairs whose exact scores have been computed meanwhile are left out.
        """
        values = self._values.values
        listed = self._listed.some_scores()
        if len(listed):
            values = np.sort(np.concatenate((values, listed)))
        step = max(1, self.processes.count * len(values) // LEAST_CAPACITY)
        thinned = np.append(values[:-LEAST_CAPACITY:step], values[-LEAST_CAPACITY:])
        return np.sort(self.processes.joined(thinned.astype(np.float64)))

    def span(self, scores: Floats) -> tuple[float, float]:
        """Return a score below and a score above all known negatives and the given scores."""
        lowest = float(scores.min(initial=np.inf))
        highest = float(scores.max(initial=-np.inf))
        # Pairs that a full buffer has dropped are below the cut-off. If the highest pairs tie, all pairs are dropped.
        dropped = np.array([self.cutoff] if math.isfinite(self.cutoff) else [])
        for values in (self._values.values, self._exact.values, self._listed.some_scores(), dropped):
            if len(values):
                lowest = min(lowest, float(values[0]) - self.error_bound)
                highest = max(highest, float(values[-1]) + self.error_bound)
        negative_lowest, highest = self.processes.largest([-lowest, highest])
        return -negative_lowest, highest

    # ------------------------------------------------------------------------------------------------------------- close

    def close(self, scores: Floats) -> None:
        """Make the bounds at the ascending scores equal.

        This takes exact scores of collected pairs, and one more pass if a score is below the cut-off. If listed negatives
        are recomputed and their bounds differ, it also takes all their exact scores.
        """
        fewest, most = self.bounds(scores)
        scores = scores[fewest < most]
        if not len(scores):
            return
        listed_fewest, listed_most = self._summed(np.stack(self._listed.bounds(scores)))
        open_listed = scores[listed_fewest < listed_most]
        if len(open_listed):
            self._listed = self._listed.with_closed(open_listed)
        margins = self._margins(scores)
        is_collected = scores - margins >= self.cutoff
        if is_collected.any():
            self._score_collected(
                scores[is_collected] - margins[is_collected], scores[is_collected] + margins[is_collected]
            )
        if not is_collected.all():
            self._count_pairs(scores[~is_collected])

    def _score_collected(self, low: Floats, high: Floats) -> None:
        """Compute the exact scores of the collected pairs whose values are in the ascending intervals."""
        near = _inside_any(self._collected.values, low, high)
        if self.processes.largest([float(near.any())])[0]:
            scores = self.estimates.exact(self._collected.queries[near], self._collected.items[near])
            copies = None if self._collected.copies is None else self._collected.copies[near]
            self._exact = self._exact.with_more(scores, copies)
            self._collected = self._collected.where(~near)
            self._values = self._values.where(~_inside_any(self._values.values, low, high))

    def _count_pairs(self, scores: Floats) -> None:
        """Count all pairs at ascending scores, in one more pass."""
        estimates = self._estimates_for(scores).with_pairs_once()
        reach, above = recount(estimates, scores)
        if self.estimates.precision != "int8":
            estimates.vectors.free_int8_operands()
        self.passes += 1
        self._add_counts(scores, reach, above)

    def _add_counts(self, scores: Floats, reach: Ints, above: Ints) -> None:
        """Add the numbers of negatives of this process that reach each score, and that are above it."""
        known = self._known_bounds.with_more(scores, reach, reach)
        self._known_bounds = known.with_more(np.nextafter(scores, np.inf), above, above)

    def _estimates_for(self, scores: Floats) -> Estimates:
        """Return estimates in the precision in which counts at these scores take the least time."""
        if self.estimates.precision == "float64":
            return self.estimates
        allowed = {"float32", "float64"}
        if self.estimates.device is None:
            allowed.add(self.estimates.precision)
            if self.estimates.layout.recounts_in_int8:
                allowed.add("int8")
        precisions = [precision for precision in possible_precisions(self.estimates) if precision in allowed]
        shares_open = [
            self._share_open(scores, self.estimates.largest_error_bound_in(precision)) for precision in precisions
        ]
        choose = partial(cheapest, self.estimates, precisions, shares_open, OPEN_PRICE_OF_RECOUNT)
        return self.estimates.in_precision(recorded(choose))

    def _share_open(self, scores: Floats, error_bound: float) -> float:
        """Return about what share of the negatives is open when estimates are compared with scores.

        Args:
            scores: Ascending.
            error_bound: How far the estimates can be from the exact scores.
        """
        # Only exact scores within twice the error can have an estimate within the error.
        ends = np.array([scores[0] - 2 * error_bound, scores[-1] + 2 * error_bound])
        if len(self.sample.estimates):
            reaching_first, reaching_last = self.estimate(ends)
        else:
            fewest, most = self.bounds(ends)
            reaching_first, reaching_last = most[0], fewest[-1]
        share_within = (reaching_first - reaching_last) / max(1, self.total)
        # 1e-300 avoids a division by zero for a single score.
        span = max(scores[-1] - scores[0], 2 * error_bound, 1e-300)
        share_covered = min(1.0, 2 * error_bound * len(scores) / span)
        return float(share_within * share_covered)


def _inside_any(values: FloatArray, low: Floats, high: Floats) -> NDArray[np.bool_]:
    """Return which values are in one of the ascending intervals, which may overlap."""
    inside: NDArray[np.bool_] = (values >= low[0]) & (values <= high[-1])
    candidates = values[inside].astype(np.float64)
    # A value is in an interval if more intervals have begun before it than have ended.
    inside[inside] = np.searchsorted(low, candidates, side="right") != np.searchsorted(high, candidates)
    return inside
