"""What a thread records of all pairs while it counts them, regardless of the query."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class PairRecord(NamedTuple):
    """A histogram of the scores, and the pairs with the highest estimates; the compiled kernels fill it."""

    histogram: NDArray[np.int64]  # (bins + 1,) the first bin is for what lies below all others, and for no candidates
    origin: float
    scale: float
    floor: float  # a screen records no value below this one
    cut: float  # pairs with estimates from here on are collected
    values: NDArray[np.float64]  # (capacity,) their estimates
    rows: NDArray[np.int32]  # (capacity,) their queries
    columns: NDArray[np.int32]  # (capacity,) and their gallery items
    weights: NDArray[np.int64]  # (capacity,) how many pairs each stands for; empty where that is the same for all
    filled: NDArray[np.int64]  # (3,) pairs collected; pairs left open by the estimate; exact scores computed

    @classmethod
    def nothing(cls) -> PairRecord:
        """Return a record in which nothing is recorded."""
        return cls.empty(2, 0.0, 1e-30, math.inf, math.inf, 0, weighted=False)  # scale not 0: -inf times 0 is no number

    @classmethod
    def empty(
        cls, bins: int, origin: float, scale: float, floor: float, cut: float, capacity: int, *, weighted: bool
    ) -> PairRecord:
        """Return a record of no pair yet."""
        return cls(
            np.zeros(bins, np.int64),
            origin,
            scale,
            floor,
            cut,
            np.empty(capacity),
            np.empty(capacity, np.int32),
            np.empty(capacity, np.int32),
            np.empty(capacity if weighted else 0, np.int64),
            np.zeros(3, np.int64),
        )

    def compacted(self) -> PairRecord:
        """Make room if the record is more than half full: the highest half stays, and the cut rises."""
        filled, capacity = int(self.filled[0]), len(self.values)
        if filled <= capacity // 2:
            return self
        if filled > capacity:  # the buffer overflowed, so the kept pairs are incomplete at every score
            self.filled[0] = 0
            return self._replace(cut=math.inf)
        cut = float(np.partition(self.values[:filled], filled // 2)[filled // 2])
        keep = self.values[:filled] >= cut
        kept = int(keep.sum())
        if kept > capacity // 2 + capacity // 4:  # thousands of equal estimates
            self.filled[0] = 0
            return self._replace(cut=math.inf)
        for array in (self.values, self.rows, self.columns, self.weights):
            if len(array):
                array[:kept] = array[:filled][keep]
        self.filled[0] = kept
        return self._replace(cut=cut)
