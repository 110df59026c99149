"""Making and counting the tiles in plain PyTorch, on any device."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.blocks import Block, ScoreRectangle
from fewshot_callbacks.engine.options import forced_precision
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.count import Counts, count_pairs, count_tile
from fewshot_callbacks.engine.ranking_pass import Look, RankingPass

MANY_OPEN = 0.002
"""Share of a tile's pairs from which a float64 product of the whole tile is cheaper than their keys one by one."""


class Tile(NamedTuple):
    """Estimated keys of some queries against some negatives; -inf where the pair is no negative candidate."""

    rows: Block
    columns: Block
    both: bool
    """each pair counts for two queries"""
    precision: Precision
    estimates: Float[Tensor, "queries candidates"]
    error: Float[Tensor, "queries"]


@runtime_checkable
class TileLook(Protocol):
    """A `Look` that wants to see tiles."""

    def tile(self, walk: TorchTiles, tile: Tile) -> None:
        """See a tile of negatives."""


class TorchTiles:
    """See the module."""

    walk_: RankingPass
    rectangle: ScoreRectangle

    def prepare(self, walk: RankingPass, look: Look | None) -> None:
        """Choose the first precision."""
        del look
        if walk.precision is None:
            forced = forced_precision()
            first = Precision.HALF if walk.scores.device.type == "cuda" else Precision.FLOAT32
            walk.precision = first if forced is None else forced

    def forget(self) -> None:
        """Nothing is kept from one rectangle to the next."""

    def walk(self, walk: RankingPass, rectangle: ScoreRectangle, look: Look | None, *, counting: bool = True) -> None:
        """Take the queries of a rectangle past its candidates."""
        self.walk_, self.rectangle = walk, rectangle
        for rows in rectangle.rows:
            for columns in rectangle.columns:
                if (rectangle.of_one_set and columns.first < rows.first) or columns.part != rows.part:
                    continue
                both = rectangle.both and not (rectangle.of_one_set and columns.first == rows.first)
                tile = self._tile(rows, columns, both=both)
                if isinstance(look, TileLook):
                    look.tile(self, tile)
                if counting:
                    self._count(tile)
                pairs = int(rows.weight.sum()) * int(columns.weight.sum())
                walk.done(2 * pairs if both else pairs)
        del self.rectangle

    def _tile(self, rows: Block, columns: Block, *, both: bool) -> Tile:
        walk, rectangle = self.walk_, self.rectangle
        assert walk.precision is not None
        estimates, error = rectangle.scores.tile(rows.index, columns.index, walk.precision)
        if bool(columns.classes[0] <= rows.classes[-1]) and bool(columns.classes[-1] >= rows.classes[0]):
            estimates.masked_fill_(rows.classes[:, None] == columns.classes[None, :], -torch.inf)
        if rectangle.candidates.across_classes:
            excluded = rectangle.candidates.excluded(rows.index[:, None], columns.index[None, :])
            estimates.masked_fill_(excluded, -torch.inf)
        return Tile(rows, columns, both, walk.precision, estimates, error)

    def _count(self, tile: Tile) -> None:
        walk, (rows, columns) = self.walk_, (tile.rows, tile.columns)
        open_share = 0.0
        if rows.counts is not None and rows.counts.thresholds.shape[1]:
            open_share = self.count(
                tile, rows.counts, tile.estimates, tile.error, columns.weight if walk.repeats else None
            )
        if tile.both and columns.counts is not None and columns.counts.thresholds.shape[1]:
            scores = self.rectangle.scores
            error = (
                scores.error(columns.index, tile.precision, of_query=False)
                if tile.precision != Precision.EXACT
                else None
            )
            error = torch.zeros(len(columns), dtype=torch.float64, device=tile.error.device) if error is None else error
            turned = tile.estimates.T.contiguous()
            share = self.count(tile, columns.counts, turned, error, rows.weight if walk.repeats else None, turned=True)
            open_share = max(open_share, share)
        if open_share > 0.5 and not walk.repeats and forced_precision() is None and walk.precision is not None:
            # the next tile is likely to be as close: start one step more exact
            walk.precision = Precision(min(walk.precision + 1, Precision.EXACT))

    def count(
        self,
        tile: Tile,
        counts: Counts,
        estimates: Tensor,
        error: Tensor,
        weights: Tensor | None,
        *,
        turned: bool = False,
    ) -> float:
        """Count the candidates of a tile for the queries along one side; returns the share that stayed open."""
        scores = self.rectangle.scores
        rows, columns = count_tile(counts, estimates, error, weights)
        open_share = len(rows) / estimates.numel()
        for precision in (Precision.FLOAT32, Precision.FLOAT64):
            if tile.precision < precision and len(rows) > MANY_OPEN * estimates.numel():
                closer, error = scores.tile(tile.rows.index, tile.columns.index, precision)
                if turned:
                    closer, error = closer.T, scores.error(tile.columns.index, precision, of_query=False)
                of_pairs = None if weights is None else weights[columns]
                still = count_pairs(counts, rows, closer[rows, columns], error, of_pairs)
                rows, columns = rows[still], columns[still]
        if len(rows):
            pair = (columns, rows) if turned else (rows, columns)
            counts.add_keys(rows, self.keys_of(tile, *pair), None if weights is None else weights[columns])
        return open_share

    def keys_of(self, tile: Tile, rows: Int[Tensor, "pairs"], columns: Int[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
        """The keys of some pairs of a tile, made once for equal pairs."""
        scores, numbers = self.rectangle.scores, self.rectangle.numbers
        if tile.precision == Precision.EXACT:
            return tile.estimates[rows, columns].double()
        query, gallery = tile.rows.index[rows], tile.columns.index[columns]
        back: Tensor | None = None
        if numbers is not None:
            width = int(numbers[1].max()) + 1
            pair = numbers[0][query] * width + numbers[1][gallery]
            distinct, back = pair.unique(return_inverse=True)
            first = torch.full_like(distinct, len(pair)).scatter_reduce_(
                0, back, torch.arange(len(pair), device=pair.device), "amin"
            )
            query, gallery = query[first], gallery[first]
        keys = scores.pair_keys(query, gallery)
        return keys if back is None else keys[back]
