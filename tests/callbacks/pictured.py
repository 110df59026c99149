"""What the tests of pictures share: items that are told by a text, and what was drawn of them."""

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
"""query: what is shown, label, caption; neighbours: what is shown, label, score, relevant, tied"""


class AsGiven(Net):
    """The points are the embeddings."""

    def embed(self, points: Tensor) -> Tensor:
        return points.flatten(1)[:, :5] + 0 * super().embed(points.flatten(1))


def as_row(row: PanelRow) -> Row:
    neighbours = [(n.item.picture, n.item.label, n.score, n.relevant, n.tied) for n in row.neighbours]
    return row.query.picture, row.query.label, row.remark, neighbours


class Drawn:
    """Takes the place of the function that draws panels, and keeps what it was to draw."""

    def __init__(self) -> None:
        self.figures: dict[str, list[list[Row]]] = {name: [] for name in SETS}
        self.titles: list[str] = []

    def __call__(self, rows: Sequence[PanelRow], title: str = "") -> Figure:
        kinds = {"least": SETS[0], "wrong": SETS[1], "the same": SETS[2]}
        name = next(name for words, name in kinds.items() if words in title)
        self.titles.append(title)
        self.figures[name].append([as_row(row) for row in rows])
        return Figure(figsize=(1, 1), dpi=10)

    def queries(self, name: str, time: int = -1) -> list[int]:
        """The queries of a figure, which are shown as their index."""
        return [int(row[0]) for row in self.figures[name][time]]


def told(*numbers: int, **settings: Any) -> RetrievalPanels:
    """Panels whose items are told by their index, however long drawing takes."""
    return RetrievalPanels(*numbers, **({"images": lambda _, index: str(index), "max_share": None} | settings))


def brute_force(embeddings: Tensor, labels: Tensor, *gallery: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (queries, gallery), relevance, and the average precision of each query; a query is not its own candidate."""
    others, kinds = gallery or (embeddings, labels)
    one, two = (torch.nn.functional.normalize(part.double(), dim=1) for part in (embeddings, others))
    scores, relevant = one @ two.T, labels[:, None] == kinds[None]
    if not gallery:
        scores.fill_diagonal_(-torch.inf)
        relevant.fill_diagonal_(False)
    order = scores.argsort(dim=1, descending=True)
    hits = relevant.gather(1, order).double()
    precision = hits.cumsum(1) / torch.arange(1, hits.shape[1] + 1)
    return scores, relevant, (precision * hits).sum(1) / hits.sum(1)


def assert_rows(rows: list[Row], sets: Sequence[Tensor], place: Any = int, names: Any = str) -> None:
    """Compare with brute force: labels, captions, and the neighbours with their labels, scores and relevance.

    Args:
        rows: Of a figure.
        sets: Embeddings and labels of the queries, and of the gallery if there is one.
        place: The index of an item by what is shown of it.
        names: The name of a class by its label.
    """
    scores, relevant, precision = brute_force(*sets)
    for query, label, caption, neighbours in rows:
        item = place(query)
        order = scores[item].argsort(descending=True)
        rank = int(relevant[item][order].nonzero()[0]) + 1
        assert label == names(int(sets[1][item]))
        assert caption.endswith(f", AP {precision[item]:.3f}, first hit at rank {rank}")
        shown, kinds, values, hits, _ = zip(*neighbours, strict=True)
        order = order[: len(shown)]
        assert [place(each) for each in shown] == order.tolist()
        assert list(kinds) == [names(kind) for kind in sets[-1][order].tolist()]
        assert values == pytest.approx(scores[item][order].tolist(), abs=1e-6)
        assert list(hits) == relevant[item][order].tolist()
