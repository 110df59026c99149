"""The exact scores of the relevant pairs of all processes, made once more after a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.pooled.intervals import Bools, Floats, Ints, ScoreIntervals, distinct, inside_any, joined


@dataclass(frozen=True)
class RelevantPairs:
    """Exact scores of relevant pairs; every call is collective."""

    scores: Callable[[ScoreIntervals], Iterator[tuple[Tensor, Tensor | None]]]
    """those of this process, see `Thresholds.relevant_scores`"""
    processes: Processes

    def chosen(self, intervals: ScoreIntervals, inside: Callable[[Floats], Bools]) -> tuple[Floats, Ints | None]:
        """Return the scores that are inside, and how many pairs each stands for (None: one).

        Args:
            intervals: Outside of which no score is chosen.
            inside: Tells which scores are.
        """
        parts = []
        for scores, weights in self.scores(intervals) if len(intervals) else ():
            values = scores.cpu().numpy()
            chosen = inside(values)
            parts.append((values[chosen], None if weights is None else weights.cpu().numpy()[chosen]))
        own = joined(parts)
        if own[1] is None and self.processes.count > 1:
            own = np.sort(own[0]), None  # each its own; see `distinct`
        return joined(self.processes.gather(own))

    def within(self, intervals: ScoreIntervals) -> tuple[Floats, Ints | None]:
        """Return the scores inside some intervals, and how many pairs each stands for (None: one)."""
        return self.chosen(intervals, lambda scores: inside_any(scores, intervals))

    def distinct_within(self, intervals: ScoreIntervals, most: int) -> Floats | None:
        """Return the distinct scores inside some intervals, ascending; None if there are more than `most`."""
        found = np.empty(0)
        if not len(intervals):
            return found
        for scores, _ in self.scores(intervals):
            if len(found) > most:  # every process continues to the end
                continue
            values = scores.cpu().numpy()
            found = distinct(np.concatenate([found, values[inside_any(values, intervals)]]), None)[0]
        if self.processes.largest([float(len(found))])[0] > most:
            return None
        found = distinct(self.processes.joined(found), None)[0]
        return None if len(found) > most else found
