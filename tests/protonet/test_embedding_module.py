"""EmbeddingModule: pieces and processes change nothing but memory; any loss; what it logs; what it refuses."""

from __future__ import annotations

import copy
import functools
import sys
import tempfile
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import evaluate_retrieval
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, RetrievalMonitor
from fewshot_callbacks.cli.demo import read_metric
from fewshot_callbacks.data import ClassBalancedBatchSampler
from fewshot_callbacks.functional._labels import LabelFormsError
from fewshot_callbacks.losses import BinaryCodes, SoftAveragePrecisionLoss
from fewshot_callbacks.protonet import EmbeddingModule
from tests.callbacks.models import trainer
from tests.cases import examples
from tests.messages import missing_facts, refused

pytestmark = pytest.mark.filterwarnings("ignore:.*no `val_dataloader`")

LABELS = torch.arange(6).repeat(5)
IMAGES = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)) + torch.eye(6, 4)[LABELS]
DATA = TensorDataset(IMAGES, LABELS)


class Proxies(nn.Module):
    """A loss with parameters: cross-entropy of scores with one vector for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(6, 3, generator=torch.Generator().manual_seed(1)))

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(embeddings @ self.vectors.to(embeddings.dtype).T, labels)


def backbone(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def weights(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def fit(loss: nn.Module, micro_batch: int | None = None, *callbacks: Callback, **options) -> EmbeddingModule:
    """Three classes of five items in each of the batches."""
    sampler = ClassBalancedBatchSampler(LABELS, classes_per_batch=3, items_per_class=5, batches=4)
    module = EmbeddingModule(
        backbone(),
        copy.deepcopy(loss),
        micro_batch=micro_batch,
        ap_every_n_steps=1,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
    )
    run = trainer(*callbacks, **({"max_epochs": 2, "precision": "64-true"} | options))
    run.fit(module, DataLoader(DATA, batch_sampler=sampler))
    return module


def gradients(module: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, pieces: int = 0) -> list[torch.Tensor]:
    """Those of all parameters; with `pieces` of so many images that are embedded by hand, one after the other."""
    by_hand = torch.cat([module.backbone(piece) for piece in images.split(pieces)]) if pieces else module(images)
    module.loss(by_hand, labels).backward()
    return [parameter.grad for parameter in module.parameters()]


close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


@settings(max_examples=examples(20), deadline=None)
@given(items=st.integers(7, 30), micro_batch=st.integers(1, 30), seed=st.integers(0, 2**16), own=st.booleans())
def test_pieces_have_the_gradient_of_the_whole_batch(items, micro_batch, seed, own):
    loss = Proxies() if own else SoftAveragePrecisionLoss(7, low=-1.0, on_empty="zero")
    images = torch.randn(items, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    whole = EmbeddingModule(backbone(), loss).double()
    pieces = EmbeddingModule(copy.deepcopy(whole.backbone), copy.deepcopy(loss), micro_batch=micro_batch).double()
    expected = gradients(whole, images, LABELS[:items])
    assert max(float(gradient.abs().max()) for gradient in expected) > 1e-9
    close(gradients(pieces, images, LABELS[:items]), expected)


def test_a_piece_has_the_same_dropout_in_both_of_its_passes() -> None:
    module = EmbeddingModule(backbone(dropout=0.5), SoftAveragePrecisionLoss(7), micro_batch=10).double()
    reference, other = copy.deepcopy(module), copy.deepcopy(module)
    torch.manual_seed(3)
    found = gradients(module, IMAGES.double(), LABELS)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    close(found, gradients(reference, IMAGES.double(), LABELS, pieces=10))
    assert torch.equal(torch.get_rng_state(), state)  # as after one pass
    assert not torch.allclose(gradients(other, IMAGES.double(), LABELS)[0], found[0], atol=1e-6)


def test_batch_norm_is_updated_once_for_each_piece() -> None:
    norm = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    module = EmbeddingModule(norm, SoftAveragePrecisionLoss(), micro_batch=10).double()
    reference = copy.deepcopy(module)
    close(gradients(module, IMAGES.double(), LABELS), gradients(reference, IMAGES.double(), LABELS, pieces=10))
    torch.testing.assert_close(list(module.buffers()), list(reference.buffers()), rtol=0, atol=0)
    assert int(norm[1].num_batches_tracked) == 3


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
    module.loss(embeddings, LABELS).backward()
    assert sorted(module.backbone.rows[4:]) == [7, 7, 8, 8]
    assert module.backbone.most == 1
    module.eval()(IMAGES)
    assert module.backbone.rows[8:] == [30]  # without a graph, and each image by itself


def test_a_fit_in_pieces_is_one_of_whole_batches() -> None:
    by_value = {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}
    by_norm = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.01}
    for loss, options in ((SoftAveragePrecisionLoss(5), by_value), (Proxies(), by_norm)):
        start, whole, pieces = weights(EmbeddingModule(backbone(), loss)), fit(loss, **options), fit(loss, 4, **options)
        assert weights(pieces) == pytest.approx(weights(whole), abs=1e-10)
        assert weights(whole) != pytest.approx(start, abs=1e-4)
        assert pieces.trainer.optimizers[0].param_groups[0]["lr"] == 0.125  # two epochs of StepLR


def test_pieces_train_as_whole_batches_do_in_half_precision() -> None:
    whole, pieces = (weights(fit(Proxies(), size, precision="bf16-mixed")) for size in (None, 4))
    exact = weights(fit(Proxies()))
    assert pieces == pytest.approx(whole, abs=2e-2)
    assert pieces == pytest.approx(exact, abs=5e-2)
    assert pieces != pytest.approx(exact, abs=1e-6)  # it was half precision


@pytest.mark.parametrize(("similarity", "micro_batch"), [("cosine", None), ("euclidean", 10)])
def test_a_scaled_loss_in_float16_has_the_gradient_of_float32(similarity, micro_batch) -> None:
    """As Lightning does with precision="16-mixed", which it has for accelerators alone."""
    loss = SoftAveragePrecisionLoss(7, similarity=similarity)
    module = EmbeddingModule(backbone(), loss, micro_batch=micro_batch)
    optimizer, scaler = torch.optim.SGD(module.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with torch.autocast("cpu", dtype=torch.float16):
        embeddings = module(IMAGES)
        embeddings.retain_grad()
        value = module.loss(embeddings, LABELS)
    assert (embeddings.dtype, value.dtype) == (torch.float16, torch.float32)
    scaler.scale(value).backward()
    # the same values: the loss has kinks, which others may lie beyond
    exact = embeddings.detach().float().requires_grad_()
    loss(exact, LABELS).backward()
    torch.testing.assert_close(embeddings.grad.float() / 2**10, exact.grad, rtol=1e-3, atol=1e-7)
    scaler.unscale_(optimizer)
    reference = EmbeddingModule(backbone(), loss)
    reference(IMAGES).backward(exact.grad)
    for one, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0.01 * float(other.grad.abs().max()))


class Kept(Callback):
    """What each process has trained and logged, in a file of its own."""

    def on_train_end(self, trainer, module) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save((weights(module), logged), f"{trainer.world_size} {trainer.global_rank}.pt")


@pytest.mark.skipif(sys.platform != "linux", reason="torch survives a fork on Linux alone")
@pytest.mark.parametrize("loss", [SoftAveragePrecisionLoss(5), Proxies()], ids=["soft AP", "proxies"])
def test_two_processes_train_as_one(loss, tmp_path, monkeypatch) -> None:
    """Ten items of one process and five of the other, in pieces of four, are the fifteen of one."""
    monkeypatch.chdir(tmp_path)
    fit(loss, 4, Kept())
    fit(loss, 4, Kept(), strategy="ddp_fork", devices=2)
    (one, logged), *two = (torch.load(f"{name}.pt") for name in ("1 0", "2 0", "2 1"))
    for found, also_logged in two:
        assert found == pytest.approx(one, abs=1e-6)
        assert also_logged == pytest.approx(logged, abs=1e-6)
    ranked = {"train/soft_AP", "train/batch_AP"} if isinstance(loss, SoftAveragePrecisionLoss) else set()
    assert set(logged) == {"train/loss", *ranked}


def noted(module: EmbeddingModule, items, batch_size: int = 10) -> list[tuple[dict[str, float], dict]]:
    """Train for an epoch; what each batch logged, and what its step returned."""
    steps = []

    class Noted(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            steps.append(({key: float(value) for key, value in trainer.callback_metrics.items()}, outputs))

    trainer(Noted()).fit(module, DataLoader(items, batch_size=batch_size))
    return steps


@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "hamming"])
def test_the_exact_value_is_logged_beside_the_soft_one(similarity) -> None:
    seed_everything(0, verbose=False)
    network = nn.Sequential(backbone(), BinaryCodes()) if similarity == "hamming" else backbone()
    module = EmbeddingModule(network, SoftAveragePrecisionLoss(similarity=similarity), ap_every_n_steps=3)
    steps = noted(module, DATA)
    usual = {"train/loss", "train/soft_AP"}
    assert [set(logged) for logged, _ in steps] == [usual, usual, {*usual, "train/batch_AP"}]
    logged, outputs = steps[2]
    embeddings = outputs["embeddings"].sign() if similarity == "hamming" else outputs["embeddings"]
    metric = "hamming" if similarity == "hamming" else "cosine"
    report = evaluate_retrieval(embeddings, outputs["labels"], similarity=metric)
    assert logged["train/batch_AP"] == pytest.approx(report.mAP, abs=1e-6)
    assert logged["train/soft_AP"] == pytest.approx(1 - logged["train/loss"], abs=1e-6)
    assert not outputs["embeddings"].requires_grad


def test_loggers_get_the_exact_value_on_its_steps_alone(tmp_path) -> None:
    module = EmbeddingModule(backbone(), SoftAveragePrecisionLoss(), ap_every_n_steps=4)
    run = trainer(max_epochs=3, logger=CSVLogger(tmp_path, name="", version=""), log_every_n_steps=1)
    run.fit(module, DataLoader(DATA, batch_size=10))
    soft, exact = (read_metric(tmp_path / "metrics.csv", f"train/{name}") for name in ("soft_AP", "batch_AP"))
    assert soft[0] == list(range(9))
    assert exact[0] == [3, 7]
    assert exact[1][0] != exact[1][1]  # of other batches
    assert exact[1][-1] == pytest.approx(float(run.callback_metrics["train/batch_AP"]))


def test_other_losses_log_their_loss_alone_and_words_are_labels() -> None:
    def loss(embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert labels.dtype == torch.int64
        return embeddings.square().mean()

    pairs = [(image, ("owl", "wren")[label % 2]) for image, label in DATA]
    steps = noted(EmbeddingModule(backbone(), loss, micro_batch=15), pairs, batch_size=20)
    assert [set(logged) for logged, _ in steps] == [{"train/loss"}] * 2  # the last batch is one piece


def test_a_word_has_one_number_in_all_batches() -> None:
    seen = []

    def loss(embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels.tolist())
        return embeddings.square().mean()

    words = ["wren", "owl", "wren", "owl", "heron", "wren"]
    noted(EmbeddingModule(backbone(), loss), list(zip(IMAGES, words, strict=False)), batch_size=2)
    assert seen == [[1, 0], [1, 0], [2, 1]]  # a loss may compare a batch with earlier ones


def test_words_keep_their_numbers_over_a_resumed_run(tmp_path) -> None:
    seen = []

    def loss(embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels.tolist())
        return embeddings.square().mean()

    first = DataLoader(list(zip(IMAGES, ["wren", "owl"], strict=False)), batch_size=2)
    run = trainer()
    run.fit(EmbeddingModule(backbone(), loss), first)
    run.save_checkpoint(tmp_path / "run.ckpt")
    resumed = DataLoader(list(zip(IMAGES, ["heron", "wren", "owl"], strict=False)), batch_size=3)
    trainer(max_epochs=2).fit(EmbeddingModule(backbone(), loss), resumed, ckpt_path=tmp_path / "run.ckpt")
    assert seen == [[1, 0], [2, 1, 0]]  # without the words of the checkpoint, the second batch is [0, 2, 1]
    loaded = EmbeddingModule.load_from_checkpoint(tmp_path / "run.ckpt", backbone=backbone(), loss=loss)
    assert loaded._targets(["heron", "wren", "owl"]).tolist() == [2, 1, 0]


def labels_of_processes(forms: list[Any]) -> list[str]:
    """What each of two processes makes of its labels, or the error that it raises."""

    def work(rank: int, results: Any, meeting: str) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=2, timeout=timedelta(seconds=20)
        )
        module = EmbeddingModule(backbone(), Proxies())
        try:
            for labels in forms[rank]:
                results[rank] = str(module._targets(labels).tolist())
        except ValueError as error:
            results[rank] = str(error)

    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("fork")
        results = context.Manager().dict()
        meeting = f"file://{folder}/meeting"
        processes = [context.Process(target=work, args=(rank, results, meeting)) for rank in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(40)
    return [results[rank] for rank in range(2)]


@pytest.mark.skipif(sys.platform != "linux", reason="torch survives a fork on Linux alone")
@pytest.mark.parametrize("numbers", [torch.tensor([3, 4]), [3, 4]], ids=["tensor", "list"])
def test_words_in_one_process_and_numbers_in_another_are_refused_in_both(numbers) -> None:
    facts = ("EmbeddingModule", "labels", "process 0", "numbers", "process 1", "strings")
    for found in labels_of_processes([[numbers], [["owl", "wren"]]]):
        assert missing_facts(found, facts) == []


@pytest.mark.skipif(sys.platform != "linux", reason="torch survives a fork on Linux alone")
def test_numbers_as_a_tensor_in_one_process_and_a_list_in_another_are_one_form() -> None:
    assert labels_of_processes([[torch.tensor([3, 4]), torch.tensor([5])], [[3, 7], [8]]]) == ["[5]", "[8]"]


@pytest.mark.skipif(sys.platform != "linux", reason="torch survives a fork on Linux alone")
def test_a_process_without_an_item_goes_with_words() -> None:
    assert labels_of_processes([[torch.empty(0, dtype=torch.int64), []], [["owl"], ["wren"]]]) == ["[]", "[1]"]


def test_words_in_one_batch_and_numbers_in_another_are_refused() -> None:
    module = EmbeddingModule(backbone(), Proxies())
    assert module._targets(["owl", "wren"]).tolist() == [0, 1]
    for numbers in (torch.tensor([0, 1]), [0, 1]):
        with refused(LabelFormsError, "EmbeddingModule", "labels", "strings", "numbers"):
            module._targets(numbers)
    assert module._targets([]).tolist() == []
    assert module._targets(["heron"]).tolist() == [2]


def test_a_resumed_run_refuses_words_where_labels_were_numbers(tmp_path) -> None:
    run = trainer()
    run.fit(EmbeddingModule(backbone(), Proxies()), DataLoader(DATA, batch_size=10))
    run.save_checkpoint(tmp_path / "run.ckpt")
    module = EmbeddingModule.load_from_checkpoint(tmp_path / "run.ckpt", backbone=backbone(), loss=Proxies())
    with refused(LabelFormsError, "EmbeddingModule", "labels", "numbers", "strings"):
        module._targets(["owl"])


def test_a_batch_without_a_pair_has_no_average_precision() -> None:
    module = EmbeddingModule(backbone(), SoftAveragePrecisionLoss(on_empty="zero"), ap_every_n_steps=1)
    ((logged, _),) = noted(module, TensorDataset(IMAGES[:6], LABELS[:6]))
    assert set(logged) == {"train/loss"}


def test_monitors_attach_without_an_argument() -> None:
    module = EmbeddingModule(backbone(), SoftAveragePrecisionLoss(), micro_batch=4)
    run = trainer(DiscriminantRatioMonitor(), RetrievalMonitor(label_groups=3))
    loader = DataLoader(DATA, batch_size=15)
    run.fit(module, loader, loader)
    assert {"train/J", "val/J", "val/mAP"} <= set(run.callback_metrics)
    module.eval()
    expected = evaluate_retrieval(module(IMAGES).detach(), LABELS).mAP
    assert float(run.callback_metrics["val/mAP"]) == pytest.approx(expected, abs=1e-5)
    assert "test/mAP" in run.test(module, loader, verbose=False)[0]
    assert run.predict(module, loader)[0]["embeddings"].shape == (15, 3)


@pytest.mark.parametrize(
    ("changed", "facts"),
    [
        ({"micro_batch": 11}, ("EmbeddingModule(micro_batch=11)", 10, "micro_batch <= 10", "micro_batch=None")),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, ("CrossEntropyLoss", "(10,)", "scalar")),
        ({"loss": lambda embeddings, labels: 0.5}, ("float", "scalar")),
        ({"backbone": nn.LSTM(4, 3)}, ("LSTM", "tuple", 10, "(images, dim)")),
    ],
)
def test_a_piece_a_loss_or_a_backbone_that_cannot_be_trained_is_refused(changed, facts) -> None:
    module = EmbeddingModule(**({"backbone": nn.Linear(4, 2), "loss": SoftAveragePrecisionLoss()} | changed))
    with refused(ValueError, *facts):
        noted(module, TensorDataset(IMAGES, LABELS % 2))
