"""Ordinary modules as users have them, each attached to with one argument, on a real Trainer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import EmbeddingSource
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import discriminant_ratio, evaluate_retrieval
from tests.callbacks.models import Net, hooks, items, loader, measured, retrieval, trainer


def close(values: dict[str, float]) -> Any:
    return pytest.approx({f"val/{name}": value for name, value in values.items()}, rel=1e-5)


def validated(net: Net, *monitors: Any) -> dict[str, float]:
    [logged] = trainer(*monitors).validate(net, loader(), verbose=False)
    assert hooks(net) == 0
    return dict(logged)


class Convolutional(Net):
    """Ends in a pooled map (items, dim, 1, 1), as torchvision's ResNet does before it flattens; returns a loss."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict(
            {"features": nn.Unflatten(1, (-1, 1, 1)), "avgpool": nn.UpsamplingNearest2d(size)}
        )

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        pooled: Tensor = self.backbone["avgpool"](self.backbone["features"](self.embed(batch[0])))
        return pooled.sum()


def test_torchvisions_resnet_by_the_name_of_its_pooling_layer() -> None:
    resnet18: Callable[..., nn.Module] = pytest.importorskip("torchvision.models").resnet18

    class Classifier(Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = resnet18(num_classes=3)

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return {"loss": self.backbone(batch[0]).sum()}

    torch.manual_seed(0)
    net, labels = Classifier(), torch.arange(3).repeat(4)
    images = torch.randn(12, 3, 32, 32)
    monitor = retrieval(source="backbone.avgpool")
    [logged] = trainer(monitor).validate(net, loader(TensorDataset(images, labels)), verbose=False)
    net.backbone.fc = nn.Identity()  # what is left gives the pooled and flattened embeddings
    with torch.no_grad():
        embeddings = torch.cat([net.backbone.eval()(part) for part in images.split(11)])
    assert logged == close(measured(embeddings, labels))


def test_a_feature_map_is_refused_with_the_fix() -> None:
    fix = r"shape \(11, 5, 2, 2\).*This is a feature map: name the pooling layer.*embeddings.mean\(dim=\(2, 3\)\)"
    with pytest.raises(UsageError, match=fix):
        validated(Convolutional(size=2), retrieval(source="backbone.avgpool"))


# ----------------------------------------------------------------------------------------------------- outputs as objects


class ModelOutput(OrderedDict[str, Any]):
    """Stands for that of Hugging Face: a mapping whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass
class Output:
    pooler_output: Tensor
    hidden_states: tuple[Tensor, ...]


class Tower(nn.Module):
    def __init__(self, inner: nn.Module, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.make = inner, make

    def forward(self, points: Tensor) -> Any:
        return self.make(self.inner(points))


class Wrapped(Net):
    """Its encoder returns an object, as transformers do; its steps return a loss, or that object."""

    def __init__(self, make: Callable[[Tensor], Any], returns_output: bool = False) -> None:
        super().__init__()
        self.encoder = Tower(self.encoder, make)  # type: ignore[assignment]
        self.returns_output = returns_output

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        output = self.encoder(self.frozen(batch[0]))
        return output if self.returns_output else None

    def by_hand(self, data: TensorDataset) -> tuple[Tensor, Tensor]:
        self.eval()
        with torch.no_grad():
            return self.encoder.inner(self.frozen(data.tensors[0])), data.tensors[1]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (lambda z: ModelOutput(last_hidden_state=z[:, None], pooler_output=z), "encoder:pooler_output"),
        (lambda z: Output(pooler_output=z, hidden_states=(-z, z)), "encoder:pooler_output"),
        (lambda z: Output(pooler_output=-z, hidden_states=(-z, z)), "encoder:hidden_states.1"),
        (lambda z: (-z, {"last": z}), "encoder:1.last"),
    ],
)
def test_outputs_of_a_submodule_by_a_path(make: Any, source: str) -> None:
    net = Wrapped(make)
    assert validated(net, retrieval(source=source)) == close(measured(*net.by_hand(items())))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "encoder",
            r"'encoder' returns a mapping with the keys 'pooler_output', not a tensor. Name .*'encoder:pooler_output'",
        ),
        (
            "encoder:pooled",
            r"source='encoder:pooled'\): there is a mapping with the keys 'pooler_output', which has no entry",
        ),
        ("encodr:pooler_output", r"source='encodr:pooler_output'\): Wrapped has no submodule of that name.*encoder"),
    ],
)
def test_a_path_that_leads_nowhere(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        validated(Wrapped(lambda z: ModelOutput(pooler_output=z)), retrieval(source=source))


# -------------------------------------------------------------------------------------------------------- several views


class SimCLR(Net):
    """Two views of each item, embedded in two calls or in one; labels come from the batch."""

    def __init__(self, calls: int, views: int = 2) -> None:
        super().__init__()
        self.calls, self.views = calls, views

    def seen(self, points: Tensor) -> list[Tensor]:
        return [points, points.roll(1, dims=1)][: self.views]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        views = self.seen(batch[0])
        for part in views if self.calls == 2 else [torch.cat(views)]:
            self.embed(part)

    def both(self, data: TensorDataset) -> tuple[Tensor, Tensor]:
        points, labels = data.tensors
        return self.by_hand(TensorDataset(torch.cat(self.seen(points)), labels.repeat(self.views)))


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("views", [1, 2])
def test_two_views_of_each_item(calls: int, views: int) -> None:
    net = SimCLR(calls, views)
    logged = validated(net, retrieval(source=EmbeddingSource("encoder", views=2)))
    assert logged == close(measured(*net.both(items())))


def test_ids_and_a_gallery_flag_of_each_item_hold_for_its_views() -> None:
    net, data = SimCLR(calls=2), items()
    numbers, shop = torch.arange(len(data)) % 34, torch.arange(len(data)) % 2 == 0
    for tensor in data.tensors:
        tensor[34:] = tensor[:2]

    def of_batch(values: Tensor) -> Any:
        return lambda outputs, batch: values[batch[2]]

    tagged = TensorDataset(*data.tensors, torch.arange(len(data)))
    found = retrieval(
        source=EmbeddingSource("encoder", labels=1, views=2),
        ids=of_batch(numbers),
        gallery=of_batch(shop),
    )
    trainer(found).validate(net, DataLoader(tagged, 8), verbose=False)
    embeddings, labels = net.both(TensorDataset(*(tensor[:34] for tensor in data.tensors)))  # the others are repeats
    shops = shop[:34].repeat(2)
    expected = evaluate_retrieval(embeddings[~shops], labels[~shops], embeddings[shops], labels[shops])
    assert found.report is not None
    assert found.report.values == pytest.approx(expected.values, rel=1e-6)


def test_views_without_the_argument_are_refused_with_the_fix() -> None:
    fix = r"called the submodule 'encoder' 2 times.*pass source=EmbeddingSource\('encoder', views=2\)"
    with pytest.raises(UsageError, match=fix):
        validated(SimCLR(calls=2), retrieval(source="encoder"))
    with pytest.raises(ValueError, match=r"EmbeddingSource\(views=0\) must be at least 1"):
        EmbeddingSource("encoder", views=0)


# ------------------------------------------------------------------------------------------------------------ one for all


class Silent(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)


def test_several_monitors_share_a_source() -> None:
    source, net = EmbeddingSource("encoder", labels=1), Silent()
    monitors = (
        retrieval(source=source),
        retrieval(source=source, name="more"),
        DiscriminantRatioMonitor(source=source),
    )
    run = trainer(*monitors, max_epochs=2, num_sanity_val_steps=1)
    run.fit(net, loader(), loader())
    assert hooks(net) == 0
    embeddings, labels = net.by_hand(items())
    expected = measured(embeddings, labels)
    logged = {key: float(value) for key, value in run.callback_metrics.items()}
    assert {key: logged[f"val/{key}"] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert {key: logged[f"val/more/{key}"] for key in expected} == pytest.approx(expected, rel=1e-5)
    assert logged["val/J"] == pytest.approx(float(discriminant_ratio(embeddings, labels)), rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- embed


class NoStep(Net):
    """Validates something else; nothing of it is an embedding."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return torch.rand(1)


@pytest.mark.parametrize(
    "embed",
    [
        lambda module, batch: module.embed(batch[0]),
        lambda module, batch: (module.embed(batch[0]), batch[1]),
        "whole",
    ],
)
def test_the_monitor_embeds_batches_itself_and_leaves_no_trace(embed: Any) -> None:
    net = NoStep()
    net.whole = nn.Sequential(net.frozen, net.encoder)
    torch.manual_seed(3)
    logged = validated(net, retrieval(embed=embed))
    after = torch.rand(1)
    torch.manual_seed(3)
    assert validated(net) == {}
    assert torch.rand(1).equal(after)
    assert logged == close(measured(*net.by_hand(items())))


def test_an_embedding_submodule_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"RetrievalMonitor\(embed='encodr'\): NoStep has no submodule.*encoder"):
        validated(NoStep(), retrieval(embed="encodr"))
