"""Every NaN that is logged has its reason in the run, once: one message names its key, or the values of its set."""

import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingSource,
    EpisodeProtocol,
    KnnMonitor,
    Metric,
    ProbeMonitor,
    RetrievalMonitor,
    TrainingDynamicsMonitor,
    TrialList,
    VerificationMonitor,
)
from tests.callbacks.models import (
    DIM,
    FEATURES,
    SHOTS,
    Embeds,
    Labelled,
    episode_items,
    episodes,
    gap_monitor,
    items,
    loader,
    protonet,
    trainer,
)
from tests.callbacks.silhouette import SilhouetteMonitor

POINTS = torch.randn(36, FEATURES, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(36) // 6
IS_NOT_FINITE = torch.full((1, FEATURES), math.nan)

SITUATIONS: dict[str, tuple[Tensor, Tensor]] = {
    "six classes": (POINTS, CLASSES),
    "one class": (POINTS, torch.full((36,), 3)),
    "each class has one item": (POINTS, torch.arange(36)),
    "one item": (POINTS[:1], CLASSES[:1]),
    "two items of one class": (POINTS[:2], CLASSES[:2]),
    "two items of two classes": (POINTS[:2], torch.arange(2)),
    "three items": (POINTS[:3], torch.tensor([0, 0, 1])),
    "two classes": (POINTS[:4], torch.tensor([0, 0, 1, 1])),
    "one pair": (POINTS[:7], torch.tensor([0, 0, 1, 2, 3, 4, 5])),
    "all equal": (torch.ones(36, FEATURES), CLASSES),
    "zeros": (torch.zeros(36, FEATURES), CLASSES),
    "a point for each class": (torch.eye(12)[CLASSES], CLASSES),
    "ties": ((POINTS > 0).float(), CLASSES),
    "NaN": (torch.cat([POINTS[:35], IS_NOT_FINITE]), CLASSES),
    "no labels": (POINTS, torch.empty(0)),
    "targets": (POINTS, torch.cat([POINTS[:, :1], torch.ones(36, 1)], dim=1)),
}

BY_BATCH = EmbeddingSource(("embeddings", "labels"), embed=lambda module, batch: batch[0])
ONE_KIND = ("auroc", "macro_auroc", "pair_auroc", "auc_pr", "eer", "fnmr@fmr0.01", "opis@fmr0.1", "opis_gap@fmr0.1")
UNDEFINED = Metric("undefined", "pairs", lambda pooled: math.nan, "Nothing.")
TRIALS = TrialList(same=(True, False, True), items=(("0", "0", "3"), ("1", "2", "4")))
MONITORS: dict[str, Callable[[], Any]] = {
    "retrieval": RetrievalMonitor,
    "metrics of pairs": lambda: RetrievalMonitor(metrics=("mAP", "recall@precision0.95", *ONE_KIND)),
    "compression": lambda: RetrievalMonitor(label_groups=None, dims=3, codes=("int8", "binary")),
    "J": lambda: DiscriminantRatioMonitor(every_n_steps=None),
    "J of several": lambda: DiscriminantRatioMonitor(every_n_steps=None, skip_singletons=True),
    "health": lambda: EmbeddingHealthMonitor(k=5, every_n_steps=None),
    "votes": lambda: KnnMonitor((1, 10), "self"),
    "votes of a bank": lambda: KnnMonitor((1, 100), Labelled(items()), source=BY_BATCH),
    "probe": lambda: ProbeMonitor(Labelled(items()), source=BY_BATCH),
    "trials": lambda: VerificationMonitor(TRIALS, ids=lambda outputs, batch: list(map(str, batch[-1].tolist()))),
    "gap": lambda: gap_monitor(embed=lambda module, batch: batch[0]),
    "own": SilhouetteMonitor,
}


class Given(Embeds):
    """The points of a validation are its embeddings; those of the training are what a function makes of them."""

    def __init__(self, of_training: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.of_training = of_training
        self.encoder = torch.nn.Linear(FEATURES, DIM)  # which takes a batch of one item, too

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = super().training_step(batch, batch_idx)
        return outputs if self.of_training is None else outputs | {"embeddings": self.of_training(batch[0])}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": batch[0], **({"labels": batch[1]} if len(batch) > 2 else {})}


@contextmanager
def told() -> Iterator[list[str]]:
    """What a run says in warnings, and in messages of this package to the first process."""
    words: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Kept()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield words
        words += [str(warning.message) for warning in caught]
    finally:
        logger.removeHandler(handler)


def is_named(key: str, message: str) -> bool:
    """Whether a message says why the value of a key is NaN: by the name of the key, or of all values of its set."""
    if "NaN" not in message and "not logged" not in message:
        return False
    name = key.split("/", 1)[1]
    of_set = "other values" in message
    return of_set or any(part in message.replace(",", " ").replace(".", " ").split() for part in (key, name))


def assert_each_nan_has_one_reason(values: Any, words: list[str]) -> int:
    """Check it, and return the number of values that are NaN."""
    undefined = [key for key, value in values.items() if math.isnan(value)]
    reasons = {key: [message for message in words if is_named(spelt(key), spelt(message))] for key in undefined}
    assert {key: found for key, found in reasons.items() if len(found) != 1} == {}
    return len(undefined)


def spelt(text: str) -> str:
    """A text in which no key holds a comma or a full stop."""
    return text.replace("0.", "0_").replace("(", " ").replace(")", " ").replace(":", " ")


def fitted(monitor: Any, data: Any, *others: Callback, net: Any = None, **settings: Any) -> tuple[Any, list[str]]:
    """What two epochs log at their end, and what they say."""
    run = trainer(monitor, *others, **({"max_epochs": 2, "limit_train_batches": 2} | settings))
    with told() as words:
        run.fit(net or Given(), loader(), data)
    return {key: float(value) for key, value in run.callback_metrics.items()}, words


def batches_of(situation: str) -> DataLoader[Any]:
    points, labels = SITUATIONS[situation]
    parts = (points, labels) if len(labels) else (points,)
    return loader(TensorDataset(*parts, torch.arange(len(points))))


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", MONITORS)
def test_each_nan_of_a_validation_has_one_reason_in_the_run(name: str, situation: str) -> None:
    """Two equal epochs: the reason is not said again."""
    monitor = MONITORS[name]()
    if hasattr(monitor, "strict"):
        monitor.strict = False
    monitor._policy.strict = False  # what would end the run is a warning
    values, words = fitted(monitor, batches_of(situation))
    assert values
    assert_each_nan_has_one_reason(values, words)


def test_a_missing_reason_and_a_second_one_are_found() -> None:
    """Without a message, with two, and with one that names another key."""
    values = {"val/knn@1": math.nan, "val/J": 1.0}
    assert assert_each_nan_has_one_reason(values, ["val: knn@1, knn@2 are NaN: x.", "J is NaN", "knn@1 is low"]) == 1
    for words in ([], ["knn@10 is NaN"], ["knn@1 is NaN.", "val/knn@1 is NaN"]):
        with pytest.raises(AssertionError):
            assert_each_nan_has_one_reason(values, words)


@pytest.mark.parametrize("name", ["retrieval", "J", "health", "votes"])
def test_an_empty_loader_has_one_reason_for_each_nan(name: str) -> None:
    empty = loader(TensorDataset(*(part[:0] for part in (POINTS, CLASSES, CLASSES))))
    values, words = fitted(MONITORS[name](), [batches_of("six classes"), empty])
    values = {key: value for key, value in values.items() if key.endswith("/dataloader_idx_1")}
    assert assert_each_nan_has_one_reason(values, words) == len(values) > 0


@pytest.mark.parametrize("strict", [None, False])
def test_a_gallery_without_a_candidate_has_one_reason_for_each_nan(strict: bool | None) -> None:
    """Of queries whose classes the gallery lacks."""
    other = loader(TensorDataset(POINTS, CLASSES + 100, CLASSES))
    monitors = RetrievalMonitor(gallery=1, strict=strict), KnnMonitor(1, "gallery", gallery=1, strict=strict)
    for monitor in monitors:
        values, words = fitted(monitor, [batches_of("six classes"), other])
        assert assert_each_nan_has_one_reason(values, words) == len(values) > 0


def test_a_nan_of_a_metric_of_ones_own_has_one_reason() -> None:
    values, words = fitted(RetrievalMonitor(metrics=("mAP", UNDEFINED)), batches_of("six classes"))
    assert assert_each_nan_has_one_reason(values, words) == 1


def test_a_nan_that_a_checkpoint_waits_for_has_one_reason(tmp_path: Any) -> None:
    """At the first validation nothing has moved yet; with a shuffled loader nothing can be compared."""
    waits = ModelCheckpoint(tmp_path, monitor="val/cosine_to_first", mode="max")
    for shuffle, epochs in ((False, 1), (True, 2)):
        data = DataLoader(TensorDataset(POINTS, CLASSES, CLASSES), batch_size=11, shuffle=shuffle)
        values, words = fitted(EmbeddingHealthMonitor(every_n_steps=None), data, waits, max_epochs=epochs)
        assert math.isnan(values["val/cosine_to_first"])
        assert_each_nan_has_one_reason({key: values[key] for key in values if "cosine" in key}, words)


OF_TRAINING: dict[str, Callable[[Tensor], Tensor]] = {
    "all equal": lambda points: torch.ones(len(points), 3),
    "zeros": lambda points: torch.zeros(len(points), 3),
    "NaN": lambda points: points * math.nan,
}


@pytest.mark.parametrize("monitor", [DiscriminantRatioMonitor, EmbeddingHealthMonitor])
@pytest.mark.parametrize("situation", [*OF_TRAINING, "one class", "one item", "each class has one item"])
def test_each_nan_of_a_training_batch_has_one_reason_in_the_run(monitor: Any, situation: str) -> None:
    points, labels = items().tensors
    made = {
        "one class": TensorDataset(points, labels * 0 + 3),
        "one item": TensorDataset(points[:1], labels[:1]),
        "each class has one item": TensorDataset(points[:6], 10 * torch.arange(6) - 7),
    }
    net = Given(OF_TRAINING.get(situation, lambda points: points))
    run = trainer(monitor(every_n_steps=1), max_epochs=2)
    with told() as words:
        run.fit(net, loader(made.get(situation, items())))
    values = {key: float(value) for key, value in run.callback_metrics.items()}
    assert assert_each_nan_has_one_reason(values, words) or monitor is EmbeddingHealthMonitor


def test_a_step_that_moves_nothing_has_one_reason_for_each_nan() -> None:
    frozen = protonet(learning_rate=1e-30)
    run = trainer(TrainingDynamicsMonitor(every_n_steps=1))
    with told() as words:
        run.fit(frozen, episodes())
    values = {key: float(value) for key, value in run.callback_metrics.items() if key.startswith("dynamics")}
    assert assert_each_nan_has_one_reason(values, words)


def test_a_single_episode_has_one_reason_for_each_nan() -> None:
    protocol = EpisodeProtocol(ways=3, shots=SHOTS, queries=3, episodes=1)
    run = trainer(max_epochs=2)
    with told() as words:
        run.fit(protonet(evaluation=protocol), episodes(), DataLoader(episode_items(), batch_size=9))
    values = {key: float(value) for key, value in run.callback_metrics.items() if "ci95_open" not in key}
    assert assert_each_nan_has_one_reason(values, words) == 2
