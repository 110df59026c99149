"""Which way through all pairs is taken: with the compiled kernel on the CPU, else in plain PyTorch; codes are counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.codes.hamming_pass import HammingPass
from fewshot_callbacks.engine.codes.packing import Codes
from fewshot_callbacks.engine.exchange import ShardedPass, ShardIndex, moved
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.tiles import TorchTiles
from fewshot_callbacks.engine.ranking_pass import RankingPass, TileMaker
from fewshot_callbacks.engine.ranks import BestMatches
from fewshot_callbacks.engine.scores.products import ScoreTiles, Similarity

Begin = Callable[[Candidates, BestMatches | None], RankingPass | HammingPass]
"""Makes a pass over these candidates, given the best matches of each query if they are known."""

Regroup = Callable[[tuple[Tensor, Tensor]], tuple[Begin, Tensor, BestMatches | None]]
"""Brings each query and item to the process of this rank (-1: to none). What begins a pass there, which queries are here
then, and their best matches if they are known."""


def ranking_pass(
    tiles: ScoreTiles,
    candidates: Candidates,
    memory_bytes: int,
    *,
    processes: Processes = ALONE,
    share: ShardIndex | None = None,
    **options: Any,
) -> RankingPass:
    """A pass that is walked in the way that suits its scores; the arguments are those of `RankingPass` or `ShardedPass`."""
    tile_maker: TileMaker = TorchTiles()
    if tiles.compiled is not None:
        from fewshot_callbacks.engine.cpu.tiles import NumbaTiles  # noqa: PLC0415 - needs numba

        tile_maker = NumbaTiles()
    if share is None:
        return RankingPass(tiles, candidates, memory_bytes, tile_maker, **options)
    return ShardedPass(tiles, candidates, memory_bytes, tile_maker, processes=processes, share=share, **options)


def scores_of(
    queries: Tensor | Codes,
    gallery: Tensor | Codes,
    similarity: Similarity,
    device: torch.device | None = None,
    processes: Processes = ALONE,
) -> ScoreTiles | tuple[Codes, Codes]:
    """What is compared: vectors with their scores, or packed codes."""
    if isinstance(queries, Codes) and isinstance(gallery, Codes):
        return queries, gallery
    assert isinstance(queries, Tensor)
    assert isinstance(gallery, Tensor)
    return ScoreTiles(queries, gallery, similarity, device, processes)


def passes(
    scores: ScoreTiles | tuple[Codes, Codes],
    memory_bytes: int,
    *,
    processes: Processes = ALONE,
    share: ShardIndex | None = None,
    **options: Any,
) -> Begin:
    """Passes over vectors or codes, of candidates among all items; the options are those of `RankingPass`.

    Args:
        scores: of what this process holds.
        memory_bytes: budget of each process beyond that.
        processes: who holds the rest.
        share: which of all items this process holds; None if that is all of them.
        **options: of `RankingPass`.
    """

    def begin(candidates: Candidates, best: BestMatches | None) -> RankingPass | HammingPass:
        if isinstance(scores, ScoreTiles):
            return ranking_pass(
                scores, candidates, memory_bytes, processes=processes, share=share, best=best, **options
            )
        own = candidates if share is None else candidates.share(*share)
        return HammingPass(*scores, own, memory_bytes, options.get("progress"), processes)

    return begin


def regrouping(
    scores: ScoreTiles,
    memory_bytes: int,
    processes: Processes,
    share: ShardIndex,
    best: BestMatches | None,
    precision: Precision | None,
) -> Regroup:
    """Brings items that are searched together into one process, and begins passes over them there; see `passes`."""

    def regroup(owners: tuple[Tensor, Tensor]) -> tuple[Begin, Tensor, BestMatches | None]:
        tiles, here, found = moved(scores, share, processes, owners, best)

        def begin(candidates: Candidates, best: BestMatches | None) -> RankingPass:
            own = candidates.share(*(index.to(candidates.query_order.device) for index in here))
            return ranking_pass(tiles, own, memory_bytes, best=best, precision=precision)

        return begin, here.queries, found

    return regroup
