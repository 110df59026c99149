"""The map of an embedding: the same items in every epoch, turned to fit the one before, in every logger."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from PIL import Image
from torch.utils.data import TensorDataset

from fewshot_callbacks.callbacks import EmbeddingMap
from fewshot_callbacks.callbacks import embedding_map as module
from fewshot_callbacks.plots.embedding_map import Projection
from tests.callbacks.models import Net, items, loader, retrieval, said, tagged, trainer
from tests.callbacks.pictured import AsGiven

DATA = items()


class Maps:
    """Takes the place of the function that draws maps."""

    def __init__(self) -> None:
        self.seen: list[Projection] = []

    def __call__(self, found: Projection, title: str = "") -> Figure:
        self.seen.append(found)
        return Figure(figsize=(1, 1), dpi=10)


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Maps:
    """What is drawn from now on."""
    monkeypatch.chdir(tmp_path)
    seen = Maps()
    monkeypatch.setattr(module, "embedding_map", seen)
    return seen


def test_the_same_items_in_every_epoch_turned_to_fit(maps: Maps) -> None:
    made = trainer(retrieval(), EmbeddingMap(classes=4, per_class=3, max_share=None), max_epochs=3)
    made.fit(Net(), loader(items(), shuffle=True), loader(DATA))
    first, *more = maps.seen
    assert len(first.points) == 12
    labels = [str(int(DATA.tensors[1][index])) for index in first.ids]
    assert first.labels.tolist() == labels
    assert sorted(np.unique(first.labels, return_counts=True)[1]) == [3, 3, 3, 3]
    assert all(np.array_equal(each.ids, first.ids) for each in more)
    assert [each.aligned for each in maps.seen] == [False, True, True]


def test_a_second_fit_begins_anew(maps: Maps) -> None:
    drawing = EmbeddingMap(3, 2, max_share=None)
    for _ in range(2):
        trainer(retrieval(), drawing).fit(Net(), loader(items()), loader(DATA))
    assert [each.aligned for each in maps.seen] == [False, False]
    assert np.array_equal(maps.seen[0].ids, maps.seen[1].ids)


def test_multi_label_targets_have_no_map(maps: Maps) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(retrieval(), EmbeddingMap()).validate(AsGiven(), loader(tagged()), verbose=False)
    assert maps.seen == []
    assert len([words for words in said(caught) if "multi-label targets, which have no classes" in words]) == 1


def test_tensorboard_shows_the_points_with_thumbnails(maps: Maps, tmp_path: Path) -> None:
    points, labels = DATA.tensors
    data = TensorDataset(points.reshape(-1, 1, 3, 4), labels)
    drawing = EmbeddingMap(classes=6, per_class=2, projector=True, names={-7: "owl"})
    trainer(retrieval(), drawing, logger=TensorBoardLogger(tmp_path)).validate(AsGiven(), loader(data), verbose=False)
    [sprite] = tmp_path.rglob("sprite.png")
    with Image.open(sprite) as image:
        assert image.size == (4 * 32, 4 * 32)  # twelve pictures in rows of four
    [table] = tmp_path.rglob("metadata.tsv")
    heading, *rows = table.read_text().splitlines()
    assert heading == "class\titem"
    names = ["owl" if label == -7 else str(label) for label in labels.tolist()]
    assert [row.split("\t")[0] for row in rows] == [names[int(row.split("\t")[1])] for row in rows]
    assert len(rows) == 12


@pytest.mark.parametrize("settings", [{"classes": 13}, {"classes": 0}, {"per_class": 0}])
def test_settings_out_of_range(settings: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        EmbeddingMap(**settings)
