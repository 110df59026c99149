"""What is odd about embeddings, for the notes of a report: zero rows, a collapse, a row far longer than the others."""

from __future__ import annotations

import numpy as np

from fewshot_callbacks.engine.vectors import Vectors


def zero_vectors(vectors: Vectors) -> int:
    """Return how many queries, or items if these are more, are zero, so that their cosine is taken for 0; collective."""
    if vectors.similarity != "cosine":
        return 0
    return int(vectors.processes.summed(np.array([(norms == 0).sum() for norms in vectors.norms])).max())


def have_collapsed(vectors: Vectors) -> bool:
    """Find out whether all queries are equal, and all items, and there are several of either; collective."""
    pairs = vectors.pairs
    sides = ((pairs.queries, pairs.query_twin), (pairs.gallery, pairs.gallery_twin))
    own = [(len(rows), bool((twin == twin[:1]).all()), rows[:1].tobytes()) for rows, twin in sides]
    every = [[side for side in of_side if side[0]] for of_side in zip(*vectors.processes.gather(own), strict=True)]
    several = any(sum(rows for rows, *_ in of_side) > 1 for of_side in every)
    return several and all(
        all(equal for _, equal, _ in of_side) and len({row for *_, row in of_side}) == 1 for of_side in every
    )


def longest_item(vectors: Vectors) -> tuple[int, float]:
    """Return the longest item of this process, and how many times as long as the median it is.

    (-1, 1.0) where lengths do not matter, and where the median is zero.
    """
    norms = vectors.norms[-1]
    median = np.sort(norms)[(len(norms) - 1) // 2] if len(norms) else 0.0
    if vectors.similarity in ("cosine", "hamming") or median == 0.0:
        return -1, 1.0
    longest = int(norms.argmax())
    return longest, float(norms[longest] / median)
