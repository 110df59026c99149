"""Counts the operations and the memory of an evaluation before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fewshot_callbacks.engine.layout import least_bytes, plan_layout
from fewshot_callbacks.functional.retrieval.settings import DEFAULT_MEMORY_MB, check_memory, memory_or_default


@dataclass(frozen=True)
class EvaluationPlan:
    """The size of an exact evaluation of all queries against the whole gallery.

    Examples:
        >>> plan = plan_evaluation(1000, 1000, 64)
        >>> plan.pairs, plan.floating_point_operations, plan.matrix_bytes
        (1000000, 128000000, 4000000)
    """

    queries: int
    gallery: int
    dim: int
    pairs: int
    """query-candidate pairs, each of which is scored"""
    floating_point_operations: int
    """operations of the matrix product: one multiplication and one addition for each component of each pair"""
    query_bytes: int
    """size of the query embeddings in float32"""
    gallery_bytes: int
    """size of the gallery embeddings in float32; with one set they are the same tensor"""
    matrix_bytes: int
    """size that the similarity matrix would have in float32; it is never made"""
    memory_bytes: int
    """memory budget beyond the embeddings"""
    needed_bytes: int
    """part of the budget that counters and tiles take; the rest caches operands between tiles"""
    least_bytes: int
    """smallest budget that can be kept"""
    tile: tuple[int, int]
    """queries and gallery items that are scored at once"""
    tiles: int


def plan_evaluation(
    queries: int, gallery: int, dim: int, *, memory_mb: float | None = DEFAULT_MEMORY_MB, relevant: int = 64
) -> EvaluationPlan:
    """Compute the number of pairs and operations, the memory and the tile size of an evaluation, before it runs.

    Args:
        queries: Number of queries; for one set (leave-one-out) equal to `gallery`.
        gallery: Number of gallery items.
        dim: Components of an embedding.
        memory_mb: Budget beyond the embeddings, in MB; None is the default.
        relevant: Number of relevant items of a typical query, 0 or more; the more there are, the narrower the tiles.

    Returns:
        A frozen plan; all sizes are in bytes.

    Raises:
        ValueError: If `queries`, `gallery`, `dim` or `memory_mb` is not positive, or `relevant` is negative.

    Examples:
        >>> plan = plan_evaluation(158_652, 158_652, 512)
        >>> f"{plan.pairs:,} pairs, {plan.matrix_bytes / 1e9:.1f} GB avoided"
        '25,170,457,104 pairs, 100.7 GB avoided'
    """
    memory_mb = memory_or_default(memory_mb)
    check_memory("plan_evaluation", memory_mb)
    for name, value in (("queries", queries), ("gallery", gallery), ("dim", dim)):
        if value <= 0:
            raise ValueError(f"plan_evaluation: {name}={value} must be positive.")
    if relevant < 0:
        raise ValueError(f"plan_evaluation: relevant={relevant} must not be negative.")
    memory_bytes = int(memory_mb * 10**6)
    least = least_bytes(queries, gallery, dim, relevant * queries)
    size = plan_layout(max(memory_bytes, least), queries, gallery, dim, relevant * queries, sides=2)
    pairs = queries * gallery
    return EvaluationPlan(
        queries=queries,
        gallery=gallery,
        dim=dim,
        pairs=pairs,
        floating_point_operations=2 * pairs * dim,
        query_bytes=4 * dim * queries,
        gallery_bytes=4 * dim * gallery,
        matrix_bytes=4 * pairs,
        memory_bytes=memory_bytes,
        needed_bytes=size.bytes,
        least_bytes=least,
        tile=(min(size.height, queries), min(size.width, gallery)),
        tiles=math.ceil(queries / size.height) * math.ceil(gallery / size.width),
    )
