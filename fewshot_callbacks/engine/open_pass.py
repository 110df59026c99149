"""Opening a pass: compiled loops on the CPU, else plain PyTorch; binary codes are counted."""

from __future__ import annotations

import torch
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.candidates import Candidates, ShardIndex
from fewshot_callbacks.engine.codes.hamming_pass import HammingPass
from fewshot_callbacks.engine.codes.packing import Codes
from fewshot_callbacks.engine.matrix import score_matrix
from fewshot_callbacks.engine.options import Progress, current_options
from fewshot_callbacks.engine.precision import Precision
from fewshot_callbacks.engine.pytorch.tiles import TorchTiles
from fewshot_callbacks.engine.ranking_pass import RankingPass
from fewshot_callbacks.engine.ranks import BestMatches
from fewshot_callbacks.engine.scores.products import ScoreTiles, Similarity
from fewshot_callbacks.engine.tile_maker import TileMaker

Compared = ScoreTiles | tuple[Codes, Codes]
"""What is compared: vectors with their scores, or packed codes."""


def compare(
    queries: Tensor | Codes,
    gallery: Tensor | Codes,
    similarity: Similarity,
    device: torch.device | None = None,
    processes: Processes = ALONE,
) -> Compared:
    """Measure the vectors of this process, in units common to all; codes need no measuring."""
    if isinstance(queries, Codes) and isinstance(gallery, Codes):
        return queries, gallery
    assert isinstance(queries, Tensor)
    assert isinstance(gallery, Tensor)
    return ScoreTiles.from_rows(queries, gallery, similarity, device, processes)


def open_pass(
    compared: Compared,
    candidates: Candidates,
    memory_bytes: int,
    *,
    processes: Processes = ALONE,
    share: ShardIndex | None = None,
    best: BestMatches | None = None,
    precision: Precision | None = None,
    progress: Progress | None = None,
) -> RankingPass | HammingPass:
    """Open a pass over all pairs of queries and gallery; collective.

    Args:
        compared: what this process holds.
        candidates: who may be retrieved, of all queries and the whole gallery.
        memory_bytes: budget of each process beyond its embeddings.
        processes: who holds the rest.
        share: which of all items this process holds; by default all.
        best: rank the best match of each query of this process alone, which is known. Codes need no such help.
        precision: of the first products; by default the fastest on a sample.
        progress: called with the pairs that are done and the pairs that there are.
    """
    if not isinstance(compared, ScoreTiles):
        own = candidates if share is None else candidates.share(*share)
        return HammingPass(*compared, own, memory_bytes, progress, processes)
    options = current_options()
    matrix = score_matrix(
        compared, candidates, memory_bytes, options, processes=processes, share=share, best=best is not None
    )
    tile_maker: TileMaker = TorchTiles(fixed=options.first_precision is not None)
    if compared.compiled is not None:
        from fewshot_callbacks.engine.cpu.tiles import NumbaTiles  # noqa: PLC0415 - needs numba

        tile_maker = NumbaTiles(matrix)
    return RankingPass(matrix, tile_maker, best, precision, progress)
