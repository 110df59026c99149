"""Degenerate embeddings and labels: the values are chance or NaN, there is one warning, and the fit continues."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import TensorDataset

from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, RetrievalMonitor
from tests.callbacks.models import (
    FEATURES,
    EveryBatch,
    EveryEpoch,
    Net,
    Returns,
    expected_metrics,
    gap_monitor,
    items,
    loader,
    messages_of,
    retrieval,
    trainer,
)
from tests.messages import missing_facts, refused

SIZES, MANY = (2, 3, 4, 6, 9, 12), [20] * 6
KEYS = "val/mAP", "val/J", "gap/grouped_recall@1"


def sized(sizes: Any = SIZES, order: int = 0) -> TensorDataset:
    """Points of classes of these sizes, labelled as `items` are; one after the other, or in another order."""
    labels = torch.cat([torch.full((size,), 10 * name - 7) for name, size in enumerate(sizes)])
    points = torch.randn(len(labels), FEATURES, generator=torch.Generator().manual_seed(1))
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(order))
    rows = shuffled if order else torch.arange(len(labels))
    return TensorDataset(points[rows], labels[rows])


def random_ap(relevant: int, items: int) -> float:
    """The mean of AP over all orders: at each place an item is relevant or not, and so are those before it."""
    return sum((1 + (k - 1) * (relevant - 1) / max(items - 1, 1)) / k for k in range(1, items + 1)) / items


def chance(sizes: Any = SIZES) -> dict[str, float]:
    """What rankings in random order have on average."""
    count = sum(sizes)
    return {
        "val/mAP": sum(size * random_ap(size - 1, count - 1) for size in sizes) / count,
        "val/recall@1": sum(size * (size - 1) / (count - 1) for size in sizes) / count,
        "val/pair_precision": sum(size * (size - 1) for size in sizes) / (count * (count - 1)),
        "val/pair_recall": 1.0,
    }


def gives(made: Callable[[Tensor, Tensor, int], Tensor]) -> Returns:
    """A module whose validation embeddings are what a function makes of points, labels and epoch."""
    return Returns(
        lambda net, points, labels: {"embeddings": made(points, labels, net.current_epoch), "labels": labels}
    )


def fitted(net: Net, data: Any, *monitors: Callback, **settings: Any) -> tuple[dict[str, float], list[str]]:
    """What is logged in the end, and all that is warned of in the epochs; Lightning's words on an empty set left out."""
    batches, epochs = EveryBatch(), settings.setdefault("max_epochs", 2)
    run = trainer(*monitors, batches, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(net, loader(), data if isinstance(data, list) else loader(data))
    assert len(batches.outputs) == 4 * epochs  # the fit has gone on
    skip = "does not have many workers", "Total length of `DataLoader`", "smaller than the logging interval"
    words = [text for text in messages_of(caught) if not any(part in text for part in skip)]
    of_batches = "train/J", "train/variance_ratio"
    return {key: float(value) for key, value in run.callback_metrics.items() if key not in of_batches}, words


def causes(words: list[str], end: str = "") -> list[str]:
    """Why mAP, J and the gap are NaN: one warning each."""
    found = [text for key in KEYS for text in words if not missing_facts(text, (key + end, "NaN"))]
    assert len(found) == len(words), words
    return found


def of_facts(words: list[str], *facts: Any) -> list[str]:
    """Return the messages that name each fact."""
    return [text for text in words if not missing_facts(text, facts)]


def gap_of() -> Any:
    """A gap monitor that does not compare how training and validation are embedded: here they never are the same."""
    return gap_monitor(embed=lambda module, batch: module.returns(module, *batch)["embeddings"])


COLLAPSED = {
    "constant": lambda points, labels, epoch: torch.linspace(0.1, 0.7, 5).repeat(len(points), 1) * (1 + epoch),
    "zeros": lambda points, labels, epoch: torch.zeros(len(points), 5),
    "rounded away": lambda points, labels, epoch: 0.37 + 1e-9 * points[:, :5],
}


@pytest.mark.parametrize(
    ("made", "similarity", "normalize"),
    [
        ("constant", "dot", True),
        ("constant", "euclidean", False),
        ("rounded away", "cosine", False),
        ("zeros", "cosine", False),
    ],
)
def test_collapsed_embeddings_are_at_chance_in_any_order_and_one_warning(
    made: str, similarity: Any, normalize: bool
) -> None:
    logged = []
    for order, batch_size in enumerate((11, 7)):
        monitors = retrieval(similarity=similarity, label_groups=3), DiscriminantRatioMonitor(normalize=normalize)
        values, words = fitted(gives(COLLAPSED[made]), [loader(sized(order=order), batch_size)], *monitors)
        *of_map, of_j = sorted(words, key=lambda text: "NaN" in text)
        told = [("val", "embeddings", "chance"), *([("val", 36, "length", 0)] if made == "zeros" else [])]
        assert sorted(len(of_facts(of_map, *facts)) for facts in told) == [1] * len(of_map)
        assert causes([of_j]) == of_facts([of_j], "embeddings", "equal")
        assert {key: values[key] for key in chance()} == pytest.approx(chance(), rel=1e-6)
        logged.append({key: value for key, value in values.items() if not math.isnan(value)})
    assert logged[0] == logged[1]
    ends = ("J", "variance_ratio", "variance_ratio_low", "variance_ratio_high")
    assert values.keys() - logged[0].keys() == {f"val/{end}" for end in ends}


def test_the_gap_of_collapsed_embeddings_is_that_of_chance() -> None:
    net = gives(COLLAPSED["constant"])
    values, words = fitted(net, sized([8] * 6), gap_of())
    assert words == []
    assert values["gap/train_recall@1"] == values["gap/val_recall@1"] == pytest.approx(7 / 47, rel=1e-6)
    assert values["gap/grouped_recall@1"] == values["gap/recall@1"] == 0.0


def test_a_constant_and_the_noise_of_rounding_are_near_chance_in_any_order() -> None:
    def nearly(points: Tensor, labels: Tensor, epoch: int) -> Tensor:
        return 1 + points[:, :8].round() * 2.0**-23  # the noise has nothing to do with the class

    points, labels = sized(MANY).tensors
    noise = points[:, :8].round().double()  # J depends only on the noise, whatever its scale and the constant
    means = torch.stack([noise[labels == label].mean(dim=0) for label in labels])
    of_noise = float((means - noise.mean(dim=0)).square().sum() / (noise - means).square().sum())
    assert of_noise == pytest.approx(5 / 114, abs=0.04)  # (C - 1) / (N - C), what noise has on average
    logged = []
    for order in range(3):
        values, words = fitted(gives(nearly), sized(MANY, order), retrieval(), DiscriminantRatioMonitor(), max_epochs=1)
        assert words == of_facts(words, "val", "irrelevant")
        assert values["val/mAP"] == pytest.approx(chance(MANY)["val/mAP"], abs=0.03)
        assert values["val/J"] == pytest.approx(of_noise, rel=1e-6)
        logged.append(values)
    assert logged[1] == logged[2] == pytest.approx(logged[0], rel=1e-6)


def diverging(bad: float) -> Returns:
    """One bad row in each batch of the first epoch, two of the second, none of the third."""

    def made(points: Tensor, labels: Tensor, epoch: int) -> Tensor:
        embeddings = points.clone()
        if epoch < 2:
            embeddings[1 : 2 + epoch, 3] = bad
        return embeddings

    return gives(made)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_rows_that_are_not_finite_are_nan_and_one_warning_that_counts_them(bad: float) -> None:
    net, epochs, ratios = diverging(bad), EveryEpoch(), EveryEpoch("val/J")
    monitors = retrieval(), DiscriminantRatioMonitor(), gap_of()
    _, words = fitted(net, items(), *monitors, epochs, ratios, max_epochs=3)
    for seen in (epochs, ratios):
        assert [math.isnan(value) for value in seen.values] == [True, True, False]
    of_map, of_j, of_gap = causes(words)
    assert of_facts([of_map], "queries", 4, 36, "Inf", 1)
    assert of_facts([of_j], "batch", 1, 11, "Inf", "item", 1)
    assert of_facts([of_gap], "queries", "Inf")


@pytest.mark.parametrize(
    ("monitor", "facts"), [(retrieval, ("queries", 4, 36, 1)), (DiscriminantRatioMonitor, ("batch", 1, 11))]
)
def test_a_strict_monitor_raises_of_rows_that_are_not_finite(
    monitor: Callable[..., Any], facts: tuple[Any, ...]
) -> None:
    with refused(ValueError, "NaN", "Inf", *facts):
        trainer(monitor(strict=True)).fit(diverging(math.inf), loader(), loader())


def plain() -> Returns:
    return gives(lambda points, labels, epoch: points)


def test_a_single_class_is_reported_as_far_as_it_is_defined() -> None:
    net, data = plain(), TensorDataset(items().tensors[0], torch.full((36,), 3))
    values, words = fitted(net, data, RetrievalMonitor(), DiscriminantRatioMonitor(), gap_of())
    assert {values[f"val/{name}"] for name in ("mAP", "recall@1", "pair_precision", "pair_recall", "pair_f1")} == {1.0}
    assert values["val/J"] == 0.0  # there is scatter within, and none between
    assert "val/grouped_recall@1" not in values
    assert math.isnan(values["gap/grouped_recall@1"])
    assert math.isnan(values["val/variance_ratio"])
    of_gap, of_ratio = sorted(words)
    assert of_facts([of_ratio], "val/variance_ratio", "NaN", "class")
    assert of_facts([of_gap], "gap/grouped_recall@1", "NaN", "GeneralizationGapMonitor", "validation")


@pytest.mark.parametrize("count", [36, 1])
def test_singletons_and_a_single_item_are_nan_and_one_warning_for_each_monitor(count: int) -> None:
    net, data = plain(), TensorDataset(items().tensors[0][:count], torch.arange(count))
    values, words = fitted(net, data, retrieval(), DiscriminantRatioMonitor(), gap_of())
    assert {key for key, value in values.items() if not math.isnan(value)} == {"gap/share_of_time"}
    of_map, of_j, of_gap = causes(words)
    queries = ("queries", count) if count > 1 else ("the only query",)
    assert of_facts([of_map], *queries, "class")
    assert of_facts([of_j], "classes", count, "item")
    assert of_facts([of_gap], *queries, "class")


def test_an_empty_set_alone_is_not_validated() -> None:
    net, nothing = plain(), TensorDataset(*(part[:0] for part in items().tensors))
    values, words = fitted(net, nothing, retrieval(), DiscriminantRatioMonitor(), gap_of(), num_sanity_val_steps=1)
    assert (values, words) == ({}, [])


def test_an_empty_set_beside_another_is_nan_and_one_warning_for_each_monitor() -> None:
    """And so is one of which the steps leave nothing over."""
    nothing = loader(TensorDataset(*(part[:0] for part in items().tensors)))
    for sets, net, end in (
        ([nothing, loader()], plain(), "/dataloader_idx_0"),
        ([loader()], Returns(lambda net, x, y: {"embeddings": net(x)[:0], "labels": y[:0]}), ""),
    ):
        values, words = fitted(net, sets, retrieval(), DiscriminantRatioMonitor(), num_sanity_val_steps=1)
        assert all(math.isnan(value) == key.endswith(end) for key, value in values.items())
        of_map, of_j = causes(words, end=end)
        assert of_facts([of_map], "queries", "empty", "shape (0")
        assert of_facts([of_j], "empty", "embedding")


def test_zero_vectors_are_similar_to_nothing_and_counted_once() -> None:
    def some_zero(points: Tensor, labels: Tensor, epoch: int) -> Tensor:
        return points * (labels != 13)[:, None] * (points[:, :1] > -0.5)  # a whole class, and some of each

    points, labels = items().tensors
    embeddings, logged = some_zero(points, labels, 0), []
    zeros = int((embeddings.norm(dim=1) == 0).sum())
    assert 6 < zeros < 20
    for rows in (torch.arange(36), torch.randperm(36)):
        data = TensorDataset(points[rows], labels[rows])
        values, words = fitted(gives(some_zero), data, retrieval(), DiscriminantRatioMonitor())
        assert values["val/mAP"] == pytest.approx(expected_metrics(embeddings, labels)["mAP"], rel=1e-6)
        of_zeros, of_ties = words
        assert of_facts([of_zeros], "val", zeros, "length", "cosine", 0)
        assert of_facts([of_ties], "val", "irrelevant")
        logged.append(values)
    assert logged[0] == pytest.approx(logged[1], rel=1e-6)
