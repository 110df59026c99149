"""The units of scores, common to all pairs and all processes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.engine.options import compiled_kernels
from fewshot_callbacks.engine.scores.similarity import TINIEST, VectorSimilarity
from fewshot_callbacks.engine.scores.vectors import Vectors, row_scales, scaled_squares

LARGEST_SCALE = 2.0**400
"""The compiled kernels multiply in any order, and so may leave the range of float64 beyond this scale or its inverse."""


@dataclass(frozen=True, eq=False)
class Units:
    """What all scores are divided by, and from where vectors are measured.

    One power of two for all pairs keeps scores in range; it changes no comparison.
    """

    similarity: VectorSimilarity
    device: torch.device
    """where scores are computed"""
    queries: float
    """power of two that the queries are divided by"""
    gallery: float
    """power of two that the gallery items are divided by"""
    centre: Float[Tensor, "dim"]
    """zero unless the similarity is centred"""
    compiled: ModuleType | None
    """the compiled kernels, where every process can use them"""

    @classmethod
    def of_all(
        cls,
        queries: Float[Tensor, "queries dim"],
        gallery: Float[Tensor, "gallery dim"],
        similarity: VectorSimilarity,
        device: torch.device,
        processes: Processes,
    ) -> Units:
        """Agree on the units with the other processes; each calls this with the rows that it holds."""
        compiled = compiled_kernels() if device.type == queries.device.type == "cpu" else None
        sides = [queries] if gallery is queries else [queries, gallery]
        scales = [row_scales(rows, similarity.scale_of_zeros, device) for rows in sides]
        # rows of zeros that any scale suits must not look like tiny ones
        nonzero = torch.cat([scale[scale != TINIEST] if similarity.centred else scale for scale in scales])
        *largest, inverse, plain = processes.largest(
            [largest_of(scales[0]), largest_of(scales[-1]), largest_of(1 / nonzero), float(compiled is None)]
        )
        in_range = max(largest) < LARGEST_SCALE and inverse < LARGEST_SCALE
        centre = torch.zeros(queries.shape[1], dtype=torch.float64)
        if similarity.centred:
            # moving all vectors to their mean keeps their distances, and makes the products' errors smaller
            sums = processes.gather((len(gallery), gallery.sum(dim=0, dtype=torch.float64).cpu()))
            total = reduce(torch.add, (part for _, part in sums))
            centre = total / max(1, sum(count for count, _ in sums))
        return cls(
            similarity,
            device,
            *similarity.units(*largest),
            centre.to(device),
            compiled if in_range and not plain else None,
        )

    def measure(self, rows: Float[Tensor, "items dim"], *, of_query: bool) -> Vectors:
        """Measure some rows of one side."""
        unit = self.queries if of_query else self.gallery
        scale = row_scales(rows, self.similarity.scale_of_zeros, self.device)
        square, square_low = scaled_squares(rows, scale, self.compiled, self.device)
        root = square.sqrt()
        factor = self.similarity.factor(root, scale, unit)
        norm = self.similarity.norm(root, factor)
        vectors = Vectors(rows, scale, factor, square, square_low, norm, norm, self.device)
        return vectors.centred(self.centre, unit) if self.similarity.centred else vectors


def largest_of(values: Float[Tensor, "*values"]) -> float:
    """Return the maximum, or 0.0 for an empty tensor."""
    return float(values.max()) if values.numel() else 0.0
