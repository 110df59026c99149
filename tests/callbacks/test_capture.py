"""The output of a submodule: which calls of a step count, that a value is kept, and that nobody else meets the hook."""

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingSource,
    KnnMonitor,
    RetrievalMonitor,
)
from fewshot_callbacks.callbacks._conduct import UsageError
from fewshot_callbacks.functional import discriminant_ratio
from tests.callbacks.models import (
    CLASSES,
    DIM,
    FEATURES,
    TRAINING,
    VALIDATION,
    close,
    count_hooks,
    expected_metrics,
    loader,
    log_of_validation,
    retrieval,
    trainer,
    with_prefix,
)
from tests.messages import missing_facts

pytestmark = pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")

POINTS, LABELS = VALIDATION.tensors


class Plain(LightningModule):
    """An encoder and a classifier without random parts; the batches of a training are kept."""

    def __init__(self, encoder: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES, DIM) if encoder is None else encoder
        self.classifier = nn.Linear(DIM, CLASSES)

    def loss(self, points: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.classifier(self.encoder(points)), (labels + 7) // 10)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(*batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# ------------------------------------------------------------------------------------------------ a value, and not a view


class DividesInPlace(Plain):
    def loss(self, points: Tensor, labels: Tensor) -> Tensor:
        embeddings = self.encoder(points)
        embeddings /= embeddings.norm(dim=1, keepdim=True) ** 2
        return embeddings.sum()


class Levels(nn.Module):
    """Returns an object whose entries a later layer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, DIM)

    def forward(self, points: Tensor) -> dict[str, Any]:
        return {"hidden": [self.first(points)], "last": None}


class ChangesNested(Plain):
    def __init__(self) -> None:
        super().__init__(Levels())

    def loss(self, points: Tensor, labels: Tensor) -> Tensor:
        hidden = self.encoder(points)["hidden"][0]
        return hidden.relu_().sum()


def in_place(layer: nn.Module) -> Plain:
    return Plain(nn.Sequential(nn.Linear(FEATURES, DIM), layer))


@pytest.mark.parametrize(
    ("make", "source", "embed"),
    [
        (lambda: in_place(nn.ReLU(inplace=True)), "encoder.0", lambda net: net.encoder[0]),
        (lambda: in_place(nn.LeakyReLU(inplace=True)), "encoder.0", lambda net: net.encoder[0]),
        (lambda: in_place(nn.Hardswish(inplace=True)), "encoder.0", lambda net: net.encoder[0]),
        (lambda: in_place(nn.Dropout(0.5, inplace=True)), "encoder.0", lambda net: net.encoder[0]),
        (DividesInPlace, "encoder", lambda net: net.encoder),
        (ChangesNested, "encoder:hidden.0", lambda net: net.encoder.first),
    ],
    ids=["ReLU", "LeakyReLU", "Hardswish", "Dropout", "division", "nested"],
)
def test_what_is_measured_is_what_the_submodule_returned(make: Any, source: str, embed: Any) -> None:
    """Seen red: a view of the output was kept, which the next layer changed."""
    net = make().eval()
    monitors = (retrieval(source=source, similarity="euclidean"), DiscriminantRatioMonitor(source=source))
    logged = log_of_validation(monitors, net)
    embeddings = embed(net)(POINTS).detach()
    expected = expected_metrics(embeddings, LABELS, similarity="euclidean")
    assert logged["val/mAP"] == pytest.approx(expected["mAP"], rel=1e-5)
    assert logged["val/J"] == pytest.approx(float(discriminant_ratio(embeddings, LABELS)), rel=1e-4)


# --------------------------------------------------------------------------------------------------- which calls count


class EachBatch(Callback):
    """Keeps J of each training batch, as it was logged and as the weights before the batch give it."""

    def __init__(self) -> None:
        self.logged: list[float] = []
        self.before: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            embeddings = pl_module.encoder(batch[0])  # belongs to no step
        self.before.append(float(discriminant_ratio(embeddings, batch[1])))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.logged.append(float(trainer.callback_metrics["train/J"]))


def ratios(net: LightningModule, **settings: Any) -> EachBatch:
    batches = EachBatch()
    run = trainer(DiscriminantRatioMonitor(source="encoder"), batches, limit_val_batches=0, **settings)
    run.fit(net, loader(TRAINING, 24))
    assert len(batches.logged) == math.ceil(len(TRAINING) / 24)
    return batches


class Checkpointed(Plain):
    reentrant = False

    def loss(self, points: Tensor, labels: Tensor) -> Tensor:
        logits = checkpoint(
            lambda x: self.classifier(self.encoder(x)), points.requires_grad_(), use_reentrant=self.reentrant
        )
        return nn.functional.cross_entropy(logits, (labels + 7) // 10)


class Reentrant(Checkpointed):
    reentrant = True


class ManualCheckpointed(Checkpointed):
    """The backward pass, which calls the encoder again, is inside the step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(*batch))
        optimizer.step()


class Accumulates(Plain):
    """Two views of each item, and a backward pass for each."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for view in (batch[0], 2 * batch[0]):
            self.manual_backward(self.loss(view, batch[1]))
        optimizer.step()


@pytest.mark.parametrize("make", [Plain, Checkpointed, Reentrant, ManualCheckpointed], ids=lambda make: make.__name__)
def test_calls_that_autograd_repeats_are_not_counted(make: Callable[[], Plain]) -> None:
    """Seen red: "called 2 times ... pass views=2"."""
    batches = ratios(make())
    assert batches.logged == pytest.approx(batches.before, rel=1e-4)


def test_views_with_a_backward_pass_each_are_joined() -> None:
    logged: list[float] = []
    expected: list[float] = []

    class Both(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            points, labels = batch
            embeddings = pl_module.encoder(torch.cat([points, 2 * points])).detach()
            expected.append(float(discriminant_ratio(embeddings, labels.repeat(2))))

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            logged.append(float(trainer.callback_metrics["train/J"]))

    monitor = DiscriminantRatioMonitor(source=EmbeddingSource("encoder", views=2))
    trainer(monitor, Both(), limit_val_batches=0).fit(Accumulates(), loader(TRAINING, 24))
    assert logged == pytest.approx(expected, rel=1e-4)


class Sam(torch.optim.SGD):
    """Steps away from the weights, where the loss is measured once more, and back."""

    def first_step(self) -> None:
        self.moves = [0.05 * parameter.grad for group in self.param_groups for parameter in group["params"]]
        self._move(1)

    def second_step(self) -> None:
        self._move(-1)
        super().step()

    @torch.no_grad()
    def _move(self, sign: int) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter, move in zip(parameters, self.moves, strict=True):
            parameter.add_(move, alpha=sign)


class Lbfgs(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


class StrongWolfe(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")


class ManualLbfgs(Lbfgs):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(*batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


class ManualSam(Plain):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return Sam(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for step in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            self.manual_backward(self.loss(*batch))
            step()


class TwoClosures(Plain):
    """Runs the whole step twice in a batch, before the optimiser changes the weights."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Calls:
    """J of each call of the encoder in a step."""

    def __init__(self, net: Plain) -> None:
        self.ratios: list[float] = []
        self.labels = LABELS
        net.encoder.register_forward_hook(self.see)

    def see(self, module: Any, inputs: Any, output: Tensor) -> None:
        self.ratios.append(float(discriminant_ratio(output.detach(), self.labels)))


@pytest.mark.parametrize(
    "make", [Lbfgs, StrongWolfe, ManualLbfgs, ManualSam, TwoClosures], ids=lambda make: make.__name__
)
def test_of_several_runs_of_a_step_the_last_counts(make: Callable[[], Plain]) -> None:
    """Seen red: "4 times ... views=4", which would join the embeddings of four different weights."""
    net = make()
    calls = Calls(net)
    last: list[float] = []
    logged: list[float] = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            calls.labels = batch[1]
            calls.ratios.clear()

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            assert len(calls.ratios) > 1
            last.append(calls.ratios[-1])
            logged.append(float(trainer.callback_metrics["train/J"]))

    run = trainer(DiscriminantRatioMonitor(source="encoder"), Watch(), limit_val_batches=0)
    run.fit(net, loader(TRAINING, 24))
    assert logged == pytest.approx(last, rel=1e-4)


class Probes(Callback):
    """Calls the module in each hook of a batch, as an online evaluator does."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.encoder(batch[0])

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        pl_module.encoder(torch.zeros(2, FEATURES))

    def on_validation_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.encoder(batch[0])

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.encoder(batch[0])


@pytest.mark.parametrize("is_first", [True, False])
def test_calls_of_other_callbacks_belong_to_no_step(is_first: bool) -> None:
    """Seen red: such a call was taken for a second view."""
    net, batches = Plain(), EachBatch()
    monitors: list[Callback] = [retrieval(source="encoder"), DiscriminantRatioMonitor(source="encoder")]
    callbacks = [Probes(), *monitors, batches] if is_first else [*monitors, batches, Probes()]
    run = trainer(*callbacks)
    run.fit(net, loader(TRAINING, 24), loader(VALIDATION))
    assert batches.logged == pytest.approx(batches.before, rel=1e-4)
    expected = expected_metrics(net.encoder(POINTS).detach(), LABELS)
    assert float(run.callback_metrics["val/mAP"]) == pytest.approx(expected["mAP"], rel=1e-5)


class WithTeacher(Plain):
    """A second pass without gradients, as for the targets of a teacher."""

    def loss(self, points: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.encoder(points)
        return (self.encoder(0.9 * points) - target).square().mean()


class WithPenalty(Plain):
    """A second pass of inputs whose gradient is penalised."""

    def loss(self, points: Tensor, labels: Tensor) -> Tensor:
        if not self.training:
            return super().loss(points, labels)
        between = (points + points.roll(1, 0)).requires_grad_()
        [gradient] = torch.autograd.grad(self.encoder(between).sum(), between, create_graph=True)
        return super().loss(points, labels) + gradient.square().mean()


class TwoTimes(Plain):
    def loss(self, points: Tensor, labels: Tensor) -> Tensor:
        return (self.encoder(points) - self.encoder(0.9 * points)).square().mean()


@pytest.mark.parametrize(("make", "are_views"), [(WithTeacher, False), (WithPenalty, False), (TwoTimes, True)])
def test_views_are_advised_only_where_the_calls_may_be_views(make: Callable[[], Plain], are_views: bool) -> None:
    with pytest.raises(UsageError) as raised:
        trainer(DiscriminantRatioMonitor(source="encoder"), limit_val_batches=0).fit(make(), loader(TRAINING, 24))
    message = str(raised.value)
    facts = "DiscriminantRatioMonitor", "training_step", "'encoder'", 2, 24, "source=('embeddings', 'labels')"
    assert missing_facts(message, facts) == []
    assert (missing_facts(message, ("EmbeddingSource('encoder', views=2)",)) == []) == are_views


# ------------------------------------------------------------------------------------------------- what others can see


def scripts(encoder: nn.Module) -> nn.Module:
    return torch.jit.script(encoder)


def traces(encoder: nn.Module) -> nn.Module:
    return torch.jit.trace(encoder, POINTS[:2], check_trace=False)


def exports(encoder: nn.Module) -> nn.Module:
    return torch.export.export(encoder, (POINTS[:11],)).module()


def symbolic(encoder: nn.Module) -> nn.Module:
    return torch.fx.symbolic_trace(encoder)


def pickles(encoder: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(encoder, file)
    assert b"fewshot" not in file.getvalue()
    assert b"fewshot" not in pickle.dumps(encoder)
    file.seek(0)
    return torch.load(file, weights_only=False)


EPOCH_HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_validation_batch_end")


class Exports(Callback):
    """Makes a copy of the encoder in some hook, once, and keeps it."""

    def __init__(self, hook: str, export: Callable[[nn.Module], nn.Module]) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

        def act(trainer: Trainer, pl_module: Any, *_: Any) -> None:
            if not self.copies:
                mode = pl_module.encoder.training
                copied = export(pl_module.encoder.eval())
                self.copies.append((copied(POINTS[:11]).detach(), pl_module.encoder(POINTS[:11]).detach()))
                pl_module.encoder.train(mode)

        setattr(self, hook, act)


def exported_in(hook: str, export: Callable[[nn.Module], nn.Module], *, is_first: bool) -> None:
    net = Plain(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(inplace=True), nn.Linear(8, DIM)))
    monitors: Sequence[Callback] = (
        RetrievalMonitor(source="encoder", label_groups=None),
        DiscriminantRatioMonitor(source="encoder"),
        EmbeddingHealthMonitor(source=EmbeddingSource("encoder", labels=lambda batch: batch[1])),
        KnnMonitor(1, bank="self", source="encoder"),
    )
    exporting = Exports(hook, export)
    run = trainer(*([exporting, *monitors] if is_first else [*monitors, exporting]))
    run.fit(net, loader(TRAINING, 24), loader(VALIDATION))
    [(copied, original)] = exporting.copies
    torch.testing.assert_close(copied, original)
    assert count_hooks(net) == 0
    expected = expected_metrics(net.encoder(POINTS).detach(), LABELS)
    assert float(run.callback_metrics["val/mAP"]) == pytest.approx(expected["mAP"], rel=1e-5)


@pytest.mark.parametrize(
    "export", [scripts, traces, exports, symbolic, copy.deepcopy, pickles], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("hook", EPOCH_HOOKS)
def test_between_two_batches_an_encoder_has_no_hook(hook: str, export: Callable[[nn.Module], nn.Module]) -> None:
    """Seen red: TorchScript met two hooks of one name, and a file held the monitors."""
    exported_in(hook, export, is_first=False)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("export", [exports, symbolic, copy.deepcopy, pickles], ids=lambda f: f.__name__)
@pytest.mark.parametrize("hook", BATCH_HOOKS)
def test_inside_a_batch_a_copy_of_an_encoder_has_nothing_of_a_monitor(
    hook: str, export: Callable[[nn.Module], nn.Module], is_first: bool
) -> None:
    exported_in(hook, export, is_first=is_first)


class SavesInItsStep(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pickles(self.encoder)
        pickles(copy.deepcopy(self.encoder))
        self.loss(*batch)


def test_a_file_that_a_step_writes_has_nothing_of_a_monitor() -> None:
    net = SavesInItsStep()
    expected = expected_metrics(net.encoder(POINTS).detach(), LABELS)
    assert log_of_validation(retrieval(source="encoder"), net) == close(with_prefix(expected))
