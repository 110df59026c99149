"""What makes tiles of scores and counts them: compiled loops on the CPU, or PyTorch on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from fewshot_callbacks.engine.blocks import ScoreRectangle
from fewshot_callbacks.engine.matrix import ScoreMatrix
from fewshot_callbacks.engine.pooled.histogram import Forecast, PooledCounts
from fewshot_callbacks.engine.pooled.recount import Recount
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.thresholds import Thresholds

Done = Callable[[int], None]
"""Called with the number of pairs that are done."""


class Choice(NamedTuple):
    """How a pass begins."""

    precision: Precision
    chunk: int
    """components that one float32 product sums up"""
    forecast: Forecast | None = None
    """what a sample tells of the negatives that will be wanted"""


class TileMaker(ABC):
    """Makes the tiles of rectangles, and counts them for their rows and columns."""

    @abstractmethod
    def choose(self, matrix: ScoreMatrix, thresholds: Thresholds, pooled: PooledCounts | None) -> Choice:
        """Choose the precision of the first products.

        Args:
            matrix: The pairs.
            thresholds: Of the queries.
            pooled: What will be asked of all pairs.
        """

    @abstractmethod
    def count(
        self, rectangle: ScoreRectangle, precision: Precision, pooled: PooledCounts | None, done: Done
    ) -> Precision:
        """Count the candidates of a rectangle for its queries, and all its pairs for `pooled`.

        Returns:
            The precision with which to continue.
        """

    @abstractmethod
    def recount(self, rectangle: ScoreRectangle, precision: Precision, recount: Recount, done: Done) -> None:
        """Count all pairs of a rectangle against the thresholds of `recount`."""

    def forget(self) -> None:  # noqa: B027 - what keeps nothing has nothing to forget
        """Release what was kept of the queries for the next rectangle."""
