"""Measuring what is compared: vectors, or binary codes, which need no measuring."""

from __future__ import annotations

import torch
from torch import Tensor

from fewshot_callbacks.distributed.processes import ALONE, Processes
from fewshot_callbacks.engine.codes.packing import Codes, HammingScores
from fewshot_callbacks.engine.scores.products import ScoreTiles
from fewshot_callbacks.engine.scores.similarity import Similarity


def compare(
    queries: Tensor | Codes,
    gallery: Tensor | Codes,
    similarity: Similarity,
    device: torch.device | None = None,
    processes: Processes = ALONE,
) -> ScoreTiles | HammingScores:
    """Measure the vectors of this process, in units common to all."""
    if isinstance(queries, Codes) and isinstance(gallery, Codes):
        return HammingScores(queries, gallery)
    assert isinstance(queries, Tensor)
    assert isinstance(gallery, Tensor)
    return ScoreTiles.from_rows(queries, gallery, similarity, device, processes)
