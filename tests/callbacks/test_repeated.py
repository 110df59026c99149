"""Items that come several times in a validation: noted by the monitor, and left out by their ids."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from fewshot_callbacks import EmbeddingSource, KnnMonitor, knn_accuracy
from tests.callbacks.models import Net, expected_metrics, items, log_of_validation, messages_of, retrieval, with_prefix

POINTS, LABELS = items().tensors
DATA = TensorDataset(POINTS, LABELS, torch.arange(len(POINTS)))
RIGHT = with_prefix(expected_metrics(POINTS, LABELS))
COPY = "bit for bit"
IDS = {"source": EmbeddingSource(ids=lambda outputs, batch: batch[2])}


class Unshared(IterableDataset):
    """Gives all items to every worker."""

    def __iter__(self) -> Any:
        return iter(DATA)


class Step(Net):
    """Takes the points as embeddings."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": batch[0], "labels": batch[1]}


def weighted() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    drawn = WeightedRandomSampler([1.0] * len(DATA), 2 * len(DATA), generator=generator)
    return DataLoader(DATA, 8, sampler=drawn)


LOADERS = {
    "workers": lambda: DataLoader(Unshared(), batch_size=8, num_workers=2),
    "a sampler with replacement": weighted,
    "the set twice": lambda: DataLoader(DATA + DATA, batch_size=8),
    "a gallery": lambda: [DataLoader(DATA, batch_size=8), DataLoader(DATA, batch_size=7)],
}


def without_copies(name: str) -> tuple[int, float, float]:
    """Return how many queries have copies, recall@1, and recall@1 where no query may find an item that it equals."""
    came = [batch[2] for batch in weighted()] if name == "a sampler with replacement" else [torch.arange(len(DATA))] * 2
    which = torch.cat(came[:1] if name == "a gallery" else came)
    items = torch.arange(len(DATA)) if name == "a gallery" else which
    scores = torch.nn.functional.normalize(POINTS[which], dim=1) @ torch.nn.functional.normalize(POINTS[items], dim=1).T
    is_equal = which[:, None] == items
    is_itself = torch.zeros_like(is_equal) if name == "a gallery" else torch.eye(len(which), dtype=torch.bool)
    found = [LABELS[items[scores.masked_fill(out, -2).argmax(dim=1)]] for out in (is_itself, is_equal)]
    recalls = [float((labels == LABELS[which]).double().mean()) for labels in found]
    return int((is_equal & ~is_itself).any(dim=1).sum()), *recalls


def seen(name: str, votes: bool = False, **settings: Any) -> tuple[dict[str, float], list[str]]:
    """What a monitor logs, and what it says of copies."""
    gallery = {"gallery": 1} if name == "a gallery" else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        monitors = retrieval(**gallery, **settings), KnnMonitor((1, 5), "gallery", **gallery, **settings)
        logged = log_of_validation(monitors[: 2 if votes else 1], Step(), LOADERS[name]())
    return logged, [words for words in messages_of(caught) if COPY in words]


@pytest.mark.parametrize("name", LOADERS)
def test_the_monitor_says_it_once_and_ids_cure_it(name: str) -> None:
    logged, words = seen(name)
    assert logged["val/recall@1"] > RIGHT["val/recall@1"] + 0.1
    (note,) = words
    assert "RetrievalMonitor" not in note.partition(":")[0]
    assert "ids" in note
    queries, recall, right = without_copies(name)
    assert f"val: {queries} of " in note
    assert f"recall@1 is {recall:.3f}, and {right:.3f} without their copies" in note
    assert logged["val/recall@1"] == pytest.approx(recall)
    cured, words = seen(name, **IDS)
    assert words == []
    if name != "a sampler with replacement":  # which leaves out others
        assert cured == pytest.approx(RIGHT, rel=1e-6)
    else:
        drawn = torch.cat([batch[2] for batch in weighted()]).unique()
        assert cured == pytest.approx(with_prefix(expected_metrics(POINTS[drawn], LABELS[drawn])), rel=1e-6)


def test_no_item_votes_for_itself_where_ids_say_which_it_is() -> None:
    logged, words = seen("a gallery", votes=True)
    assert logged["val/knn@1"] == 1.0
    assert len(words) == 2
    cured, words = seen("a gallery", votes=True, **IDS)
    expected = knn_accuracy(POINTS, LABELS, k=(1, 5)).values
    assert {key: cured[f"val/{key}"] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert words == []


def test_ids_that_name_other_items_in_the_gallery_are_said() -> None:
    """The index in each data set is no identity across both."""
    other = TensorDataset(POINTS.roll(5, 0), LABELS.roll(5, 0), torch.arange(len(POINTS)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log_of_validation(retrieval(gallery=1, **IDS), Step(), [DataLoader(DATA, 8), DataLoader(other, 8)])
    assert any("ids name queries and gallery items of different labels" in words for words in messages_of(caught))
