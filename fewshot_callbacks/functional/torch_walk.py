"""Making and counting the tiles in plain PyTorch, on any device."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.functional.kernels.reference import Counts, count_pairs, count_tile
from fewshot_callbacks.functional.ranks import Look, Meeting, Panel, RankingPass, forced_rung
from fewshot_callbacks.functional.similarity import DOUBLE, EXACT, HALF, SINGLE

MANY_OPEN = 0.002
"""Share of a tile's pairs from which a float64 product of the whole tile is cheaper than their keys one by one."""


class Tile(NamedTuple):
    """Estimated keys of some queries against some negatives; -inf where the pair is no negative candidate."""

    rows: Panel
    columns: Panel
    both: bool
    """each pair counts for two queries"""
    rung: int
    estimates: Float[Tensor, "queries candidates"]
    error: Float[Tensor, "queries"]


@runtime_checkable
class TileLook(Protocol):
    """A `Look` that wants to see tiles."""

    def tile(self, walk: TorchWalk, tile: Tile) -> None:
        """See a tile of negatives."""


class TorchWalk:
    """See the module."""

    walk_: RankingPass
    meeting: Meeting

    def prepare(self, walk: RankingPass, look: Look | None) -> None:
        """Choose the first rung."""
        del look
        if walk.rung is None:
            forced = forced_rung()
            first = HALF if walk.scores.device.type == "cuda" else SINGLE
            walk.rung = first if forced is None else forced

    def forget(self) -> None:
        """Nothing is kept from one meeting to the next."""

    def walk(self, walk: RankingPass, meeting: Meeting, look: Look | None, *, counting: bool = True) -> None:
        """Take the queries of a meeting past its candidates."""
        self.walk_, self.meeting = walk, meeting
        for rows in meeting.rows:
            for columns in meeting.columns:
                if (meeting.of_one_set and columns.first < rows.first) or columns.part != rows.part:
                    continue
                both = meeting.both and not (meeting.of_one_set and columns.first == rows.first)
                tile = self._tile(rows, columns, both=both)
                if isinstance(look, TileLook):
                    look.tile(self, tile)
                if counting:
                    self._count(tile)
                pairs = int(rows.weight.sum()) * int(columns.weight.sum())
                walk.done(2 * pairs if both else pairs)
        del self.meeting

    def _tile(self, rows: Panel, columns: Panel, *, both: bool) -> Tile:
        walk, meeting = self.walk_, self.meeting
        assert walk.rung is not None
        estimates, error = meeting.scores.tile(rows.index, columns.index, walk.rung)
        if bool(columns.classes[0] <= rows.classes[-1]) and bool(columns.classes[-1] >= rows.classes[0]):
            estimates.masked_fill_(rows.classes[:, None] == columns.classes[None, :], -torch.inf)
        if meeting.candidates.across_classes:
            excluded = meeting.candidates.excluded(rows.index[:, None], columns.index[None, :])
            estimates.masked_fill_(excluded, -torch.inf)
        return Tile(rows, columns, both, walk.rung, estimates, error)

    def _count(self, tile: Tile) -> None:
        walk, (rows, columns) = self.walk_, (tile.rows, tile.columns)
        open_share = 0.0
        if rows.counts is not None and rows.counts.thresholds.shape[1]:
            open_share = self.count(
                tile, rows.counts, tile.estimates, tile.error, columns.weight if walk.repeats else None
            )
        if tile.both and columns.counts is not None and columns.counts.thresholds.shape[1]:
            scores = self.meeting.scores
            error = scores.error(columns.index, tile.rung, of_query=False) if tile.rung != EXACT else None
            error = torch.zeros(len(columns), dtype=torch.float64, device=tile.error.device) if error is None else error
            turned = tile.estimates.T.contiguous()
            share = self.count(tile, columns.counts, turned, error, rows.weight if walk.repeats else None, turned=True)
            open_share = max(open_share, share)
        if open_share > 0.5 and not walk.repeats and forced_rung() is None and walk.rung is not None:
            walk.rung = min(walk.rung + 1, EXACT)  # the next tile is likely to be as close: start one rung higher

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
        scores = self.meeting.scores
        rows, columns = count_tile(counts, estimates, error, weights)
        open_share = len(rows) / estimates.numel()
        for rung in (SINGLE, DOUBLE):
            if tile.rung < rung and len(rows) > MANY_OPEN * estimates.numel():
                closer, error = scores.tile(tile.rows.index, tile.columns.index, rung)
                if turned:
                    closer, error = closer.T, scores.error(tile.columns.index, rung, of_query=False)
                of_pairs = None if weights is None else weights[columns]
                still = count_pairs(counts, rows, closer[rows, columns], error, of_pairs)
                rows, columns = rows[still], columns[still]
        if len(rows):
            pair = (columns, rows) if turned else (rows, columns)
            counts.add_keys(rows, self.keys_of(tile, *pair), None if weights is None else weights[columns])
        return open_share

    def keys_of(self, tile: Tile, rows: Int[Tensor, "pairs"], columns: Int[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
        """The keys of some pairs of a tile, made once for equal pairs."""
        scores, numbers = self.meeting.scores, self.meeting.numbers
        if tile.rung == EXACT:
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
