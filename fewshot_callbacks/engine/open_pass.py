"""Opening a pass: compiled loops on the CPU, Triton on CUDA, else PyTorch; codes are counted. And counting all pairs."""

from __future__ import annotations

from collections.abc import Sequence

from fewshot_callbacks.distributed.processes import ALONE, Processes, ShardIndex
from fewshot_callbacks.engine.candidates import Candidates
from fewshot_callbacks.engine.codes.hamming_pass import HammingCounts, HammingPass
from fewshot_callbacks.engine.codes.packing import HammingScores
from fewshot_callbacks.engine.matrix import score_matrix
from fewshot_callbacks.engine.options import Progress, current_options, triton_kernels
from fewshot_callbacks.engine.pooled.first_counts import FirstCounts
from fewshot_callbacks.engine.pooled.histogram import PooledCounts, Wanted
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.tiles import TorchTiles
from fewshot_callbacks.engine.ranking_pass import RankingPass
from fewshot_callbacks.engine.ranks import BestMatches
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.tile_maker import TileMaker

Pass = RankingPass | HammingPass
"""Ranks all pairs of queries and gallery, of vectors or of binary codes; both have the same methods."""

PairCounts = FirstCounts | HammingCounts
"""Counts all pairs while a pass runs, regardless of the query; both have the same methods."""


def pair_counts(ranking: Pass, wanted: Wanted, thresholds: Sequence[float] = ()) -> PairCounts:
    """Return what counts all pairs of a pass: it runs the pass.

    Args:
        ranking: The pass; it has not been run.
        wanted: How many of the highest negatives will have to be known.
        thresholds: Scores at which the pairs will have to be counted.
    """
    if isinstance(ranking, HammingPass):
        return HammingCounts(ranking)
    return FirstCounts(ranking, PooledCounts(ranking.matrix, wanted, thresholds))


def open_pass(
    scores: ScoreTiles | HammingScores,
    candidates: Candidates,
    memory_bytes: int,
    *,
    processes: Processes = ALONE,
    share: ShardIndex | None = None,
    best: BestMatches | None = None,
    precision: Precision | None = None,
    progress: Progress | None = None,
) -> Pass:
    """Open a pass over all pairs of queries and gallery; collective.

    Args:
        scores: Of what this process holds, see `scores.compare`.
        candidates: Who may be retrieved, of all queries and the whole gallery.
        memory_bytes: Budget of each process beyond its embeddings.
        processes: Who holds the rest.
        share: Which of all items this process holds; by default all.
        best: Rank the best match of each query of this process alone, which is known. Codes need no such help.
        precision: Of the first products; by default the fastest on a sample.
        progress: Called with the pairs that are done and the pairs that there are.
    """
    if isinstance(scores, HammingScores):
        own = candidates if share is None else candidates.share(*share)
        return HammingPass(scores, own, memory_bytes, progress, processes)
    options = current_options()
    matrix = score_matrix(
        scores, candidates, memory_bytes, options, processes=processes, share=share, best=best is not None
    )
    tile_maker: TileMaker = TorchTiles(fixed=options.first_precision is not None)
    if scores.compiled is not None:
        from fewshot_callbacks.engine.cpu.tiles import NumbaTiles  # noqa: PLC0415 - needs numba

        tile_maker = NumbaTiles(matrix)
    elif (kernels := triton_kernels(scores.device)) is not None:
        from fewshot_callbacks.engine.cuda.tiles import TritonTiles  # noqa: PLC0415 - not loaded where it is not used

        tile_maker = TritonTiles(matrix, kernels)
    return RankingPass(matrix, tile_maker, best, precision, progress)
