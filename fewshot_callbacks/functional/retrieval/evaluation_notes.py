"""Notes on an evaluation: what a reader of its numbers should know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from torch import Tensor

from fewshot_callbacks.engine.vectors import Vectors

# Ratio to the median length from which a note names the longest embedding.
LONGEST_RATIO = 1000.0

# How the note on queries without a match describes them.
WITHOUT_MATCH = "have no match and are left out of every mean"

# Beginning of the note that there is no Grouped Recall.
LEFT_OUT = "Grouped Recall is left out"


def notes_on(
    vectors: Vectors, places: Int[Tensor, "own"], relevant: Int[Tensor, "queries"], tied: Bool[Tensor, "queries"]
) -> list[str]:
    """Return notes that a reader of the means should know. Collective.

    Args:
        vectors: Queries and gallery.
        places: Index of each gallery item of this process among all.
        relevant: Number of relevant candidates of each query.
        tied: Whether a relevant item of each query ties with a negative.
    """
    queries = len(relevant)
    without_match = int((relevant == 0).sum())
    ties = int(tied.sum())
    zero = _zero_vectors(vectors)
    collapsed = _have_collapsed(vectors)
    notes = []
    if without_match:
        notes.append(f"{without_match} of {queries} queries {WITHOUT_MATCH}.")
    if collapsed and queries > 1:
        notes.append("The embeddings have collapsed: all are the same vector, and every ranking is at chance level.")
    if _are_packed(vectors):
        notes.append(
            "The embeddings look like bytes that hold 8 bits of a code each, and are compared as numbers, which says "
            "nothing of codes. Unpack these, np.unpackbits(np.asarray(queries).astype(np.uint8), axis=1), or of int8 "
            "np.unpackbits(np.asarray(queries).astype(np.int8).view(np.uint8) ^ 128, axis=1), and pass "
            "similarity='hamming'."
        )
    if zero:
        notes.append(f"{zero} embeddings have length zero: their cosine similarity to everything is 0.")
    if ties > 0.01 * queries and not collapsed:
        notes.append(f"{ties} of {queries} queries have relevant items that tie with irrelevant ones.")
    return notes + _note_of_longest(vectors, places)


def _zero_vectors(vectors: Vectors) -> int:
    """Return how many queries, or items if these are more, are zero, so that their cosine is taken for 0. Collective."""
    if vectors.scale.similarity != "cosine":
        return 0
    sides = [vectors.query_rows]
    if not vectors.are_read:  # items in files are not looked at all at once
        sides.append(vectors.item_rows)
    return int(vectors.processes.summed(np.array([(side.norms == 0).sum() for side in sides])).max())


# Rows that are searched for bytes of packed bits, and the fewest bytes that are judged.
PACKED_ROWS = 1024

LEAST_BYTES = 1024

# A quarter of the bytes of random bits lie in the outer quarter of their range; of numbers that were quantised to int8 by
# their range a hundredth do, and of pixels most.
PACKED_SHARE = 0.15, 0.4


def _are_packed(vectors: Vectors) -> bool:
    """Return whether the rows of all processes look like bytes of 8 bits each. Collective."""
    rows = vectors.pairs.queries[:PACKED_ROWS]
    looks = False
    if vectors.scale.similarity != "hamming" and rows.size >= LEAST_BYTES and bool((rows == np.rint(rows)).all()):
        lowest = float(rows.min())
        highest = float(rows.max())
        middle = -0.5 if lowest < 0 else 127.5
        is_byte = middle - 127.5 <= lowest and highest <= middle + 127.5
        share = float((np.abs(rows - middle) > 96).mean())
        looks = is_byte and PACKED_SHARE[0] < share < PACKED_SHARE[1]
    has_other = len(rows) > 0 and not looks
    any_looks, any_other = vectors.processes.largest([float(looks), float(has_other)])
    return bool(any_looks) and not any_other


def _have_collapsed(vectors: Vectors) -> bool:
    """Return whether all queries are equal, and all items, and there are several of either. Collective."""
    pairs = vectors.pairs
    sides = ((pairs.queries, pairs.query_first_duplicate), (pairs.gallery, pairs.gallery_first_duplicate))
    summaries = [_RowSummary(len(rows), bool((first == first[:1]).all()), rows[:1].tobytes()) for rows, first in sides]
    by_side = zip(*vectors.processes.gather(summaries), strict=True)
    if vectors.are_read:
        return False
    has_several = False
    for summaries_of_side in by_side:
        filled = [summary for summary in summaries_of_side if summary.rows]
        if not all(summary.are_equal for summary in filled) or len({summary.first_row for summary in filled}) != 1:
            return False
        has_several |= sum(summary.rows for summary in filled) > 1
    return has_several


class _RowSummary(NamedTuple):
    """What tells whether the rows of all processes are equal, from one process."""

    rows: int
    """number of rows"""
    are_equal: bool
    """whether all of them are equal"""
    first_row: bytes


def _note_of_longest(vectors: Vectors, places: Int[Tensor, "own"]) -> list[str]:
    """Return a note on an embedding far longer than the others, which is seldom intended and slow. Collective.

    Args:
        vectors: Queries and gallery.
        places: Index of each gallery item of this process among all.
    """
    if vectors.scale.similarity not in ("dot", "euclidean"):
        return []
    # The norms of items on disk are not known.
    own_norms = np.empty(0) if vectors.are_read else vectors.item_rows.norms
    shares = vectors.processes.gather((own_norms, places.numpy()[: len(own_norms)]))
    norms = np.concatenate([norms for norms, _ in shares])
    if not len(norms):
        return []
    indices = np.concatenate([indices for _, indices in shares])
    median = float(np.sort(norms)[(len(norms) - 1) // 2])
    longest = float(norms.max())
    if median == 0.0 or longest < LONGEST_RATIO * median:
        return []
    row = int(indices[norms == longest].min())
    return [
        f"Gallery row {row} is {longest / median:.2g} times as long as the median embedding. The metrics are exact, but the "
        'evaluation is slow with it. Look for a diverged batch, drop the row, or use similarity="cosine".'
    ]


def note_of_rates(kind: str, rates: Sequence[float], count: int, what: str) -> tuple[str, ...]:
    """Return a note on rates below that of a single mistake, which only more data can show.

    Args:
        kind: What a mistake is called, such as "match".
        rates: The rates that are asked for.
        count: How many pairs, trials or probes can be mistaken.
        what: What they are called, such as "irrelevant pairs".
    """
    smaller = ", ".join(f"{rate:g}" for rate in rates if count and rate < 1 / count)
    if not smaller:
        return ()
    return (
        f"A false {kind} rate below {1 / count:.3g} (1 / {count:,}) cannot be measured with {count:,} {what}: at {smaller} "
        "the threshold only excludes all of these, and new data may exceed the rate.",
    )
