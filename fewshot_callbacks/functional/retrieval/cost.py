"""The number of operations and the memory that an evaluation will need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fewshot_callbacks.engine.layout import least_bytes, plan_layout
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval.settings import memory_bytes

EmbeddingType = Literal["int8", "uint8", "float16", "bfloat16", "float32", "float64"]
"""The dtypes of embeddings, by their names in PyTorch."""
_BYTES = {"int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class EvaluationPlan:
    """The size of an exact evaluation of queries against the whole gallery; the result of `plan_evaluation`.

    Attributes:
        queries: Number of evaluated queries: all, or the sample that `max_queries` draws.
        gallery: Number of gallery items.
        dim: Components of an embedding.
        pairs: Number of query-candidate pairs. Each of them is scored.
        floating_point_operations: Operations of the matrix product: one multiplication and one addition per component of
            each pair.
        query_bytes: Size of the embeddings of all queries, in their dtype.
        gallery_bytes: Size of the gallery embeddings. With one set, they are the same tensor as the queries.
        copy_bytes: Size of the float32 copies of queries and gallery for embeddings in half precision or in bytes. One set
            needs one copy.
        matrix_bytes: Size that the similarity matrix would have in float32. It is never made.
        memory_bytes: Memory budget beyond the embeddings.
        needed_bytes: Part of the budget that counters and tiles need. The rest caches operands between tiles.
        least_bytes: Smallest possible budget.
        tile: Number of queries and of gallery items that are scored at once.
        tiles: Number of tiles.
        area_passes: Additional passes over all pairs that `auc_pr` and `pair_auroc` may need: one for each part of the
            relevant scores that fits into the budget.

    Examples:
        >>> plan = plan_evaluation(1000, 1000, 64)
        >>> plan.pairs, plan.floating_point_operations, plan.matrix_bytes
        (1000000, 128000000, 4000000)
    """

    queries: int
    gallery: int
    dim: int
    pairs: int
    floating_point_operations: int
    query_bytes: int
    gallery_bytes: int
    copy_bytes: int
    matrix_bytes: int
    memory_bytes: int
    needed_bytes: int
    least_bytes: int
    tile: tuple[int, int]
    tiles: int
    area_passes: int


def plan_evaluation(
    queries: int,
    gallery: int,
    dim: int,
    *,
    memory_mb: float | None = None,
    relevant: int = 64,
    max_queries: int | None = None,
    dtype: EmbeddingType = "float32",
) -> EvaluationPlan:
    """Return the number of pairs and operations, the memory and the tile size that an evaluation will need.

    Args:
        queries: Number of queries; for one set (leave-one-out) equal to `gallery`.
        gallery: Number of gallery items.
        dim: Components of an embedding.
        memory_mb: Budget beyond the embeddings, in MB; None is 512, infinity is no limit.
        relevant: Number of relevant items of a typical query, 0 or more. More relevant items make tiles narrower.
        max_queries: Number of queries that are drawn for an estimate; None evaluates all queries. Grouped Recall is not
            counted, although it is computed for all queries.
        dtype: Dtype of the embeddings: `int8`, `uint8`, `float16`, `bfloat16`, `float32` or `float64`.

    Returns:
        A frozen plan. All sizes are in bytes.

    Raises:
        ValueError: If a number is not whole, `queries`, `gallery`, `dim`, `max_queries` or `memory_mb` is not positive,
            `relevant` is negative, or the dtype is unknown.

    Examples:
        >>> plan = plan_evaluation(158_652, 158_652, 512)
        >>> f"{plan.pairs:,} pairs, {plan.matrix_bytes / 1e9:.1f} GB avoided"
        '25,170,457,104 pairs, 100.7 GB avoided'
        >>> plan_evaluation(158_652, 158_652, 512, max_queries=1000).pairs
        158652000
    """
    budget = memory_bytes("plan_evaluation", memory_mb)
    numbers = {"queries": queries, "gallery": gallery, "dim": dim, "relevant": relevant}
    if max_queries is not None:
        numbers["max_queries"] = max_queries
    for name, value in numbers.items():
        if not hasattr(value, "__index__") or isinstance(value, bool):
            raise InputError(f"plan_evaluation: {name}={value!r} must be a whole number, such as 1000.")
        if value <= 0 and name != "relevant":
            raise InputError(f"plan_evaluation: {name}={value} must be positive.")
    if relevant < 0:
        raise InputError(f"plan_evaluation: relevant={relevant} must not be negative.")
    if dtype not in _BYTES:
        raise InputError(f"plan_evaluation: dtype={dtype!r} is unknown. Choose one of {', '.join(_BYTES)}.")
    row_bytes = _BYTES[dtype] * dim
    evaluated = queries if max_queries is None else min(queries, max_queries)
    least = least_bytes(evaluated, gallery, dim, relevant * evaluated)
    layout = plan_layout(max(budget, least), evaluated, gallery, dim, relevant * evaluated, two_operands=True)
    pairs = evaluated * gallery
    is_one_set = queries == gallery and evaluated == queries
    scores_of_relevant = math.ceil(relevant * evaluated / (2 if is_one_set else 1))  # (a, b) and (b, a) share one score
    copied_rows = 0
    if _BYTES[dtype] < 4:
        copied_rows = gallery if queries == gallery else queries + gallery
    return EvaluationPlan(
        queries=evaluated,
        gallery=gallery,
        dim=dim,
        pairs=pairs,
        floating_point_operations=2 * pairs * dim,
        query_bytes=row_bytes * queries,
        gallery_bytes=row_bytes * gallery,
        copy_bytes=4 * dim * copied_rows,
        matrix_bytes=4 * pairs,
        memory_bytes=budget,
        needed_bytes=layout.bytes,
        least_bytes=least,
        tile=(min(layout.height, evaluated), min(layout.width, gallery)),
        tiles=math.ceil(evaluated / layout.height) * math.ceil(gallery / layout.width),
        area_passes=math.ceil(scores_of_relevant / layout.grid_size),
    )
