"""DiscriminantRatioMonitor on real Trainers: J and the variance ratio of batches and of sets, logged when, and refused."""

import csv
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from fewshot_callbacks import EmbeddingSource
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import discriminant_ratio
from tests.callbacks.models import EveryBatch, Net, items, loader, messages_of, trainer
from tests.functional.variance_ratio_reference import logged_by_definition, ratio_by_definition
from tests.messages import missing_facts, refused, warned

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`|.*defined a `validation_step`")


class Batches(EveryBatch):
    """Keeps the variance ratio that is logged after each training batch, too."""

    def __init__(self) -> None:
        super().__init__()
        self.ratios: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.ratios.append(float(trainer.callback_metrics.get("train/variance_ratio", -1.0)))


def train(monitor: DiscriminantRatioMonitor, net: Any = None, data: Any = None, size: int = 11, **settings: Any) -> Any:
    """36 items in batches of 11: four batches an epoch, the last one of three; each has a class with a single item."""
    batches = Batches()
    settings.setdefault("enable_progress_bar", True)
    trainer(monitor, batches, **settings).fit(net or Net(), loader(data, size))
    return batches


def ratios(batches: EveryBatch, **settings: Any) -> list[float]:
    """J of every batch, by the function."""
    return [float(discriminant_ratio(step["embeddings"], step["labels"], **settings)) for step in batches.outputs]


def one_class() -> TensorDataset:
    return TensorDataset(items().tensors[0], torch.full((36,), 3))


@contextmanager
def recorded() -> Iterator[list[str]]:
    """What is shown of warnings under Python's own filter, which shows equal ones of one place once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        words: list[str] = []
        yield words
        words += [text for text in messages_of(caught) if "train/J" in text or "train/variance_ratio" in text]


@pytest.mark.parametrize("settings", [{}, {"normalize": True}, {"skip_singletons": True}, {"eps": 0.5}])
def test_every_batch_is_measured_as_the_function_does(settings: dict[str, Any]) -> None:
    batches = train(DiscriminantRatioMonitor(**settings), max_epochs=2)
    expected = ratios(batches, **settings)
    assert len(expected) == 8
    assert batches.logged == batches.shown == pytest.approx(expected, nan_ok=True)
    if settings:
        assert expected != pytest.approx(ratios(batches), nan_ok=True)
    scaled = torch.nn.functional.normalize if settings.get("normalize") else torch.Tensor.double
    by_hand = [ratio_by_definition(scaled(step["embeddings"]), step["labels"]) for step in batches.outputs]
    assert batches.ratios == pytest.approx(by_hand, rel=1e-4, abs=1e-5)


def test_j_is_not_read_for_a_progress_bar_that_is_not_there() -> None:
    """Lightning reads what is shown after each batch, also without a bar: a training step would wait for the device."""
    batches = train(DiscriminantRatioMonitor(), enable_progress_bar=False)
    assert set(batches.shown) == {-1.0}
    assert batches.logged == pytest.approx(ratios(batches), nan_ok=True)


class Waits(TorchDispatchMode):
    """Counts what would wait for a GPU: values that are read, and sizes that only the device knows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removesuffix(".default")
        self.seen += [name] * (name in ("aten._local_scalar_dense", "aten._unique2", "aten.nonzero"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("skip_singletons", [False, True])
def test_after_the_first_batch_nothing_waits_for_the_device(skip_singletons: bool) -> None:
    waits: list[list[str]] = []

    class Watched(DiscriminantRatioMonitor):
        """Counts the waits in its own hook after each batch, `log` included."""

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            with Waits() as mode:
                super().on_train_batch_end(*args, **kwargs)
            waits.append(mode.seen)

    train(Watched(skip_singletons=skip_singletons, prog_bar=False), max_epochs=2)
    assert "aten._unique2" in waits[0]  # the labels are counted, and the test notices
    assert waits[1:] == [[]] * 7


def test_the_progress_bar_shows_j_alone(tmp_path: Path) -> None:
    """The variance ratio beside it would break the bar into lines on a narrow terminal."""
    run = trainer(DiscriminantRatioMonitor(), enable_progress_bar=True, default_root_dir=tmp_path)
    run.fit(Net(), loader(), loader())
    assert {key for key in run.progress_bar_metrics if "/" in key} == {"train/J"}
    assert {"train/J", "train/variance_ratio"} <= run.callback_metrics.keys()


def test_every_nth_batch_is_measured_over_all_epochs() -> None:
    batches = train(DiscriminantRatioMonitor(every_n_steps=3), max_epochs=3, accumulate_grad_batches=2)
    every = ratios(batches)
    # until the next one is measured the latest stands: batches 3, 6, 9 ... counted from 1, as Lightning's loggers count
    expected = [-1.0 if i < 2 else every[i - (i + 1) % 3] for i in range(12)]
    assert batches.logged == batches.shown == pytest.approx(expected)


def test_a_logger_gets_the_batches_it_writes(tmp_path: Path) -> None:
    """With `every_n_steps` equal to `log_every_n_steps`, what is written at a step was measured at that step."""
    logger = CSVLogger(tmp_path)
    batches = train(DiscriminantRatioMonitor(every_n_steps=2), logger=logger, log_every_n_steps=2)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [1, 3]
    for key, every in (("train/J", ratios(batches)), ("train/variance_ratio", batches.ratios)):
        assert [float(row[key]) for row in rows] == pytest.approx(every[1::2])


def test_batches_that_a_ratio_says_nothing_of_are_nan_and_one_warning_at_the_end_of_the_epoch_in_every_fit() -> None:
    lone = TensorDataset(torch.randn(6, 12), 10 * torch.arange(6) - 7)  # a class for each item
    j = "train/J", 3, "class", "item", "equal"
    ratio = "train/variance_ratio", 4, "class", "EpisodicBatchSampler"
    for data, size, facts in ((lone, 2, j), (one_class(), 11, ratio)):
        with recorded() as words:
            for _ in range(2):
                batches = train(DiscriminantRatioMonitor(), data=data, size=size, max_epochs=2)
                assert all(map(math.isnan, batches.ratios))
                assert all(map(math.isnan, batches.logged)) == (data is lone)
        assert [missing_facts(text, facts) for text in words if "NaN" in text] == [[], []]


def test_batches_in_which_each_class_has_one_item_are_one_warning_that_names_a_sampler() -> None:
    lone = TensorDataset(torch.randn(6, 12), 10 * torch.arange(6) - 7)
    with recorded() as words:
        batches = train(DiscriminantRatioMonitor(), data=lone, size=2, max_epochs=2)
    assert all(map(math.isnan, batches.ratios))  # so the warning must not recommend it
    assert len(words) == 1
    assert missing_facts(words[0], ("train/J", "train/variance_ratio", "NaN", 3, "EpisodicBatchSampler")) == []


def test_most_classes_with_one_item_are_one_warning_in_every_fit() -> None:
    points = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    alone = TensorDataset(points, 10 * torch.tensor([0, 0, 2, 3, 4, 5]) - 7)
    monitor = DiscriminantRatioMonitor()
    with recorded() as words:
        for again in (monitor, monitor, DiscriminantRatioMonitor()):
            train(again, data=alone, size=6, max_epochs=2)
    assert len(words) == 3
    assert words[0] == words[1] == words[2]
    facts = 4, 5, "classes", "train/J", "train/variance_ratio", "EpisodicBatchSampler"
    assert missing_facts(words[0], facts) == []


def test_a_step_that_returns_only_a_loss_is_nan_and_one_warning() -> None:
    class OnlyLoss(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"]

    with recorded() as words:
        batches = train(DiscriminantRatioMonitor(strict=False), OnlyLoss(), max_epochs=2)
    assert len(words) == 1
    facts = "train/J", "train/variance_ratio", "NaN", "training_step", "'loss'", "'embeddings'"
    assert missing_facts(words[0], ("DiscriminantRatioMonitor", *facts)) == []
    assert list(map(math.isnan, batches.logged)) == [True] * 8


def views() -> Any:
    """Two views of each item, and no labels, as self-supervised training has them."""
    points = items().tensors[0]
    return loader(TensorDataset(points, points + 0.1))


class SelfSupervised(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = (self.embed(view) for view in batch)
        return (one - other).square().mean()


@pytest.mark.parametrize("source", ["encoder", EmbeddingSource("encoder", views=2)], ids=["a name", "views"])
def test_training_batches_without_labels_have_one_message_with_the_way_out(source: Any) -> None:
    facts = "DiscriminantRatioMonitor", "training_step", "'labels'", "batch", "views", "every_n_steps=None"
    with refused(UsageError, *facts):
        trainer(DiscriminantRatioMonitor(source=source)).fit(SelfSupervised(), views(), loader())


def test_validation_alone_is_measured_if_asked() -> None:
    run = trainer(DiscriminantRatioMonitor(source="encoder", every_n_steps=None))
    run.fit(SelfSupervised(), views(), loader())
    assert {"val/J", "val/variance_ratio"} <= run.callback_metrics.keys()
    assert not [key for key in run.callback_metrics if key.startswith("train/")]


@pytest.mark.parametrize(
    ("settings", "batch_size"),
    [({}, 1), ({"normalize": True}, 5), ({"skip_singletons": True}, 36), ({"eps": 0.5}, 5), ({}, 36)],
)
def test_j_of_a_set_does_not_depend_on_its_batches(settings: dict[str, Any], batch_size: int) -> None:
    points, labels = items().tensors
    data = TensorDataset(torch.cat([points, points[:1]]), torch.cat([labels, torch.tensor([1])]))  # one lone class
    net = Net()
    embeddings, labels = net.by_hand(data)
    expected = {"J": discriminant_ratio(embeddings.double(), labels, **settings).item()}
    if settings.get("normalize"):
        embeddings = embeddings / embeddings.norm(dim=1, keepdim=True)
    expected |= logged_by_definition(embeddings, labels)
    [logged] = trainer(DiscriminantRatioMonitor(**settings)).validate(net, loader(data, batch_size), verbose=False)
    assert logged == pytest.approx({f"val/{name}": value for name, value in expected.items()}, rel=1e-6, abs=1e-6)
    [tested] = trainer(DiscriminantRatioMonitor(**settings)).test(net, loader(data, batch_size), verbose=False)
    assert tested == {f"test/{name}": logged[f"val/{name}"] for name in expected}


def test_each_loader_has_its_own_j() -> None:
    net, sets, wanted = Net(), {"easy": items(), "hard": items(per_class=4, seed=4)}, {}
    for name, data in sets.items():
        pair = net.by_hand(data)
        expected = {"J": discriminant_ratio(*pair).item()} | logged_by_definition(*pair)
        wanted |= {f"val/{key}/{name}": value for key, value in expected.items()}
    monitored = trainer(DiscriminantRatioMonitor())
    monitored.validate(net, {name: loader(data) for name, data in sets.items()}, verbose=False)
    logged = {key: float(value) for key, value in monitored.callback_metrics.items()}
    assert logged == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_the_item_that_is_not_finite_is_counted_over_all_batches() -> None:
    points, labels = items().tensors
    broken = points.clone()
    broken[25] = math.nan  # the fourth item of the third batch
    with warned(UserWarning, "val/J", "DiscriminantRatioMonitor", "1 of the 11 embeddings", "is", "NaN", "item", 25):
        trainer(DiscriminantRatioMonitor()).validate(Net(), loader(TensorDataset(broken, labels)), verbose=False)


def test_a_set_of_one_class_is_nan_and_one_warning_and_strict_goes_on_for_j_is_defined() -> None:
    run = trainer(DiscriminantRatioMonitor(strict=True), max_epochs=2)
    with warned(UserWarning, "val/variance_ratio", "NaN", "class") as caught:
        run.fit(Net(), loader(), loader(one_class()))
    assert len(messages_of(caught, "val/variance_ratio")) == 1
    values = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("val/")}
    assert values.pop("val/J") == pytest.approx(0, abs=1e-9)
    assert sorted(values) == ["val/variance_ratio", "val/variance_ratio_high", "val/variance_ratio_low"]
    assert all(map(math.isnan, values.values()))
