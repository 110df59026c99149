"""DiscriminantRatioMonitor on real Trainers: J of batches and of sets, what is logged when, and what is refused."""

import csv
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fewshot_callbacks import EmbeddingSource
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import discriminant_ratio
from tests.callbacks.models import EveryBatch, Net, items, loader, said, trainer
from tests.functional.variance import logged_by_definition

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`|.*defined a `validation_step`")


def train(monitor: DiscriminantRatioMonitor, net: Net | None = None, **settings: Any) -> EveryBatch:
    """36 items in batches of 11: four batches an epoch, the last one of three; each has a class with a single item."""
    batches = EveryBatch()
    trainer(monitor, batches, **settings).fit(Net() if net is None else net, loader())
    return batches


def ratios(batches: EveryBatch, **settings: Any) -> list[float]:
    """J of every batch, by the function."""
    return [float(discriminant_ratio(step["embeddings"], step["labels"], **settings)) for step in batches.outputs]


# ---------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("settings", [{}, {"normalize": True}, {"skip_singletons": True}, {"eps": 0.5}])
def test_every_batch_is_measured_as_the_function_does(settings: dict[str, Any]) -> None:
    batches = train(DiscriminantRatioMonitor(**settings), max_epochs=2)
    expected = ratios(batches, **settings)
    assert len(expected) == 8
    assert batches.logged == batches.shown == pytest.approx(expected, nan_ok=True)
    if settings:
        assert expected != pytest.approx(ratios(batches), nan_ok=True)


def test_the_progress_bar_shows_j_alone(tmp_path: Path) -> None:
    """The variance ratio beside it would break the bar into lines on a narrow terminal."""
    run = trainer(DiscriminantRatioMonitor(), enable_progress_bar=True, default_root_dir=tmp_path)
    run.fit(Net(), loader(), loader())
    assert {key for key in run.progress_bar_metrics if "/" in key} == {"train/J"}
    assert {"train/J", "train/variance_ratio"} <= run.callback_metrics.keys()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_nth_batch_is_measured_over_all_epochs(accumulate: int) -> None:
    batches = train(DiscriminantRatioMonitor(every_n_steps=3), max_epochs=3, accumulate_grad_batches=accumulate)
    every = ratios(batches)
    # until the next one is measured the latest stands: batches 3, 6, 9 ... counted from 1, as Lightning's loggers count
    expected = [-1.0 if i < 2 else every[i - (i + 1) % 3] for i in range(12)]
    assert batches.logged == batches.shown == pytest.approx(expected)


def test_a_logger_gets_the_batches_it_writes(tmp_path: Path) -> None:
    """With `every_n_steps` equal to `log_every_n_steps`, what is written at a step was measured at that step."""
    logger = CSVLogger(tmp_path)
    batches = train(DiscriminantRatioMonitor(every_n_steps=2), logger=logger, log_every_n_steps=2)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = {int(row["step"]): float(row["train/J"]) for row in csv.DictReader(file)}
    every = ratios(batches)
    assert rows == pytest.approx({1: every[1], 3: every[3]})


@pytest.mark.filterwarnings("ignore:.*of the first measured batch have one item")
def test_a_batch_that_j_says_nothing_of_is_nan_and_one_warning_at_the_end_of_the_epoch() -> None:
    data = TensorDataset(torch.randn(6, 12), 10 * torch.arange(6) - 7)  # a class for each item
    batches = EveryBatch()
    with pytest.warns(
        UserWarning, match="train/J was NaN in 3 of 3 batches: each class had one item.*draw several"
    ) as w:
        trainer(DiscriminantRatioMonitor(), batches, max_epochs=2).fit(Net(), loader(data, batch_size=2))
    assert len([warning for warning in w if "train/J was NaN" in str(warning.message)]) == 1
    assert all(map(math.isnan, batches.logged))
    assert len(batches.logged) == 6


def test_a_step_that_returns_only_a_loss_is_nan_and_one_warning() -> None:
    class OnlyLoss(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"]

    with pytest.warns(UserWarning, match="train/J") as warned:
        batches = train(DiscriminantRatioMonitor(strict=False), OnlyLoss(), max_epochs=2)
    [words] = [words for words in said(warned) if "val_dataloader" not in words]
    assert words.startswith(
        "train/J and train/variance_ratio are NaN. DiscriminantRatioMonitor found no embeddings: training_step returned "
        "a mapping with the keys "
        "'loss'; expected 'embeddings'."
    )
    assert all(map(math.isnan, batches.logged))
    assert len(batches.logged) == 8


class Views(Dataset):
    """Two views of each item, and no labels, as self-supervised training has them."""

    def __len__(self) -> int:
        return len(items())

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        point, _ = items()[index]
        return point, point + 0.1


class SelfSupervised(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = (self.embed(view) for view in batch)
        return (one - other).square().mean()


@pytest.mark.parametrize("source", ["encoder", EmbeddingSource("encoder", views=2)], ids=["a name", "views"])
def test_training_batches_without_labels_have_one_message_with_the_way_out(source: Any) -> None:
    words = (
        "DiscriminantRatioMonitor found no labels: training_step returned none under 'labels', and the batch is two tensors "
        "of one shape, such as two views of each item. Say where they are in the batch: "
    )
    with pytest.raises(
        UsageError, match=f"^{re.escape(words)}.*every_n_steps=None. measures validation and test alone"
    ):
        trainer(DiscriminantRatioMonitor(source=source)).fit(SelfSupervised(), loader(Views()), loader())


def test_validation_alone_is_measured_if_asked() -> None:
    run = trainer(DiscriminantRatioMonitor(source="encoder", every_n_steps=None))
    run.fit(SelfSupervised(), loader(Views()), loader())
    assert {"val/J", "val/variance_ratio"} <= run.callback_metrics.keys()
    assert not [key for key in run.callback_metrics if key.startswith("train/")]


@pytest.mark.parametrize("steps", [0, -1])
def test_every_n_steps_must_be_positive(steps: int) -> None:
    with pytest.raises(ValueError, match=rf"DiscriminantRatioMonitor\(every_n_steps={steps}\) must be at least 1"):
        DiscriminantRatioMonitor(every_n_steps=steps)


# ------------------------------------------------------------------------------------------------ validation and test


@pytest.mark.parametrize("settings", [{}, {"normalize": True}, {"skip_singletons": True}, {"eps": 0.5}])
@pytest.mark.parametrize("batch_size", [1, 5, 36])
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


@pytest.mark.parametrize("names", [None, ("easy", "hard")])
def test_each_loader_has_its_own_j(names: tuple[str, str] | None) -> None:
    net, sets = Net(), [items(), items(per_class=4, seed=4)]
    loaders = [loader(data) for data in sets]
    pairs = [net.by_hand(data) for data in sets]
    expected = [{"J": discriminant_ratio(*pair).item()} | logged_by_definition(*pair) for pair in pairs]
    given = loaders if names is None else dict(zip(names, loaders, strict=True))
    monitored = trainer(DiscriminantRatioMonitor())
    monitored.validate(net, given, verbose=False)
    ends = names or ("dataloader_idx_0", "dataloader_idx_1")
    logged = {key: float(value) for key, value in monitored.callback_metrics.items()}
    wanted = {f"val/{name}/{end}": v for end, ratios in zip(ends, expected, strict=True) for name, v in ratios.items()}
    assert logged == pytest.approx(wanted, rel=1e-5, abs=1e-6)


def test_the_item_that_is_not_finite_is_counted_over_all_batches() -> None:
    points, labels = items().tensors
    broken = points.clone()
    broken[25] = math.nan  # the fourth item of the third batch
    with pytest.warns(UserWarning, match=r"1 of the 11 embeddings of a batch are not finite .* the first at item 25\."):
        trainer(DiscriminantRatioMonitor()).validate(Net(), loader(TensorDataset(broken, labels)), verbose=False)
