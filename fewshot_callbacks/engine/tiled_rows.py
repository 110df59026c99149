"""The rows of the tiles: all rows, or distinct rows that stand for them.

An evaluation does not know about equal rows. It computes tiles of a `TiledRows` object, which derives the ranks of its
queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from fewshot_callbacks.engine.counted_values import CountedValues
from fewshot_callbacks.engine.distinct import DistinctRows
from fewshot_callbacks.engine.layout import Layout
from fewshot_callbacks.engine.pooled.sample import Sample
from fewshot_callbacks.engine.ranks import QueryRanks, Ranks
from fewshot_callbacks.engine.relevance import PairRelevance
from fewshot_callbacks.engine.thresholds import RelevantScores, Thresholds
from fewshot_callbacks.engine.vectors import Vectors


@runtime_checkable
class RelevantPairScores(Protocol):
    """The exact scores of all relevant pairs, and the thresholds of the queries (or distinct queries) in the tiles."""

    def thresholds(self, batch: slice) -> Thresholds:
        """Return the thresholds of one batch. *Collective*."""

    def ascending(self) -> Iterator[CountedValues]:
        """Yield the scores of all relevant pairs of this process in ascending pieces. *Collective*."""

    def scores_of_batch(self, batch: slice, thresholds: Thresholds) -> Iterator[tuple[CountedValues, CountedValues]]:
        """Yield the scores of the relevant pairs of one batch, and of its negatives that are in no tile, in pieces.

        Not collective.

        Args:
            batch: One of the batches.
            thresholds: Its thresholds.
        """

    def all_listed_negatives(self) -> CountedValues:
        """Return the exact scores of all negatives of this process that are in no tile. Thresholds must be cached."""

    def listed_negatives(self) -> Iterator[CountedValues]:
        """Yield the exact scores of the negatives of this process that are in no tile, in pieces. *Collective*."""

    def release_thresholds(self) -> None:
        """Free cached thresholds."""


@runtime_checkable
class TiledRows(Protocol):
    """The rows of the tiles, and the way from their ranks to the ranks of all queries."""

    @property
    def vectors(self) -> Vectors:
        """The rows of the tiles."""

    @property
    def relevance(self) -> PairRelevance:
        """The relevance of the rows of the tiles. No tile counts the pairs in its lists."""

    @property
    def bytes(self) -> int:
        """Memory of these rows in addition to the vectors of the evaluation."""

    @property
    def derived_ranks(self) -> int | None:
        """Number of this process's ranks that are derived from ranks of the tiles' rows; None if there are none."""

    def scores(self, batches: Sequence[slice], layout: Layout, *, places: bool) -> RelevantPairScores:
        """Return the exact scores of all relevant pairs.

        Args:
            batches: The rows of each batch; the same number of batches in every process.
            layout: Decides what is cached.
            places: Whether the thresholds come with their places in the lists.
        """

    def all_negatives(self, pairs_in_tiles: float, sample: Sample) -> float:
        """Return about how many negatives all queries of all processes have.

        Args:
            pairs_in_tiles: Number of pairs of the rows of the tiles.
            sample: A sample of the negatives.
        """

    def ranks_of_queries(
        self, batch: slice, thresholds: Thresholds, ranks: Ranks, pairs: int, *, places: bool
    ) -> Iterator[QueryRanks]:
        """Yield the ranks of all queries of a batch, in pieces.

        Args:
            batch: The rows of the batch.
            thresholds: Their thresholds.
            ranks: The counts of the tiles at these thresholds. They may be changed in place, so call this only once.
            pairs: Largest number of list entries in a piece, unless a single query has more.
            places: Whether the ranks come with the places of the items in the lists of their queries.
        """


class AllRows:
    """All rows. Each row stands for itself.

    Args:
        vectors: Queries and gallery.
        relevance: Their relevance.
    """

    bytes = 0
    derived_ranks = None

    def __init__(self, vectors: Vectors, relevance: PairRelevance) -> None:
        self.vectors = vectors
        self.relevance = relevance

    def scores(self, batches: Sequence[slice], layout: Layout, *, places: bool) -> RelevantScores:
        """Return the exact scores of all relevant pairs."""
        return RelevantScores(self.vectors, self.relevance, batches, cache=layout.cache_scores, places=places)

    def all_negatives(self, pairs_in_tiles: float, sample: Sample) -> float:
        """Return the number of pairs in the tiles. The few relevant pairs are counted as well."""
        del sample
        return pairs_in_tiles

    def ranks_of_queries(
        self, batch: slice, thresholds: Thresholds, ranks: Ranks, pairs: int, *, places: bool
    ) -> Iterator[QueryRanks]:
        """Yield the ranks of the queries once, since the tiles have counted all pairs."""
        del thresholds, pairs, places
        yield QueryRanks(np.arange(batch.start, batch.stop), ranks)


def tiled_rows(vectors: Vectors, relevance: PairRelevance, memory: float) -> TiledRows:
    """Return the rows for the tiles: distinct rows if they pay, otherwise all rows. *Collective*.

    Args:
        vectors: Queries and gallery.
        relevance: Their relevance.
        memory: Budget in bytes beyond the vectors.
    """
    return DistinctRows.where_they_pay(vectors, relevance, memory) or AllRows(vectors, relevance)
