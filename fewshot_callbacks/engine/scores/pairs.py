"""The exact score of pairs: the true cosine, dot product or distance of two rows, rounded once to float64.

It depends on nothing but the two rows: no tile, thread, machine or order of summation. The compiled kernels
(`cpu.exact_kernels`) and plain PyTorch (`exact`) give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.scores import exact
from fewshot_callbacks.engine.scores.similarity import VectorSimilarity
from fewshot_callbacks.engine.scores.vectors import Vectors

PAIRS_AT_ONCE = {"cpu": 2**14, "cuda": 2**20}
"""Pairs whose exact scores PyTorch makes together: their sums stay in a processor's cache, or fill a GPU."""
COMPONENTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**26}
"""And components of their rows, in float64."""


@dataclass(frozen=True, eq=False)
class ExactScores:
    """The exact scores of pairs of queries and gallery items, in the units of both sides."""

    queries: Vectors
    gallery: Vectors
    similarity: VectorSimilarity
    compiled: ModuleType | None
    inverse_unit: float
    """power of two that distances are multiplied by"""
    relative: float
    """error of a float64 product of two rows, as a share of the product of their norms"""

    @property
    def single(self) -> bool:
        """Whether all components are float32 numbers, whose products are exact in float64."""
        return torch.float64 not in (self.queries.rows.dtype, self.gallery.rows.dtype)

    @cached_property
    def for_kernels(self) -> Any:
        """Both sides as the compiled kernels take them."""
        assert self.compiled is not None
        sides = [
            self.compiled.Vectors(
                side.rows.numpy(),
                (1 / side.scale).numpy(),
                side.factor.numpy(),
                side.square.numpy(),
                side.square_low.numpy(),
            )
            for side in (self.queries, self.gallery)
        ]
        return self.compiled.Pairs(*sides, self.similarity.kernel, self.single, self.inverse_unit, self.relative)

    def batched(
        self, rows: Int[Tensor, "blocks rows"], columns: Int[Tensor, "blocks columns"]
    ) -> Float[Tensor, "blocks rows columns"]:
        """Return the scores of each row of a block with each column of it."""
        if self.compiled is None:
            return self._in_pieces(rows.unsqueeze(2), columns.unsqueeze(1))
        blocks, height = rows.shape
        width = columns.shape[1]
        out = np.empty((blocks, height, width))
        first = np.repeat(np.arange(blocks) * width, height)
        self.compiled.class_scores(
            self.for_kernels, rows.numpy().ravel(), -1, first, first + width, columns.numpy().ravel(), False,
            out.reshape(blocks * height, width),
        )  # fmt: skip
        return torch.from_numpy(out)

    def of_pairs(self, rows: Int[Tensor, "pairs"], columns: Int[Tensor, "pairs"]) -> Float[Tensor, "pairs"]:
        """Return the scores of the pairs (rows[i], columns[i])."""
        if self.compiled is None:
            return self._in_pieces(rows, columns)
        out = np.empty(len(rows))
        self.compiled.pair_scores(self.for_kernels, rows.numpy(), columns.numpy(), out)
        return torch.from_numpy(out)

    def _in_pieces(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the scores of indices that are broadcast, in plain PyTorch."""
        kind = self.queries.device.type if self.queries.device.type in PAIRS_AT_ONCE else "cpu"
        items = max(1, COMPONENTS_AT_ONCE[kind] // self.queries.rows.shape[1])
        return exact.in_pieces(self._piece, rows, columns, PAIRS_AT_ONCE[kind], items)

    def _piece(self, rows: Tensor, columns: Tensor) -> Tensor:
        left, right = self.queries.in_double(rows), self.gallery.in_double(columns)
        scores = self.similarity.exact(left, right, single=self.single)
        for position in scores.isnan().nonzero().tolist():  # about one pair in 2**40, or sums that cancel
            pair = tuple(position)
            scores[pair] = self.similarity.by_fractions(*(side.at(pair, scores.shape) for side in (left, right)))
        return scores * self.similarity.exact_unit(left, right)
