"""`revisited_protocol`: the easy, medium and hard setups of the revisited Oxford and Paris benchmarks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from fewshot_callbacks.errors import InputError
from fewshot_callbacks.functional.retrieval.evaluate import evaluate_retrieval
from fewshot_callbacks.functional.retrieval.relevance import Relevance
from fewshot_callbacks.functional.retrieval.report import RetrievalReport
from fewshot_callbacks.settings import RetrievalOptions, takes

# Relevant and ignored lists of each setup.
SETUPS = {
    "easy": (("easy",), ("hard", "junk")),
    "medium": (("easy", "hard"), ("junk",)),
    "hard": (("hard",), ("easy", "junk")),
}
METRICS = ("ap_trapezoid", "precision@1_last", "precision@5_last", "precision@10_last")


@takes(RetrievalOptions, metrics=METRICS, label_groups=None)
def revisited_protocol(
    queries: Any, gallery: Any, ground_truth: Sequence[Mapping[str, Any]], **settings: Unpack[RetrievalOptions]
) -> dict[str, RetrievalReport]:
    """Return exact reports on the easy, medium and hard setups of the revisited Oxford and Paris benchmarks.

    Radenović, Iscen, Tolias, Avrithis and Chum, "Revisiting Oxford and Paris: large-scale image retrieval benchmarking",
    CVPR 2018. `ap_trapezoid` and `precision@10_last` equal the values of the authors' program, mAP and mP@10 in the tables.

    Args:
        queries: (queries, dim) vectors.
        gallery: (gallery, dim) vectors.
        ground_truth: For each query a mapping with the indices of its `easy`, `hard` and `junk` gallery images: the list
            `gnd` in the authors' file. Other entries, such as `bbx`, are not read.
        **settings: `metrics`, `similarity` and more: see `RetrievalSettings`.

    Returns:
        `easy`, `medium` and `hard` -> report. Queries without a relevant image are left out of the means and counted in
        `queries_without_match`.

    Raises:
        ValueError: If an entry is missing, an index is not a gallery image, an image is in two lists of a query, or as in
            `evaluate_retrieval`.

    Examples:
        >>> import torch
        >>> gallery, lists = torch.eye(4), [{"easy": [0], "hard": [1], "junk": [2]}]
        >>> reports = revisited_protocol(torch.tensor([[0.9, 0.5, 0.7, 0.6]]), gallery, lists)
        >>> {name: round(report["ap_trapezoid"], 4) for name, report in reports.items()}
        {'easy': 1.0, 'medium': 0.7917, 'hard': 0.25}
    """
    for query, lists in enumerate(ground_truth):
        missing = [name for name in ("easy", "hard", "junk") if name not in lists]
        if missing:
            raise InputError(
                f"revisited_protocol: ground_truth[{query}] has no {missing[0]!r}. Pass the lists 'easy', 'hard' and 'junk' "
                "for each query, as in gnd in the authors' file."
            )

    def joined(names: Sequence[str]) -> list[list[int]]:
        return [
            [index for name in names for index in _indices(query, name, lists[name])]
            for query, lists in enumerate(ground_truth)
        ]

    options: RetrievalOptions = {"metrics": METRICS, "label_groups": None, **settings}
    return {
        name: evaluate_retrieval(
            queries,
            gallery=gallery,
            relevance=Relevance.from_lists(joined(relevant), joined(ignored), gallery=len(gallery)),
            **options,
        )
        for name, (relevant, ignored) in SETUPS.items()
    }


def _indices(query: int, name: str, indices: Any) -> list[int]:
    """Return a list of image indices as Python integers."""
    numbers = np.asarray(indices)
    if numbers.size and not (numbers.dtype.kind in "iuf" and np.array_equal(numbers, np.floor(numbers))):
        raise InputError(
            f"revisited_protocol: ground_truth[{query}][{name!r}] contains {indices!r:.60}. Pass indices of gallery images, "
            "which are whole numbers from 0 on."
        )
    return [int(index) for index in numbers.ravel().tolist()]
