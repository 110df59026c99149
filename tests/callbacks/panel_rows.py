"""Panels that show items as their index, a recorder of the drawn rows, and a brute-force check of them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor

from fewshot_callbacks.callbacks import RetrievalPanels
from fewshot_callbacks.plots.panels import PanelRow
from tests.callbacks.models import Net

SETS = ("worst_queries", "confident_mistakes", "sample_queries")

Row = tuple[Any, str, str, list[tuple[Any, str, float, bool, bool]]]
"""query: picture, label, caption; neighbours: picture, label, score, relevant, tied"""


class IdentityNet(Net):
    """A module that returns the points as embeddings."""

    def embed(self, points: Tensor) -> Tensor:
        return points.flatten(1)[:, :5] + 0 * super().embed(points.flatten(1))


def as_row(row: PanelRow) -> Row:
    neighbours = [(n.item.picture, n.item.label, n.score, n.relevant, n.tied) for n in row.neighbours]
    return row.query.picture, row.query.label, row.remark, neighbours


class PanelRecorder:
    """A replacement of the function that draws panels; it records the rows and the title of each figure."""

    def __init__(self) -> None:
        self.figures: dict[str, list[list[Row]]] = {name: [] for name in SETS}
        self.titles: list[str] = []

    def __call__(self, rows: Sequence[PanelRow], title: str = "") -> Figure:
        kinds = {"lowest": SETS[0], "wrong": SETS[1], "the same": SETS[2]}
        name = next(name for words, name in kinds.items() if words in title)
        self.titles.append(title)
        self.figures[name].append([as_row(row) for row in rows])
        return Figure(figsize=(1, 1), dpi=10)

    def queries(self, name: str, time: int = -1) -> list[int]:
        """Return the queries of a figure; their pictures are their indices."""
        return [int(row[0]) for row in self.figures[name][time]]


def indexed_panels(*numbers: int, **settings: Any) -> RetrievalPanels:
    """Return panels that show each item as its index, and are drawn however long it takes."""
    return RetrievalPanels(*numbers, **({"images": lambda _, index: str(index), "max_share": None} | settings))


def brute_force(embeddings: Tensor, labels: Tensor, *gallery: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores (queries, gallery), relevance, and average precision of each query; a query does not retrieve itself."""
    items, item_labels = gallery or (embeddings, labels)
    unit_queries = torch.nn.functional.normalize(embeddings.double(), dim=1)
    unit_items = torch.nn.functional.normalize(items.double(), dim=1)
    scores = unit_queries @ unit_items.T
    relevant = labels[:, None] == item_labels[None]
    if not gallery:
        scores.fill_diagonal_(-torch.inf)
        relevant.fill_diagonal_(False)
    order = scores.argsort(dim=1, descending=True)
    hits = relevant.gather(1, order).double()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
    return scores, relevant, (precision * hits).sum(1) / hits.sum(1)


def assert_rows(rows: list[Row], sets: Sequence[Tensor], place: Any = int, names: Any = str) -> None:
    """Assert that labels, captions and neighbours, with their labels, scores and relevance, are those of brute force.

    Args:
        rows: The rows of a figure.
        sets: Embeddings and labels of the queries, and of the gallery if there is one.
        place: Returns the index of an item by its picture.
        names: Returns the name of a class by its label.
    """
    scores, relevant, precision = brute_force(*sets)
    for query, label, caption, neighbours in rows:
        item = place(query)
        order = scores[item].argsort(descending=True)
        rank = int(relevant[item][order].nonzero()[0]) + 1
        assert label == names(int(sets[1][item]))
        assert caption.endswith(f", AP {precision[item]:.3f}, first hit at rank {rank}")
        pictures, labels, values, hits, _ = zip(*neighbours, strict=True)
        order = order[: len(pictures)]
        assert [place(picture) for picture in pictures] == order.tolist()
        assert list(labels) == [names(label) for label in sets[-1][order].tolist()]
        assert values == pytest.approx(scores[item][order].tolist(), abs=1e-6)
        assert list(hits) == relevant[item][order].tolist()
