"""Notes on an evaluation, for the reader of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int
from torch import Tensor

from fewshot_callbacks.engine.vectors import Vectors

# A note reports the longest embedding if it is this many times as long as the median.
LONGEST_RATIO = 1000.0

# Words of the note on queries without a match.
WITHOUT_MATCH = "have no match and are left out of every mean"

# First words of the note that there is no Grouped Recall.
LEFT_OUT = "Grouped Recall is left out"


def notes_on(
    vectors: Vectors, places: Int[Tensor, "own"], relevant: Int[Tensor, "queries"], tied: Bool[Tensor, "queries"]
) -> list[str]:
    """Return notes for the reader of the means. *Collective*.

    `places` has the index of each gallery item of this process among all. `tied` tells whether a relevant item of each
    query ties with a negative.
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
        notes.append("The embeddings have collapsed: all vectors are equal, and every ranking is at chance level.")
    if _are_packed(vectors):
        notes.append(
            "The embeddings look like binary codes packed into bytes, but they are compared as ordinary numbers. Unpack "
            "uint8 with np.unpackbits(np.asarray(queries).astype(np.uint8), axis=1), or int8 with "
            "np.unpackbits(np.asarray(queries).astype(np.int8).view(np.uint8) ^ 128, axis=1), and pass "
            "similarity='hamming'."
        )
    if zero:
        notes.append(f"{zero} embeddings have length zero: their cosine similarity to everything is 0.")
    if ties > 0.01 * queries and not collapsed:
        notes.append(f"{ties} of {queries} queries have relevant items that tie with irrelevant ones.")
    return notes + _note_of_longest(vectors, places)


def _zero_vectors(vectors: Vectors) -> int:
    """Return the number of zero vectors among the queries or the items, whichever is larger. *Collective*."""
    if vectors.scale.similarity != "cosine":
        return 0
    sides = [vectors.query_rows]
    if not vectors.are_read:  # items in files are never all in memory
        sides.append(vectors.item_rows)
    return int(vectors.processes.summed(np.array([(side.norms == 0).sum() for side in sides])).max())


# Number of rows that are checked for packed bits, and the fewest bytes that suffice for a decision.
PACKED_ROWS = 1024

LEAST_BYTES = 1024

# Random bits have a quarter of their bytes in the outer quarter of the range. Numbers that were quantised to int8 by their
# range have about 1 % there, and pixels have most.
PACKED_SHARE = 0.15, 0.4


def _are_packed(vectors: Vectors) -> bool:
    """Return whether the rows of all processes look like bytes of packed bits. *Collective*."""
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
    """Return whether all queries are equal and all items are equal, and there are several of either. *Collective*."""
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
    """What one process contributes to the check whether all rows are equal."""

    rows: int
    are_equal: bool
    """whether all rows of this process are equal"""
    first_row: bytes


def _note_of_longest(vectors: Vectors, places: Int[Tensor, "own"]) -> list[str]:
    """Return a note on an embedding far longer than the others: rarely intended, and slow. *Collective*.

    `places` has the index of each gallery item of this process among all.
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
        'row makes the evaluation slow. Look for a diverged batch, drop the row, or use similarity="cosine".'
    ]


def note_of_rates(kind: str, rates: Sequence[float], count: int, what: str) -> tuple[str, ...]:
    """Return a note on rates that are lower than the rate of a single mistake. Only more data can show them.

    `kind` is a kind of mistake, such as "match". `count` is the number of pairs, trials or probes, and `what` their
    name.
    """
    smaller = ", ".join(f"{rate:g}" for rate in rates if count and rate < 1 / count)
    if not smaller:
        return ()
    return (
        f"A false {kind} rate below {1 / count:.3g} (1 / {count:,}) cannot be measured with {count:,} {what}. At {smaller} "
        "the threshold rejects all of them, and new data may exceed the rate.",
    )
