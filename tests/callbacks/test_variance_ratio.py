"""The variance ratio that DiscriminantRatioMonitor logs beside J, of batches and of sets."""

import csv
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from fewshot_callbacks.callbacks import DiscriminantRatioMonitor
from tests.callbacks.models import EveryBatch, Net, items, loader, said, trainer
from tests.functional.variance import by_definition

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`|.*defined a `validation_step`")
WORDS = "of the first measured batch have one item"


class Logged(Callback):
    """What stands under a key after each training batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.values.append(float(trainer.callback_metrics.get("train/variance_ratio", -1.0)))


def train(
    monitor: DiscriminantRatioMonitor, data: TensorDataset | None = None, batch_size: int = 11, **settings: Any
) -> Any:
    batches, logged = EveryBatch(), Logged()
    trainer(monitor, batches, logged, **settings).fit(Net(), loader(data, batch_size))
    return [by_definition(step["embeddings"], step["labels"]) for step in batches.outputs], logged.values


def alone(count: int = 6) -> TensorDataset:
    """A class for each item but two."""
    labels = torch.arange(count)
    labels[1] = 0
    return TensorDataset(torch.randn(count, 12, generator=torch.Generator().manual_seed(0)), 10 * (labels % 6) - 7)


# ---------------------------------------------------------------------------------------------------------- training
@pytest.mark.parametrize("settings", [{}, {"skip_singletons": True}, {"eps": 0.5}])
def test_every_batch_is_measured_by_default(settings: dict[str, Any], tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    expected, logged = train(DiscriminantRatioMonitor(**settings), max_epochs=2, logger=logger, log_every_n_steps=1)
    assert len(expected) == 8
    assert logged == pytest.approx(expected, rel=1e-4, abs=1e-5)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        written = [float(row["train/variance_ratio"]) for row in csv.DictReader(file) if row["train/variance_ratio"]]
    assert written == pytest.approx(expected, rel=1e-4, abs=1e-5)


class Waits(TorchDispatchMode):
    """Counts what would wait for a GPU: values that are read, and sizes that only the device knows."""

    NAMES = "aten._local_scalar_dense", "aten._unique2", "aten.nonzero"

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removesuffix(".default")
        if name in self.NAMES:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


class Watched(DiscriminantRatioMonitor):
    """Counts the waits in its own hook after each batch, `log` included."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.waits: list[list[str]] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        with Waits() as mode:
            super().on_train_batch_end(*args, **kwargs)
        self.waits.append(mode.seen)


@pytest.mark.parametrize("skip_singletons", [False, True])
def test_after_the_first_batch_nothing_waits_for_the_device(skip_singletons: bool) -> None:
    monitor = Watched(skip_singletons=skip_singletons, prog_bar=False)
    train(monitor, max_epochs=2)
    first, *others = monitor.waits
    assert "aten._unique2" in first  # the labels are counted, and the test notices
    assert others == [[]] * 7


@contextmanager
def recorded() -> Iterator[list[str]]:
    """What is shown of warnings under Python's own filter, which shows equal ones of one place once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        words: list[str] = []
        yield words
        words += [text for text in said(caught) if "train/J" in text or "train/variance_ratio" in text]


def test_most_classes_with_one_item_are_one_warning_in_every_fit() -> None:
    monitor = DiscriminantRatioMonitor()
    with recorded() as words:
        for again in (monitor, monitor, DiscriminantRatioMonitor()):
            train(again, alone(), batch_size=6, max_epochs=2)
    assert len(words) == 3
    assert words[0] == words[1] == words[2]
    assert words[0].startswith(f"4 of the 5 classes {WORDS}: train/J then depends on how the batch was drawn")
    assert "Use train/variance_ratio, which can be compared if some class has two items, or draw" in words[0]


def test_a_ratio_that_is_undefined_is_nan_and_one_warning_in_every_fit() -> None:
    points, _ = items().tensors
    one_class = TensorDataset(points, torch.full((36,), 3))
    with recorded() as words:
        for _ in range(2):
            _, logged = train(DiscriminantRatioMonitor(), one_class, max_epochs=2)
            assert all(map(math.isnan, logged))
    assert len(words) == 2
    assert words[0].startswith("train/variance_ratio was NaN in 4 of 4 batches: there was a single class")


# ------------------------------------------------------------------------------------------------ validation and test
def test_a_set_of_one_class_is_nan_and_one_warning_and_strict_goes_on_for_j_is_defined() -> None:
    points, _ = items().tensors
    data = loader(TensorDataset(points, torch.full((36,), 3)))
    run = trainer(DiscriminantRatioMonitor(strict=True), max_epochs=2)
    with pytest.warns(UserWarning, match="val/variance_ratio is NaN. The set has a single class") as warned:
        run.fit(Net(), loader(), data)
    assert len([text for text in said(warned) if "val/variance_ratio" in text]) == 1
    values = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("val/")}
    assert values.pop("val/J") == pytest.approx(0, abs=1e-9)
    assert sorted(values) == ["val/variance_ratio", "val/variance_ratio_high", "val/variance_ratio_low"]
    assert all(map(math.isnan, values.values()))
