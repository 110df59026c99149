"""Images by index where there is one, a seeded sample of bounded size where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

from fewshot_callbacks.callbacks import panels
from fewshot_callbacks.callbacks._pictures import ImageReader, first_part, has_index
from fewshot_callbacks.callbacks.panels import KeptImages, mixed

DATA = TensorDataset(torch.arange(50.0)[:, None])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


class Paired(BatchSampler):
    """Batches in an order of its own."""


def test_a_loader_has_an_index_if_it_goes_through_its_data_set_in_order() -> None:
    assert has_index(DataLoader(DATA, batch_size=4, drop_last=True))
    assert has_index(DataLoader(Subset(DATA, range(9, 0, -1)), batch_size=None))
    assert not has_index(DataLoader(DATA, shuffle=True))
    assert not has_index(DataLoader(Stream()))
    assert not has_index(DataLoader(DATA, batch_sampler=Paired(SequentialSampler(DATA), 4, drop_last=False)))
    assert not has_index([torch.zeros(3)])


def kept_of(loader: DataLoader[Any], size: int, side: int = 1) -> dict[int, Any]:
    kept = KeptImages(loader, ImageReader(None, mean=0, std=1 / 255))
    for start in range(0, 50, size):
        positions = range(start, min(start + size, 50))
        batch = torch.arange(float(positions.start), positions.stop)[:, None, None, None].expand(-1, 3, side, side)
        kept.see_batch(positions, [batch])
    return kept.kept


def test_what_is_kept_is_the_sample_of_the_least_hashes_in_batches_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "MOST_KEPT", 8)
    expected = mixed(np.arange(50)).argsort()[:8].tolist()
    for size in (1, 7, 50):
        kept = kept_of(DataLoader(Stream()), size)
        assert sorted(kept) == sorted(expected)
        assert all(image[0, 0, 0] == position for position, image in kept.items())


def test_nothing_is_kept_where_there_is_an_index() -> None:
    assert kept_of(DataLoader(DATA, batch_size=7), 7) == {}


def test_several_embeddings_of_an_item_show_its_image() -> None:
    images = KeptImages(DataLoader(DATA, batch_size=5), ImageReader(None, 0, 1 / 255))
    images.see_batch(range(10), [torch.arange(5.0).reshape(5, 1, 1, 1)])
    assert {position: int(image[0, 0, 0]) for position, image in images.kept.items()} == {i: i % 5 for i in range(10)}


def test_large_images_are_kept_small() -> None:
    assert {(image.shape, image.dtype) for image in kept_of(DataLoader(Stream()), 2, 300).values()} == {
        ((100, 100, 3), np.dtype("uint8"))
    }


def test_what_is_shown_of_a_sample() -> None:
    assert first_part(("image", 3)) == "image"
    assert first_part("a text") == "a text"
    assert first_part({"label": 3, "img": 4}) == 4
    with pytest.raises(ValueError, match="Pass images, a function"):
        first_part({"label": 3})
