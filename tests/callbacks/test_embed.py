"""`embed`: the monitors of batches and sets make embeddings of modules that return none, as self-supervised ones are."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fewshot_callbacks import discriminant_ratio, embedding_health
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, EmbeddingHealthMonitor, EmbeddingSource
from fewshot_callbacks.functional.moments import Moments
from tests.callbacks.models import FEATURES, VALIDATION, Net, close, expected_ratios, loader, trainer, with_prefix
from tests.messages import refused


class Contrastive(Net):
    """Batches are ((one view, other view), targets, names); no step returns anything but a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(self.frozen, self.encoder, nn.Unflatten(1, (5, 1, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (one, other), _, _ = batch
        return (self.backbone(one) - self.backbone(other)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.training_step(batch, batch_idx)


class Views(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return len(VALIDATION)

    def __getitem__(self, index: int) -> Any:
        point, label = VALIDATION[index]
        return (point, point + 0.1), label, f"{index}.jpg"


def views() -> DataLoader[Any]:
    return DataLoader(Views(), batch_size=12)


def first_view(module: Any, batch: Any) -> Tensor:
    return module.backbone(batch[0][0]).flatten(1)


class EachBatch(Callback):
    """What is logged of each training batch, and what the module makes of it in evaluation mode."""

    def __init__(self) -> None:
        self.logged: list[list[float]] = []
        self.expected: list[list[float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        assert pl_module.encoder.training
        embeddings = pl_module.eval().embed(batch[0][0]).detach()
        pl_module.train()
        j = float(discriminant_ratio(embeddings, batch[1]))
        self.expected.append([j, Moments.of(embeddings.double()).rankme()])
        self.logged.append([float(trainer.callback_metrics[key]) for key in ("train/J", "train/rankme")])


def test_a_module_that_returns_losses_alone_is_measured() -> None:
    net, each = Contrastive(), EachBatch()
    monitors = (
        DiscriminantRatioMonitor(source=EmbeddingSource(labels=1, embed=first_view)),
        EmbeddingHealthMonitor(source=EmbeddingSource(embed=first_view), every_n_steps=1),
    )
    run = trainer(*monitors, each, num_sanity_val_steps=1)
    run.fit(net, views(), views())
    embeddings, labels = net.by_hand(VALIDATION)
    logged = {key: float(value) for key, value in run.callback_metrics.items()}
    expected = with_prefix(expected_ratios(embeddings, labels)) | with_prefix(
        embedding_health(embeddings, k=None).metrics()
    )
    assert {key: logged[key] for key in expected} == close(expected, rel=1e-4)
    assert "val/cdnv" not in logged  # which needs labels: health was given none
    assert len(each.logged) == 3
    torch.testing.assert_close(torch.tensor(each.logged), torch.tensor(each.expected), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_the_name_of_a_submodule_and_labels_in_the_batch_are_enough(stage: str) -> None:
    net = Net()
    net.frozen = nn.Identity()
    net.validation_step = net.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    run = trainer(
        DiscriminantRatioMonitor(source=EmbeddingSource(embed="encoder")),
        EmbeddingHealthMonitor(source=EmbeddingSource(embed="encoder")),
    )
    [logged] = getattr(run, stage)(net, loader(VALIDATION), verbose=False)
    prefix = "val" if stage == "validate" else "test"
    embeddings, labels = net.by_hand(VALIDATION)
    expected = with_prefix(expected_ratios(embeddings, labels), prefix)
    expected |= with_prefix(embedding_health(embeddings, labels, k=None).metrics(), prefix)
    assert logged == close(expected, rel=1e-4)


def test_both_views_are_measured_with_their_labels() -> None:
    def both(module: Any, batch: Any) -> Tensor:
        return module.backbone(torch.cat(batch[0])).flatten(1)

    net, source = Contrastive(), EmbeddingSource(labels=1, embed=both, views=2)
    run = trainer(DiscriminantRatioMonitor(source=source))
    run.validate(net, views(), verbose=False)
    points, labels = VALIDATION.tensors
    with torch.no_grad():
        embeddings = net.eval().embed(torch.cat([points, points + 0.1]))
    assert float(run.callback_metrics["val/J"]) == pytest.approx(
        float(discriminant_ratio(embeddings, labels.repeat(2))), rel=1e-4
    )


def test_dropout_and_running_statistics_are_as_without_the_monitors() -> None:
    nets = []
    for monitors in (
        (),
        (
            DiscriminantRatioMonitor(source=EmbeddingSource(labels=1, embed=first_view)),
            EmbeddingHealthMonitor(source=EmbeddingSource(embed=first_view)),
        ),
    ):
        torch.manual_seed(1)
        nets.append(Contrastive())
        trainer(*monitors, max_epochs=2).fit(nets[-1], views(), views())
    for one, other in zip(nets[0].state_dict().values(), nets[1].state_dict().values(), strict=True):
        assert one.equal(other)


def test_a_name_that_is_called_with_several_views_is_told_what_to_pass() -> None:
    assert FEATURES == 12
    monitor = EmbeddingHealthMonitor(source=EmbeddingSource(embed="backbone"), strict=True)
    with refused(ValueError, "EmbeddingHealthMonitor", "embed='backbone'", "list", 2, "embed=lambda module, batch:"):
        trainer(monitor).validate(Contrastive(), views(), verbose=False)
