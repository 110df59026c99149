"""Functions that turn results into figures: neighbours of queries, score histograms, curves, a map of the embedding.

To add a figure, write a function in a file of its own and decorate it with `style.in_house_style`: see
`docs/project/add_a_picture.md`. `style` has colours, sizes and functions that write files. `fitted_text` shortens or
wraps a text to a width; call it for every text that comes from the caller.
"""

from fewshot_callbacks.system.extras import required_extra

with required_extra("report", "fewshot_callbacks.plots"):
    import matplotlib  # noqa: F401

from fewshot_callbacks.functional.retrieval.pair_counts import PairCounts
from fewshot_callbacks.plots.compression import compression_curve
from fewshot_callbacks.plots.embedding_map import Projection, embedding_map, project
from fewshot_callbacks.plots.panels import Item, Neighbour, PanelRow, retrieval_panels, to_picture
from fewshot_callbacks.plots.scores import (
    ClassScore,
    Confusion,
    Mark,
    confused_classes,
    error_tradeoff_curve,
    precision_recall_curve,
    recall_at_k_curve,
    score_histograms,
    weakest_classes,
)
from fewshot_callbacks.plots.style import encode, new_figure, pixels, save

__all__ = [
    "ClassScore",
    "Confusion",
    "Item",
    "Mark",
    "Neighbour",
    "PairCounts",
    "PanelRow",
    "Projection",
    "compression_curve",
    "confused_classes",
    "embedding_map",
    "encode",
    "error_tradeoff_curve",
    "new_figure",
    "pixels",
    "precision_recall_curve",
    "project",
    "recall_at_k_curve",
    "retrieval_panels",
    "save",
    "score_histograms",
    "to_picture",
    "weakest_classes",
]
