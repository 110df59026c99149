"""Images by index where there is one, a seeded sample of bounded size where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

from fewshot_callbacks.callbacks._item_images import MOST_KEPT, ItemImages, first_part, has_index, mixed

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


def kept_of(images: ItemImages, size: int, batch_images: Any = None) -> dict[int, Any]:
    for start in range(0, 50, size):
        positions = range(start, min(start + size, 50))
        batch = torch.arange(float(positions.start), positions.stop)[:, None].expand(-1, 3)[:, :, None, None]
        images.see_batch(positions, batch, batch_images or (lambda batch: batch))
    return images.kept


def test_what_is_kept_is_the_sample_of_the_least_hashes_in_batches_of_any_size() -> None:
    """An image takes 12 bytes."""
    few = [kept_of(ItemImages(DataLoader(Stream()), 3, kept_mb=96e-6), size) for size in (1, 7, 50)]
    expected = mixed(3, np.arange(50)).argsort()[:8].tolist()
    for kept in few:
        assert sorted(kept) == sorted(expected)
        assert all(float(image[0, 0, 0]) == position for position, image in kept.items())


def test_nothing_is_kept_where_there_is_an_index() -> None:
    assert kept_of(ItemImages(DataLoader(DATA, batch_size=7), 0, 64), 7) == {}


def test_several_embeddings_of_an_item_show_its_image() -> None:
    images = ItemImages(DataLoader(DATA, batch_size=5), 0, 64)
    images.see_batch(range(10), torch.arange(5.0).reshape(5, 1, 1, 1), lambda batch: batch)
    assert not images.has_index
    assert {position: int(image) for position, image in images.kept.items()} == {i: i % 5 for i in range(10)}


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
def test_large_images_are_kept_small_and_never_as_views(kind: torch.dtype) -> None:
    images = ItemImages(DataLoader(Stream()), 0, 64)
    batch = torch.full((2, 3, 300, 500), 7, dtype=kind)
    images.see_batch(range(2), batch, lambda batch: batch)
    assert {(tuple(image.shape), image.dtype) for image in images.kept.values()} == {((3, 75, 125), kind)}
    images.see_batch(range(2, 4), small := torch.ones(2, 1, 2, 2), lambda batch: batch)
    small.zero_()
    assert images.kept[3].sum() == 4
    assert images._most <= MOST_KEPT


def test_what_is_shown_of_a_sample() -> None:
    assert first_part(("image", 3)) == "image"
    assert first_part("a text") == "a text"
    assert first_part({"label": 3, "img": 4}) == 4
    with pytest.raises(ValueError, match="Pass images, a function"):
        first_part({"label": 3})
