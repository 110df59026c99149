"""`trial_scores`: exact scores of listed pairs of embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fewshot_callbacks.engine.options import computing
from fewshot_callbacks.engine.vectors import Vectors
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional._reading import default_mode
from fewshot_callbacks.functional.neighbours import chosen_indices, compared_vectors
from fewshot_callbacks.settings import Similarity
from fewshot_callbacks.system.words import counted

_CALL = "trial_scores"


@default_mode()
def trial_scores(
    embeddings: Any, first: Any, second: Any, *, similarity: Similarity = "cosine"
) -> Float[Tensor, "trials"]:
    """Return the exact scores of listed pairs of embeddings.

    They are the same scores as in `evaluate_retrieval` (docs/research/exactness.md).

    Args:
        embeddings: (items, dim) finite floating-point rows. For `hamming`, codes of -1 and +1, or of 0 and 1.
        first: (trials,) index of the item on the first side of each trial.
        second: (trials,) index of the item on the second side.
        similarity: `cosine`, `dot`, `euclidean` or `hamming`; see `RetrievalSettings`.

    Returns:
        (trials,) scores in float64 on the CPU. Larger is more similar; for `euclidean`, a score is minus the distance.

    Raises:
        ValueError: If embeddings contain NaN or Inf, an index is out of range, or the sides have different lengths.

    Examples:
        >>> import torch
        >>> trial_scores(torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 4.0]]), [0, 0], [1, 2])
        tensor([1.0000, 0.6000], dtype=torch.float64)
    """
    rows = compared_vectors(_CALL, "embeddings", embeddings, similarity)
    first_items = chosen_indices(_CALL, "first", first, len(rows))
    second_items = chosen_indices(_CALL, "second", second, len(rows))
    if len(first_items) != len(second_items):
        raise InputError(
            f"{_CALL}: first has {counted(len(first_items), 'item')}, but second has {len(second_items)}. Pass one "
            "index per trial in both."
        )
    with computing() as threads:
        return scores_of_pairs(Vectors.of(rows, None, similarity, threads=threads), first_items, second_items)


def scores_of_pairs(
    vectors: Vectors, rows: Int[Tensor, "pairs"], columns: Int[Tensor, "pairs"]
) -> Float[Tensor, "pairs"]:
    """Return the exact scores of (query, item) pairs, in the units of the data."""
    scores = vectors.exact(rows.numpy().astype(np.int64), columns.numpy().astype(np.int64))
    return torch.from_numpy(vectors.scale.to_user(scores))
