"""The layout of the tiles of vectors: the sizes on which all processes agree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fewshot_callbacks.engine.layout import Layout, plan_layout
from fewshot_callbacks.engine.vectors import Vectors

# Sizes that decide which collective calls are made, or how long their arrays are. They have to be the same in all processes:
# otherwise a process waits forever. Other sizes may differ: the sizes of tiles and blocks, and the number of batches, since
# `Evaluation` adds empty batches.
SHARED_SIZES = (
    "cache_floats",
    "cache_int8",  # the first error bound in int8 is collective
    "recounts_in_int8",  # all processes compare the same number of precisions
    "cache_scores",  # scores that are not cached are computed in batches, and each batch is collective
    "cache_entries",  # the same for the scores of distinct rows
    "grid_size",  # a search refines its grid or closes counts (`pooled/search.py`), and sums arrays of the grid's length
    "buffer_pairs",  # whether there is a cut-off, and so another pass
)


def shared_layout(
    vectors: Vectors,
    memory: float,
    list_lengths: NDArray[np.int64],
    *,
    ranked: int | None = None,
    on_device: bool = False,
    reserved: int = 0,
) -> Layout:
    """Return the sizes that keep within a budget. *Collective*.

    Sizes that decide about collective calls are the smallest over all processes.

    Args:
        vectors: Queries and gallery.
        memory: Bytes beyond the vectors.
        list_lengths: (queries,) number of relevant items of each query of this process.
        ranked: Number of relevant pairs whose ranks are computed, if the tiles contain distinct rows.
        on_device: Whether tiles are computed on a device.
        reserved: Bytes of the memory that something else takes.
    """
    if vectors.stored is not None:  # the rest of it is for rows that are resident or being read
        memory *= vectors.stored.remaining_share
    resident = len(vectors.pairs.gallery)
    [all_items] = vectors.processes.summed(np.array([vectors.items])).tolist()
    layout = plan_layout(
        memory - reserved,
        len(vectors.pairs.queries),
        resident,
        vectors.scale.columns,
        int(list_lengths.sum()),
        disk_items=vectors.items - resident,
        foreign_items=all_items - vectors.items,
        two_operands=vectors.item_rows is not vectors.query_rows,
        threads=vectors.threads,
        on_device=on_device,
        longest_list=int(list_lengths.max(initial=0)),
        ranked=ranked,
    )
    by_rank = [layout_of_rank._asdict() for layout_of_rank in vectors.processes.gather(layout)]
    return layout._replace(**{name: min(sizes[name] for sizes in by_rank) for name in SHARED_SIZES})
