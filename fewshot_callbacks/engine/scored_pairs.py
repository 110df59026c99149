"""Exact scores of listed pairs, whose items may be in memory, on disk or in other processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.gallery import gallery_chunks
from fewshot_callbacks.engine.scale import Floats
from fewshot_callbacks.engine.vectors import Vectors


def scores_of_pairs(vectors: Vectors, queries: NDArray[Any], items: NDArray[Any], memory: float) -> Floats:
    """Return the exact score of each pair of a query of this process and an item of any process. *Collective*.

    The whole gallery is read once, in chunks.

    Args:
        vectors: Queries and gallery of this process.
        queries: (pairs,) numbers of the queries.
        items: (pairs,) numbers of the items among all items, as `gather_in_item_order` numbers them.
        memory: Budget of a chunk in bytes.
    """
    order = np.argsort(items, kind="stable")
    ordered_items = items[order]
    scores = np.empty(len(items))
    for chunk in gallery_chunks(vectors.within(memory)):
        first = chunk.first_item
        start, stop = np.searchsorted(ordered_items, [first, first + len(chunk.vectors.pairs.gallery)])
        pairs = order[start:stop]
        scores[pairs] = chunk.vectors.exact(queries[pairs], items[pairs] - first)
        del chunk  # before the next one is read
    return scores
