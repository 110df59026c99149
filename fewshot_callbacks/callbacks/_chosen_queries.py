"""Which queries of an evaluated set are shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QueryResults:
    """How well each query was answered, and which of them may be shown."""

    # place of each among all queries of the set
    places: Int[np.ndarray, "queries"]
    # NaN for a query without a relevant item
    average_precision: Float[np.ndarray, "queries"]
    # of the first relevant item; the mean over the orders of items that tie
    reciprocal_rank: Float[np.ndarray, "queries"]
    # the order in which queries are drawn
    hashes: UInt64[np.ndarray, "queries"]

    @classmethod
    def of(
        cls,
        per_query: Mapping[str, Float[Tensor, "queries"]],
        places: Int[np.ndarray, "queries"],
        hashes: UInt64[np.ndarray, "queries"],
        shown: Bool[np.ndarray, "queries"],
    ) -> QueryResults:
        """Read a report's values.

        Args:
            per_query: Of the report.
            places: Place of each query of the report among all.
            hashes: Of each query of the report.
            shown: Whether it may be shown.
        """
        precision, reciprocal = (per_query[name].numpy()[shown] for name in ("mAP", "mrr"))
        return cls(places[shown], precision, reciprocal, hashes[shown])

    def __len__(self) -> int:
        """How many queries may be shown."""
        return len(self.places)

    def worst(self, count: int) -> list[int]:
        """Choose those of the least average precision that are not perfect; equal ones in the order of the sample."""
        imperfect = np.flatnonzero(self.average_precision < 1)  # not NaN
        order = np.lexsort((self.hashes[imperfect], self.average_precision[imperfect]))
        return [int(place) for place in self.places[imperfect[order[:count]]]]

    def mistaken(self, count: int) -> list[int]:
        """Choose some whose first neighbour may be irrelevant, those of a sample if there are more."""
        mistaken = np.flatnonzero(self.reciprocal_rank < 1)
        order = self.hashes[mistaken].argsort()
        return [int(place) for place in self.places[mistaken[order[:count]]]]

    def sample(self, count: int) -> list[int]:
        """Choose the seeded sample."""
        return [int(place) for place in self.places[self.hashes.argsort()[:count]]]

    def caption(self, place: int) -> str:
        """Say how well a query was answered."""
        [row] = np.flatnonzero(self.places == place)
        precision, reciprocal = float(self.average_precision[row]), float(self.reciprocal_rank[row])
        if math.isnan(precision):
            return "no relevant item"
        rank = 1 / reciprocal
        about = "" if abs(rank - round(rank)) < 1e-6 * rank else "about "  # a mean over the orders of ties
        return f"AP {precision:.3f}, first hit at rank {about}{round(rank):,}"
