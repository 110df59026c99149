"""EmbeddingModule: pieces and processes change nothing but memory; any loss; what it logs; what it refuses."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import config
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, RetrievalMonitor
from fewshot_callbacks.cli.demo import read_metric
from fewshot_callbacks.losses import BinaryCodes, SoftAveragePrecisionLoss
from fewshot_callbacks.protonet import EmbeddingModule
from tests.callbacks.models import trainer
from tests.gloo_processes import answers
from tests.protonet import gloo_jobs
from tests.protonet.gloo_jobs import LABELS, Proxies, backbone, both, data, fit, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*no `val_dataloader`")

IMAGES, TARGETS = data().tensors


def gradients(module: EmbeddingModule, images: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
    module.loss(module(images), labels).backward()
    return [parameter.grad for parameter in module.parameters()]


@settings(max_examples=25, deadline=None)
@given(items=st.integers(7, 30), micro_batch=st.integers(1, 30), seed=st.integers(0, 2**16), own=st.booleans())
def test_pieces_have_the_gradient_of_the_whole_batch(items, micro_batch, seed, own):
    loss = Proxies() if own else SoftAveragePrecisionLoss(7, low=-1.0, on_empty="zero")
    images = torch.randn(items, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole = EmbeddingModule(backbone(), loss).double()
    pieces = EmbeddingModule(copy.deepcopy(whole.backbone), copy.deepcopy(loss), micro_batch=micro_batch).double()
    expected = gradients(whole, images, LABELS[:items])
    found = gradients(pieces, images, LABELS[:items])
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-9
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_dropout_is_the_same_both_times() -> None:
    module = EmbeddingModule(backbone(dropout=0.5), SoftAveragePrecisionLoss(7), micro_batch=10).double()
    reference = copy.deepcopy(module)
    torch.manual_seed(3)
    found = gradients(module, IMAGES.double(), TARGETS)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    embeddings = torch.cat([reference.backbone(piece) for piece in IMAGES.double().split(10)])
    reference.loss(embeddings, TARGETS).backward()
    assert torch.equal(torch.get_rng_state(), state)  # as after one pass
    for one, other in zip(found, (parameter.grad for parameter in reference.parameters()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    torch.manual_seed(4)
    assert not torch.allclose(gradients(copy.deepcopy(reference), IMAGES.double(), TARGETS)[0], found[0], atol=1e-6)


def test_batch_norm_is_updated_once_for_each_piece() -> None:
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    module, reference = EmbeddingModule(norm, SoftAveragePrecisionLoss(), micro_batch=10), copy.deepcopy(norm)
    found = gradients(module, IMAGES, TARGETS)
    SoftAveragePrecisionLoss()(torch.cat([reference(piece) for piece in IMAGES.split(10)]), TARGETS).backward()
    for one, other in zip(norm.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert int(norm[1].num_batches_tracked) == 3
    for one, other in zip(found, (parameter.grad for parameter in reference.parameters()), strict=True):
        torch.testing.assert_close(one, other)


class Watched(nn.Module):
    """Notes how many rows it is given, and how many of its hidden tensors are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)
        self.alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.rows: list[int] = []
        self.most = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.one(images)
        product = hidden * hidden  # keeps `hidden` for its backward pass
        self.alive.add(hidden)
        self.rows.append(len(images))
        self.most = max(self.most, len(self.alive))
        return self.two(product)


def test_no_more_than_one_graph_is_alive() -> None:
    module = EmbeddingModule(Watched(), SoftAveragePrecisionLoss(), micro_batch=8)
    embeddings = module(IMAGES)
    assert module.backbone.rows == [8, 8, 7, 7]
    assert len(module.backbone.alive) == 0
    module.loss(embeddings, TARGETS).backward()
    assert sorted(module.backbone.rows[4:]) == [7, 7, 8, 8]
    assert module.backbone.most == 1
    module.eval()
    module.backbone.rows.clear()
    module(IMAGES)
    assert module.backbone.rows == [30]  # without a graph, and each image by itself


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01},
    ],
    ids=str,
)
def test_a_fit_in_pieces_is_one_of_whole_batches(options) -> None:
    for loss in (SoftAveragePrecisionLoss(5), Proxies()):
        start = weights(EmbeddingModule(backbone(), copy.deepcopy(loss)))
        whole, pieces = fit(copy.deepcopy(loss), **options), fit(copy.deepcopy(loss), 4, **options)
        assert weights(pieces) == pytest.approx(weights(whole), abs=1e-10)
        assert weights(whole) != pytest.approx(start, abs=1e-4)
        assert pieces.trainer.optimizers[0].param_groups[0]["lr"] == 0.125  # two epochs of StepLR


def test_half_precision() -> None:
    whole, pieces, exact = (
        weights(fit(Proxies(), size, precision=precision))
        for size, precision in ((None, "bf16-mixed"), (4, "bf16-mixed"), (None, "64-true"))
    )
    assert pieces == pytest.approx(whole, abs=2e-2)
    assert pieces == pytest.approx(exact, abs=5e-2)
    assert pieces != pytest.approx(exact, abs=1e-6)  # it was half precision


@pytest.mark.parametrize(("similarity", "micro_batch"), [("cosine", None), ("euclidean", 10)])
def test_float16_with_a_scaled_loss(similarity, micro_batch) -> None:
    """As Lightning does with precision="16-mixed", which it has for accelerators alone."""
    loss = SoftAveragePrecisionLoss(7, similarity=similarity)
    module = EmbeddingModule(backbone(), loss, micro_batch=micro_batch)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = weights(module)
    with torch.autocast("cpu", dtype=torch.float16):
        embeddings = module(IMAGES)
        embeddings.retain_grad()
        value = module.loss(embeddings, TARGETS)
    assert (embeddings.dtype, value.dtype) == (torch.float16, torch.float32)
    scaler.scale(value).backward()
    # the same values: the loss has kinks, which others may lie beyond
    exact = embeddings.detach().float().requires_grad_()
    loss(exact, TARGETS).backward()
    torch.testing.assert_close(embeddings.grad.float() / 2**10, exact.grad, rtol=1e-3, atol=1e-7)
    scaler.unscale_(optimizer)
    assert all(torch.isfinite(parameter.grad).all() for parameter in module.parameters())
    reference = EmbeddingModule(backbone(), loss)
    reference(IMAGES).backward(exact.grad)
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0.01 * float(other.grad.abs().max()))
    scaler.step(optimizer)
    assert weights(module) != pytest.approx(before, abs=1e-5)


def test_two_processes_train_as_one(gloo_folder: Path) -> None:
    """Ten items of one process and five of the other, in pieces of four, are the fifteen of one."""
    one = both()
    for seen in answers(gloo_folder, gloo_jobs.__name__, 2):
        for name in ("soft AP", "proxies"):
            assert seen[name] == pytest.approx(one[name], abs=1e-6)
        assert seen["logged"] == pytest.approx(one["logged"], abs=1e-6)
    assert set(one["logged"]) == {"train/loss", "train/soft_AP", "train/batch_AP"}


class Noted(Callback):
    """What each batch logged, and what its step returned."""

    def __init__(self) -> None:
        self.steps: list[tuple[dict[str, float], dict[str, torch.Tensor]]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        fresh = {k: float(v) for k, v in trainer.callback_metrics.items()}
        self.steps.append((fresh, outputs))


@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "hamming"])
def test_the_exact_value_is_logged_beside_the_soft_one(similarity) -> None:
    seed_everything(0, verbose=False)
    network = nn.Sequential(backbone(), BinaryCodes()) if similarity == "hamming" else backbone()
    noted = Noted()
    module = EmbeddingModule(network, SoftAveragePrecisionLoss(similarity=similarity), ap_every_n_steps=3)
    trainer(noted, max_epochs=1).fit(module, DataLoader(data(), batch_size=10))
    keys = [set(logged) for logged, _ in noted.steps]
    assert keys[0] == keys[1] == {"train/loss", "train/soft_AP"}
    assert keys[2] == {"train/loss", "train/soft_AP", "train/batch_AP"}
    logged, outputs = noted.steps[2]
    embeddings = outputs["embeddings"].sign() if similarity == "hamming" else outputs["embeddings"]
    metric = "hamming" if similarity == "hamming" else "cosine"
    report = evaluate_retrieval(embeddings, outputs["labels"], similarity=metric)
    assert logged["train/batch_AP"] == pytest.approx(report.mAP, abs=1e-6)
    assert logged["train/soft_AP"] == pytest.approx(1 - logged["train/loss"], abs=1e-6)
    assert not outputs["embeddings"].requires_grad


def test_loggers_get_the_exact_value_on_its_steps_alone(tmp_path) -> None:
    module = EmbeddingModule(backbone(), SoftAveragePrecisionLoss(), ap_every_n_steps=4)
    run = trainer(max_epochs=3, logger=CSVLogger(tmp_path, name="", version=""), log_every_n_steps=1)
    run.fit(module, DataLoader(data(), batch_size=10))
    soft, exact = (read_metric(tmp_path / "metrics.csv", f"train/{name}") for name in ("soft_AP", "batch_AP"))
    assert soft[0] == list(range(9))
    assert exact[0] == [3, 7]
    assert exact[1][0] != exact[1][1]  # of other batches
    assert exact[1][-1] == pytest.approx(float(run.callback_metrics["train/batch_AP"]))


def test_other_losses_log_their_loss_alone_and_words_are_labels() -> None:
    def loss(embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert labels.dtype == torch.int64
        return embeddings.square().mean()

    noted = Noted()
    words = [("owl", "wren")[label % 2] for label in LABELS.tolist()]
    pairs = list(zip(IMAGES, words, strict=True))
    trainer(noted).fit(EmbeddingModule(backbone(), loss), DataLoader(pairs, batch_size=10))
    assert set(noted.steps[0][0]) == {"train/loss"}


def test_a_batch_without_a_pair_has_no_average_precision() -> None:
    noted = Noted()
    module = EmbeddingModule(backbone(), SoftAveragePrecisionLoss(on_empty="zero"), ap_every_n_steps=1)
    trainer(noted).fit(module, DataLoader(TensorDataset(IMAGES[:6], LABELS[:6]), batch_size=6))
    assert set(noted.steps[0][0]) == {"train/loss"}


def test_monitors_attach_without_an_argument() -> None:
    module = EmbeddingModule(backbone(), SoftAveragePrecisionLoss(), micro_batch=4)
    run = trainer(DiscriminantRatioMonitor(), RetrievalMonitor(label_groups=3))
    loader = DataLoader(data(), batch_size=15)
    run.fit(module, loader, loader)
    assert {"train/J", "val/J", "val/mAP"} <= set(run.callback_metrics)
    module.eval()
    expected = evaluate_retrieval(module(IMAGES).detach(), TARGETS).mAP
    assert float(run.callback_metrics["val/mAP"]) == pytest.approx(expected, abs=1e-5)
    assert "test/mAP" in run.test(module, loader, verbose=False)[0]
    assert run.predict(module, loader)[0]["embeddings"].shape == (15, 3)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"micro_batch": 0}, r"micro_batch=0.*Use 1 or more, or None"),
        ({"ap_every_n_steps": -1}, r"ap_every_n_steps=-1.*0 for never"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0.*positive"),
        ({"loss": 3}, r"loss 3 cannot be called"),  # checked types would refuse it first
        ({"backbone": "conv5"}, r"no backbone 'conv5'"),
    ],
)
def test_wrong_settings_fail_in_the_constructor(wrong, words, monkeypatch) -> None:
    monkeypatch.setattr(config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=words):
        EmbeddingModule(**({"backbone": nn.Identity(), "loss": SoftAveragePrecisionLoss()} | wrong))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            EmbeddingModule(nn.Linear(4, 2), SoftAveragePrecisionLoss(), micro_batch=11),
            r"micro_batch=11\): the batch has 10",
        ),
        (
            EmbeddingModule(nn.Linear(4, 2), nn.CrossEntropyLoss(reduction="none")),
            r"CrossEntropyLoss returned a tensor of shape \(10,\).*scalar",
        ),
        (EmbeddingModule(nn.Linear(4, 2), lambda embeddings, labels: 0.5), r"returned a float.*scalar"),
        (
            EmbeddingModule(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))), SoftAveragePrecisionLoss()),
            r"Sequential gave shape \(10, 2, 2\) for 10",
        ),
        (EmbeddingModule(nn.LSTM(4, 3), SoftAveragePrecisionLoss()), r"LSTM gave a tuple for 10 images"),
    ],
    ids=["micro_batch", "no scalar", "no tensor", "no matrix", "no embedding"],
)
def test_what_cannot_be_trained_is_said(module, words) -> None:
    binary = TensorDataset(IMAGES, LABELS % 2)
    with pytest.raises(ValueError, match=words):
        trainer().fit(module, DataLoader(binary, batch_size=10))


def test_a_smaller_last_batch_is_embedded_whole() -> None:
    module = EmbeddingModule(Watched(), SoftAveragePrecisionLoss(), micro_batch=10)
    trainer().fit(module, DataLoader(TensorDataset(IMAGES, LABELS % 2), batch_size=24))
    assert sorted(module.backbone.rows) == [6, *[8] * 6]


def test_losses_of_pytorch_metric_learning() -> None:
    loss = pytest.importorskip("pytorch_metric_learning.losses").ArcFaceLoss(6, 3)
    before = [parameter.clone() for parameter in loss.parameters()]
    module = EmbeddingModule(backbone(), loss, micro_batch=4)
    trainer().fit(module, DataLoader(data(), batch_size=15))
    assert all(not torch.equal(one, other) for one, other in zip(before, loss.parameters(), strict=True))
