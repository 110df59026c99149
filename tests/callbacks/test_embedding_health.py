"""EmbeddingHealthMonitor on real Trainers: with and without labels, in batches and sets, and what it says of a collapse."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fewshot_callbacks import EmbeddingHealthMonitor, EmbeddingSource, RetrievalMonitor, embedding_health
from fewshot_callbacks.functional.health import Moments, names_of
from tests.callbacks.models import EveryEpoch, Net, items, loader, said, trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`|.*defined a `validation_step`")


class TwoViews(Net):
    """Self-supervised: a batch is two views of each item, and nothing else; `shrink` is what is left of an embedding."""

    def __init__(self, shrink: float = 1.0) -> None:
        super().__init__()
        self.shrink = shrink

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, other = (self.embed(view) for view in batch)
        return (one - other).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": 1 + self.shrink * batch[0].double()}


def views() -> TensorDataset:
    points = items().tensors[0]
    return TensorDataset(points, points + 0.1)


@pytest.mark.parametrize("settings", [{}, {"normalize": True}, {"k": 4}])
@pytest.mark.parametrize("batch_size", [1, 5, 36])
def test_a_set_is_measured_as_the_function_does(settings: dict[str, Any], batch_size: int) -> None:
    net, monitor = Net(), EmbeddingHealthMonitor(**settings)
    [logged] = trainer(monitor).validate(net, loader(batch_size=batch_size), verbose=False)
    expected = embedding_health(*net.by_hand(items()), **({"k": None} | settings))
    assert logged == pytest.approx({f"val/{k}": v for k, v in expected.metrics().items()}, rel=1e-4, nan_ok=True)
    assert monitor.reports[""].items == 36
    [tested] = trainer(EmbeddingHealthMonitor(**settings)).test(net, loader(), verbose=False)
    assert tested.keys() == {f"test/{name}" for name in names_of(labels=True, k=monitor.k)}


@pytest.mark.parametrize("source", [("embeddings", "labels"), lambda outputs, batch: (outputs["embeddings"], None)])
def test_labels_are_not_needed(source: Any) -> None:
    run = trainer(EmbeddingHealthMonitor(source=source))
    [logged] = run.validate(TwoViews(), loader(views()), verbose=False)
    expected = embedding_health(1 + items().tensors[0].double(), k=None).metrics()
    assert logged == pytest.approx({f"val/{name}": value for name, value in expected.items()}, rel=1e-6)
    assert "val/cdnv" not in logged


def test_training_batches_without_labels_are_measured_each_nth() -> None:
    class Keeps(TwoViews):
        def __init__(self) -> None:
            super().__init__()
            self.given: list[Tensor] = []
            self.encoder.register_forward_hook(lambda module, inputs, output: self.given.append(output.detach()))

    net, seen = Keeps(), []
    monitor = EmbeddingHealthMonitor(source=EmbeddingSource("encoder", views=2), every_n_steps=2)
    run = trainer(monitor, EveryEpoch("train/rankme"), max_epochs=2, limit_val_batches=0)
    net.on_train_batch_end = lambda *_: seen.append(float(run.callback_metrics.get("train/rankme", -1.0)))  # type: ignore
    run.fit(net, loader(views()))
    expected = [Moments.of(torch.cat(net.given[2 * i : 2 * i + 2])).rankme() for i in range(8)]
    assert seen == pytest.approx([-1.0, expected[1], expected[1], *[expected[3]] * 2, *[expected[5]] * 2, expected[7]])


@pytest.mark.parametrize(
    ("shrink", "what"), [(0.0, "a point: 36 items differ by 0.0e+00"), (1e-8, "a point: 36 items")]
)
def test_a_collapse_is_said_once_with_its_number(shrink: float, what: str) -> None:
    monitor = EmbeddingHealthMonitor(every_n_steps=None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer(monitor, max_epochs=3).fit(TwoViews(shrink), loader(views()), loader(views()))
    [words] = [words for words in said(warned) if "has collapsed" in words]
    assert words.startswith(f"In val: The embedding has collapsed to {what}")
    assert "EmbeddingHealthMonitor(strict=True) raises instead" in words


def test_few_directions_are_said_in_training_too_and_strict_raises() -> None:
    class Line(TwoViews):
        def embed(self, points: Tensor) -> Tensor:
            return super().embed(points)[:, :1] * torch.arange(60.0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "embeddings": self.embed(batch[0])}

    points = torch.randn(60, 12)
    data = loader(TensorDataset(points, points + 0.1), batch_size=60)
    with pytest.raises(ValueError, match=r"few directions: RankMe is 1.00 of 60"):
        trainer(EmbeddingHealthMonitor(every_n_steps=1, strict=True)).fit(Line(), data)


def test_an_embedding_that_is_not_finite_is_nan_and_the_fit_goes_on() -> None:
    net, data = TwoViews(math.nan), loader(views())
    run = trainer(EmbeddingHealthMonitor(every_n_steps=None), max_epochs=2)
    with pytest.warns(
        UserWarning, match="val/rankme and the other values of this set are NaN.*36 of 36 rows"
    ) as warned:
        run.fit(net, data, data)
    assert len([words for words in said(warned) if "NaN" in words]) == 1
    assert all(math.isnan(value) for key, value in run.callback_metrics.items() if key.startswith("val/"))
    assert run.current_epoch == 2


def test_it_stands_beside_other_monitors_and_each_loader_has_its_values() -> None:
    source = EmbeddingSource("encoder")
    monitors = EmbeddingHealthMonitor(source=source), RetrievalMonitor(source=source, label_groups=None)
    run = trainer(*monitors)
    run.validate(Net(), [loader(), loader(items(seed=4))], verbose=False)
    assert {"val/rankme/dataloader_idx_0", "val/cdnv/dataloader_idx_1", "val/mAP/dataloader_idx_1"} <= {
        *run.callback_metrics
    }


@pytest.mark.parametrize(
    ("settings", "words"), [({"every_n_steps": 0}, "must be at least 1"), ({"k": 1}, "at least 2")]
)
def test_settings_out_of_range(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(
        ValueError, match=rf"EmbeddingHealthMonitor\({'='.join(map(str, *settings.items()))}\) .*{words}"
    ):
        EmbeddingHealthMonitor(**settings)
