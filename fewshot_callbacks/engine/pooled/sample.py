"""A sample of the negatives, which decides what is tried first, but never a result."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.scale import Floats


class Sample(NamedTuple):
    """Estimates of the negatives of sampled queries of all processes: the highest estimates, and some of the others."""

    estimates: Floats  # ascending
    counts: Floats  # (estimates,) about how many of all negatives reach each estimate

    @classmethod
    def of(cls, estimates: NDArray[np.float32], room: int, negatives: float, processes: Processes = ALONE) -> Sample:
        """Return a sample, given the estimates of this process. *Collective*.

        Args:
            estimates: In any order.
            room: About how many estimates are kept: half are the highest, and half are evenly spaced others.
            negatives: Number of negatives of all processes, which these estimates represent.
            processes: All processes.
        """
        ascending = np.sort(estimates)
        number = len(ascending)
        highest = min(number, room // 2)
        spaced = np.linspace(0, number - highest, min(number - highest, room // 2), endpoint=False).astype(np.int64)
        positions = np.append(spaced, np.arange(number - highest, number))
        # how many estimates each kept estimate stands for: itself, and all up to the next kept estimate
        stands_for = np.diff(np.append(positions, number))
        kept = ascending[positions]
        if processes.count > 1:
            kept = processes.joined(kept)
            order = np.argsort(kept, kind="stable")
            kept = kept[order]
            stands_for = processes.joined(stands_for)[order]
        if not len(kept):
            return NO_SAMPLE
        reaching = np.cumsum(stands_for[::-1])[::-1]
        return cls(kept.astype(np.float64), reaching * (negatives / reaching[0]))

    @property
    def total(self) -> float:
        """Number of all negatives."""
        return float(self.counts[0]) if len(self.counts) else 0.0

    def reaching(self, scores: Floats) -> Floats:
        """Return about how many negatives reach each score."""
        counts: Floats = np.append(self.counts, 0.0)[np.searchsorted(self.estimates, scores)]
        return counts

    def score_reached_by(self, number: float) -> float:
        """Return the highest estimate that about this many negatives reach; the lowest estimate if there are fewer."""
        position = int(np.searchsorted(-self.counts, -number, side="right")) - 1
        return float(self.estimates[max(0, position)])


# The sample if no query was sampled.
NO_SAMPLE = Sample(np.empty(0), np.empty(0))
