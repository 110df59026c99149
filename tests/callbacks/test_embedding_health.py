"""EmbeddingHealthMonitor on real Trainers: with and without labels, in batches and sets, and its warning of a collapse."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import (
    EmbeddingHealthMonitor,
    EmbeddingSource,
    RetrievalMonitor,
    embedding_health,
    embedding_movement,
)
from fewshot_callbacks.functional.health import names_of
from fewshot_callbacks.functional.moments import Moments
from tests.callbacks.models import TRAINING, VALIDATION, Embeds, Net, items, loader, messages_of, trainer
from tests.messages import refused, warned

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


@pytest.mark.parametrize(("settings", "size"), [({}, 1), ({"normalize": True}, 5), ({"k": 4}, 5), ({}, 36)])
def test_a_set_is_measured_as_the_function_does(settings: dict[str, Any], size: int) -> None:
    net, monitor = Net(), EmbeddingHealthMonitor(**settings)
    [logged] = trainer(monitor).validate(net, loader(batch_size=size), verbose=False)
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
    given: list[Tensor] = []
    seen: list[float] = []
    net = TwoViews()
    net.encoder.register_forward_hook(lambda module, inputs, output: given.append(output.detach()))
    run = trainer(EmbeddingHealthMonitor(source=EmbeddingSource("encoder", views=2), every_n_steps=2), max_epochs=2)
    net.on_train_batch_end = lambda *_: seen.append(float(run.callback_metrics.get("train/rankme", -1.0)))  # type: ignore
    run.fit(net, loader(views()))
    expected = [Moments.of(torch.cat(given[2 * i : 2 * i + 2])).rankme() for i in range(8)]
    assert seen == pytest.approx([-1.0, expected[1], expected[1], *[expected[3]] * 2, *[expected[5]] * 2, expected[7]])


@pytest.mark.filterwarnings("ignore:.*(spectral_decay|cka_to_first).*NaN")
@pytest.mark.parametrize(("shrink", "facts"), [(0.0, (36, "0.0e+00")), (1e-8, (36,))])
def test_a_collapse_is_said_once_with_its_number(shrink: float, facts: tuple[Any, ...]) -> None:
    monitor = EmbeddingHealthMonitor(every_n_steps=None)
    with warned(UserWarning, "val", *facts, "EmbeddingHealthMonitor(strict=True)") as caught:
        trainer(monitor, max_epochs=2).fit(TwoViews(shrink), loader(views()), loader(views()))
    assert len(messages_of(caught, "EmbeddingHealthMonitor(strict=True)")) == 1


def test_few_directions_are_said_in_training_too_and_strict_raises() -> None:
    class Line(TwoViews):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            lines = self.embed(batch[0])[:, :1] * torch.arange(60.0)
            return {"loss": lines.square().mean(), "embeddings": lines}

    points = torch.randn(60, 12)
    data = loader(TensorDataset(points, points + 0.1), batch_size=60)
    with refused(ValueError, "EmbeddingHealthMonitor", "batch", "RankMe", "1.00", 60):
        trainer(EmbeddingHealthMonitor(every_n_steps=1, strict=True)).fit(Line(), data)


def test_an_embedding_that_is_not_finite_is_nan_and_the_fit_goes_on() -> None:
    net, data = TwoViews(math.nan), loader(views())
    run = trainer(EmbeddingHealthMonitor(every_n_steps=None), max_epochs=2)
    with warned(UserWarning, "val/rankme", "EmbeddingHealthMonitor", "NaN", 36) as caught:
        run.fit(net, data, data)
    assert len(messages_of(caught, "NaN")) == 1
    assert all(math.isnan(value) for key, value in run.callback_metrics.items() if key.startswith("val/"))
    assert run.current_epoch == 2


def test_it_stands_beside_other_monitors_and_each_loader_has_its_values() -> None:
    source = EmbeddingSource("encoder")
    run = trainer(EmbeddingHealthMonitor(source=source), RetrievalMonitor(source=source, metrics=("mAP",)))
    run.validate(Net(), [loader(), loader(items(seed=4))], verbose=False)
    expected = {"val/rankme/dataloader_idx_0", "val/cdnv/dataloader_idx_1", "val/mAP/dataloader_idx_1"}
    assert expected <= run.callback_metrics.keys()


@pytest.mark.parametrize(("name", "value", "least"), [("every_n_steps", 0, 1), ("k", 1, 2)])
def test_settings_out_of_range_are_refused(name: str, value: int, least: int) -> None:
    with refused(ValueError, "EmbeddingHealthMonitor", f"{name}={value}", least):
        EmbeddingHealthMonitor(**{name: value})


class Frozen(Embeds):
    """Trains a layer that its embeddings do not pass."""

    def configure_optimizers(self) -> Any:
        self.beside = torch.nn.Parameter(torch.zeros(1))
        return torch.optim.SGD([self.beside], lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.beside.square().sum()


class Keeps(Callback):
    """Keeps what each validation logs of the movement, and the embeddings of that moment."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []
        self.embeddings: list[torch.Tensor] = []

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        logged = trainer.callback_metrics.items()
        self.values.append({key: float(value) for key, value in logged if "_to_" in key})
        self.embeddings.append(pl_module.by_hand(VALIDATION)[0])


def test_the_movement_since_the_first_validation_and_since_the_one_before() -> None:
    kept = Keeps()
    run = trainer(EmbeddingHealthMonitor(), kept, max_epochs=3)
    run.fit(Embeds(), loader(TRAINING), loader(VALIDATION))
    first, second, third = kept.embeddings
    assert kept.values[0] == {}
    for values, now, before in ((kept.values[1], second, first), (kept.values[2], third, second)):
        to_first = embedding_movement(first, now)
        to_previous = embedding_movement(before, now)
        assert values == pytest.approx(
            {
                "val/cosine_to_first": to_first.cosine,
                "val/cosine_to_previous": to_previous.cosine,
                "val/cka_to_first": to_first.cka,
            },
            rel=1e-5,
        )
    assert kept.values[2]["val/cosine_to_first"] < kept.values[2]["val/cosine_to_previous"] < 1


def test_an_embedding_that_no_step_moves_is_said_once() -> None:
    facts = "val", "embedding", 4, "steps", 36, "weights", "adapter"
    with warned(UserWarning, *facts) as caught:
        trainer(EmbeddingHealthMonitor(), max_epochs=4).fit(Frozen(), loader(), loader(VALIDATION))
    assert len(messages_of(caught, *facts)) == 1


def test_a_validation_before_the_training_is_the_first() -> None:
    kept, net = Keeps(), Embeds()
    run = trainer(EmbeddingHealthMonitor(), kept)
    run.validate(net, loader(VALIDATION), verbose=False)
    run.validate(net, loader(VALIDATION), verbose=False)  # nothing was trained between the two
    run.fit(net, loader(TRAINING), loader(VALIDATION))
    assert kept.values[:2] == [{}, {}]
    before, _, after = kept.embeddings
    assert kept.values[2]["val/cka_to_first"] == pytest.approx(embedding_movement(before, after).cka, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*shuffling enabled", "ignore:.*the loader shuffles its items")
def test_items_in_another_order_and_another_module_are_not_compared() -> None:
    monitor = EmbeddingHealthMonitor()
    kept, net = Keeps(), Embeds()
    shuffled = DataLoader(VALIDATION, batch_size=11, shuffle=True)
    trainer(monitor, kept, max_epochs=2).fit(net, loader(), shuffled)
    assert kept.values == [{}, {}]
    monitor = EmbeddingHealthMonitor()
    trainer(monitor, max_epochs=1).fit(net, loader(), loader(VALIDATION))
    kept = Keeps()
    trainer(monitor, kept, max_epochs=1).fit(Embeds(), loader(), loader(VALIDATION))
    assert kept.values == [{}]
    kept = Keeps()
    trainer(monitor, kept, max_epochs=1).fit(net, loader(), loader(TRAINING))
    assert kept.values == [{}]


def test_a_checkpoint_may_wait_for_a_movement(tmp_path: Path) -> None:
    """The first validation has nothing to compare with: the value is NaN, and the run continues."""
    kept = Keeps()
    best = ModelCheckpoint(tmp_path, monitor="val/cka_to_first", mode="max")
    trainer(EmbeddingHealthMonitor(), best, kept, max_epochs=2).fit(Embeds(), loader(TRAINING), loader(VALIDATION))
    assert kept.values[0].keys() == {"val/cka_to_first"}
    assert math.isnan(kept.values[0]["val/cka_to_first"])
    assert best.best_model_score == pytest.approx(kept.values[1]["val/cka_to_first"])
