"""A tile of estimates in PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.precision import Precision


@dataclass(frozen=True)
class Tile:
    """Estimated scores of some queries with some negatives; -inf where the pair is no negative candidate."""

    rectangle: ScoreRectangle
    """that it is a part of"""
    rows: Block
    columns: Block
    both: bool
    """each pair counts for two queries"""
    precision: Precision
    estimates: Float[Tensor, "queries candidates"]
    error: Float[Tensor, "queries"]

    @classmethod
    def make(cls, rectangle: ScoreRectangle, rows: Block, columns: Block, precision: Precision) -> Tile:
        """Multiply two blocks of a rectangle."""
        both = rectangle.symmetric and not (rectangle.is_square and columns.first == rows.first)
        estimates, error = rectangle.scores.tile(rows.index, columns.index, precision)
        if bool(columns.classes[0] <= rows.classes[-1]) and bool(columns.classes[-1] >= rows.classes[0]):
            estimates.masked_fill_(rows.classes[:, None] == columns.classes[None, :], -torch.inf)
        if rectangle.candidates.across_classes:
            excluded = rectangle.candidates.excluded(rows.index[:, None], columns.index[None, :])
            estimates.masked_fill_(excluded, -torch.inf)
        return cls(rectangle, rows, columns, both, precision, estimates, error)

    @property
    def column_error(self) -> Float[Tensor, "candidates"]:
        """The error of the estimates for each column."""
        if self.precision == Precision.EXACT:
            return torch.zeros(len(self.columns), dtype=torch.float64, device=self.error.device)
        return self.rectangle.scores.error(self.columns.index, self.precision, of_query=False)

    def exact_scores(self, rows: Int[Tensor, "pairs"], columns: Int[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
        """Return the exact scores of some pairs, computed once for equal pairs."""
        if self.precision == Precision.EXACT:
            return self.estimates[rows, columns].double()
        return exact_scores(self.rectangle, self.rows.index[rows], self.columns.index[columns])


def exact_scores(
    rectangle: ScoreRectangle, query: Int[Tensor, "pairs"], gallery: Int[Tensor, "pairs"]
) -> Float[Tensor, "pairs"]:
    """Return the exact scores of pairs of a query and a gallery item, computed once for equal pairs."""
    scores, numbers = rectangle.scores, rectangle.numbers
    if not rectangle.repeats:
        return scores.pair_scores(query, gallery)
    pair = numbers[0][query] * (int(numbers[1].max()) + 1) + numbers[1][gallery]
    distinct, back = pair.unique(return_inverse=True)
    first = torch.full_like(distinct, len(pair)).scatter_reduce_(
        0, back, torch.arange(len(pair), device=pair.device), "amin"
    )
    exact: Tensor = scores.pair_scores(query[first], gallery[first])[back]
    return exact
