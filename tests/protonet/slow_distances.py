"""Distances of embeddings from the formulas, one pair at a time."""

import math

from fewshot_callbacks.protonet import Distance

DISTANCES: list[Distance] = ["euclidean", "unit_euclidean", "angular"]


def slow_distance(q: list[float], p: list[float], distance: Distance) -> float:
    """Between two vectors, in float64."""
    if distance == "euclidean":
        return math.dist(q, p)
    lengths = math.hypot(*q), math.hypot(*p)
    if 0.0 in lengths:
        return 1.0 if distance == "unit_euclidean" else math.pi / 2
    cosine = math.fsum(a * b for a, b in zip(q, p, strict=True)) / math.prod(lengths)
    chord = math.dist([a / lengths[0] for a in q], [b / lengths[1] for b in p])
    return chord if distance == "unit_euclidean" else math.acos(min(max(cosine, -1.0), 1.0))
