"""Scores by their definition, in rational numbers, and by the engine."""

import math
from fractions import Fraction

import numpy as np
import torch

from fewshot_callbacks.engine.options import engine_options
from fewshot_callbacks.engine.scores.products import ScoreTiles
from tests.functional.brute_force import root

KERNELS = ("compiled", "pytorch")


def true_score(left: np.ndarray, right: np.ndarray, similarity: str) -> float:
    """The definition, in rational numbers."""
    one, other = ([Fraction(float(x)) for x in row] for row in (left, right))
    if similarity == "euclidean":
        return 0.0 - root(sum(((x - y) ** 2 for x, y in zip(one, other, strict=True)), Fraction(0)))
    dot = sum((x * y for x, y in zip(one, other, strict=True)), Fraction(0))
    if similarity == "dot":
        return float(dot)
    norms = sum((x * x for x in one), Fraction(0)) * sum((y * y for y in other), Fraction(0))
    return math.copysign(root(dot * dot / norms), dot) if dot else 0.0


def scores(queries: np.ndarray, gallery: np.ndarray, similarity: str, kernel: str) -> list[list[float]]:
    with engine_options(kernel=kernel):
        tiles = ScoreTiles.from_rows(torch.from_numpy(queries), torch.from_numpy(gallery), similarity)
        keys = tiles.exact_scores(torch.arange(len(queries)), torch.arange(len(gallery)))
        pairs = torch.cartesian_prod(torch.arange(len(queries)), torch.arange(len(gallery)))
        assert torch.equal(tiles.pair_scores(pairs[:, 0], pairs[:, 1]), keys.flatten())
    return [[tiles.to_user_score(key) for key in row] for row in keys.tolist()]
