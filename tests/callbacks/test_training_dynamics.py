"""TrainingDynamicsMonitor on real Trainers: the real step, without a trace."""

import copy
import csv
import math
import random
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fewshot_callbacks.callbacks import EmbeddingSource, TrainingDynamicsMonitor
from fewshot_callbacks.functional import DynamicsHistory, StepDynamics, training_dynamics
from fewshot_callbacks.protonet import ProtoNet
from fewshot_callbacks.trainer.side_effects import without_side_effects
from tests.callbacks.models import SHOTS, Backbone, EveryBatch, episode_items, episodes, messages_of, protonet, trainer
from tests.functional.dynamics.slow_dynamics import slow_dynamics
from tests.messages import missing_facts, refused, warned

MEASURES = ("alpha", "norm_ratio", "psi_con", "psi_div", "con_alpha", "div_alpha", "con_div")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*have no `val_dataloader", "ignore:.*callbacks used to create the checkpoint"
)


class Reference(Callback):
    """Embeds with copies of the whole module before and after each update, and applies the definitions in loops."""

    def __init__(self, centering: Any = "points", encoder: str = "backbone", image: Any = 0, label: Any = 1) -> None:
        self.centering, self.encoder, self.image, self.label = centering, encoder, image, label
        self.measured: dict[int, dict[str, float]] = {}

    def embed(self, module: LightningModule, batch: Any) -> Tensor:
        with torch.no_grad(), module.trainer.precision_plugin.forward_context():
            twin = copy.deepcopy(module.get_submodule(self.encoder))  # the Trainer cannot be copied, and need not
            return twin(batch[self.image])

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.batch, self.before = batch, None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if self.before is None:
            self.before = self.embed(pl_module, self.batch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self.before is not None:
            after, labels = self.embed(pl_module, self.batch), self.batch[self.label]
            self.measured[trainer.global_step] = slow_dynamics(self.before, after, labels, SHOTS, self.centering)


def assert_equals_reference(
    monitor: TrainingDynamicsMonitor, reference: Reference, steps: list[int], rel: float = 1e-5
) -> None:
    assert list(monitor.history.steps) == steps
    for step, measure in monitor.history:
        for name in MEASURES:
            assert getattr(measure, name) == pytest.approx(reference.measured[step][name], rel=rel), (step, name)


def logger(folder: Path) -> CSVLogger:
    return CSVLogger(folder, name="run", version="")


@pytest.mark.parametrize(
    ("settings", "centering", "steps"),
    [
        ({"accumulate_grad_batches": 3, "max_epochs": 2}, "points", [3, 6]),
        ({"precision": "bf16-mixed", "gradient_clip_val": 0.1}, "points", [3, 6]),
        ({"precision": "64-true", "max_epochs": 2}, "coordinates", [3, 6, 9, 12, 15]),
    ],
    ids=str,
)
def test_measures_the_step_that_was_taken_whatever_the_trainer_does(settings, centering, steps, tmp_path) -> None:
    """And loggers and the file get what was measured."""
    monitor = TrainingDynamicsMonitor(every_n_steps=3, centering=centering, strict=True)
    reference = Reference(centering)
    trainer(reference, monitor, logger=logger(tmp_path), log_every_n_steps=3, **settings).fit(protonet(), episodes())
    # Embeddings that were rounded to float32 miss the values of a step in float64 by far more.
    assert_equals_reference(monitor, reference, steps, rel=1e-12 if settings.get("precision") == "64-true" else 1e-5)
    assert monitor.history.centering == centering
    assert DynamicsHistory.load(tmp_path / "run" / "training_dynamics.json") == monitor.history
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["dynamics/alpha"]]
    for name in MEASURES:
        written = [float(row[f"dynamics/{name}"]) for row in rows]
        assert written == pytest.approx(monitor.history.values(name).tolist(), rel=1e-6)


class TwoOptimisers(LightningModule):
    """Manual optimisation in every second batch: one optimiser for each half, or none that Lightning knows of."""

    def __init__(self, raw: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.automatic_optimization = False
        self.backbone, self.raw, self.shots = Backbone(), raw, SHOTS

    def forward(self, points: Tensor) -> Tensor:
        return self.backbone(points)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers(not self.raw) if batch_idx % 2 == 0 else ():  # type: ignore[union-attr]
            loss = self(batch[0]).square().mean() + self(batch[0])[0].sum()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        layers = self.backbone.layers
        return [torch.optim.SGD(layers[0].parameters(), lr=0.1), torch.optim.SGD(layers[4].parameters(), lr=0.1)]


def test_several_optimisers_in_a_batch_are_one_movement() -> None:
    """Two steps in each update; of the updates each second is measured, whichever batch it is in."""
    monitor, reference = TrainingDynamicsMonitor(every_n_steps=2, source=EmbeddingSource(embed="backbone")), Reference()
    trainer(reference, monitor).fit(TwoOptimisers(), episodes())
    assert_equals_reference(monitor, reference, [4, 8])


def test_steps_that_nobody_announces_are_said_to_be_unmeasurable() -> None:
    monitor = TrainingDynamicsMonitor(every_n_steps=1)
    with warned(UserWarning, "dynamics", 8, "batches", "self.optimizers().step()"):
        trainer(monitor).fit(TwoOptimisers(raw=True), episodes())
    assert len(monitor.history) == 0


def test_steps_that_move_nothing_are_undefined_and_said_once() -> None:
    """As one that a gradient scaler leaves out on finding infinite gradients."""

    class Still(ProtoNet):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    monitor = TrainingDynamicsMonitor(every_n_steps=1)
    facts = "dynamics", "NaN", "norm_ratio", "step", 1, "embedding"
    with warned(UserWarning, *facts) as caught:
        trainer(monitor, max_steps=2).fit(Still(Backbone(), shots=SHOTS), episodes())
    assert len(messages_of(caught, "dynamics", "NaN")) == 1
    assert [bool(measure.undefined) for measure in monitor.history.measures] == [True, True]


def test_several_episodes_in_a_batch_are_measured() -> None:
    monitor = TrainingDynamicsMonitor(every_n_steps=2, strict=True)
    trainer(monitor).fit(protonet(episodes_per_batch=2), episodes(8, together=2))
    assert list(monitor.history.steps) == [2, 4]
    assert all(0 < measure.norm_ratio < 1 for measure in monitor.history.measures)


def test_dropout_is_the_same_before_and_after() -> None:
    """With a step of nearly no length, embeddings of other dropout masks would lie far apart."""
    monitor = TrainingDynamicsMonitor(every_n_steps=1, strict=True)
    trainer(monitor, max_steps=2).fit(protonet(dropout=0.5, learning_rate=1e-6), episodes())
    for name in ("alpha", "psi_con"):
        assert monitor.history.values(name).tolist() == pytest.approx([1, 1], abs=1e-3)


def test_a_rehearsal_puts_back_all_random_states_and_buffers_also_after_an_error() -> None:
    norm = nn.BatchNorm1d(2)
    before = norm.running_mean

    def states() -> tuple[Any, ...]:
        return random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()  # noqa: NPY002

    drawn = []
    for _ in range(2):
        seen = states()
        with suppress(KeyError), without_side_effects(norm, seed=4):
            norm(torch.randn(5, 2))
            norm.running_mean = torch.ones(2)
            drawn.append((random.random(), torch.rand(1).item(), np.random.rand()))  # noqa: NPY002
            raise KeyError
        assert states() == seen
        assert norm.running_mean is before
        assert before.eq(0).all()
        assert norm.num_batches_tracked == 0
    assert drawn[0] == drawn[1]


class Own(LightningModule):
    """A user's module: forward gives class scores, the step returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classifier = Backbone(), nn.Linear(6, 4)

    def forward(self, points: Tensor) -> Tensor:
        return self.classifier(self.encoder(points))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        embeddings = self.encoder(batch["image"])
        loss = nn.functional.cross_entropy(self.classifier(embeddings), (batch["label"] + 7) // 10)
        return {"loss": loss, "embeddings": embeddings}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def mappings() -> DataLoader[Any]:
    def collate(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return dict(zip(("image", "label"), default_collate(pairs), strict=True))

    return DataLoader(episode_items(), batch_sampler=episodes(4).batch_sampler, collate_fn=collate)


def test_a_users_module_says_how_it_embeds() -> None:
    source = EmbeddingSource(labels="label", embed=lambda module, batch: module.encoder(batch["image"]))
    settings: Any = {"shots": SHOTS, "source": source}
    monitor = TrainingDynamicsMonitor(every_n_steps=2, **settings, strict=True)
    reference = Reference("points", "encoder", "image", "label")
    trainer(reference, monitor).fit(Own(), mappings())
    assert_equals_reference(monitor, reference, [2, 4])


@pytest.mark.parametrize(
    ("embed", "difference"),
    [
        (lambda module, batch: module(batch["image"]), ("(15, 4)", "(15, 6)")),
        (lambda module, batch: 2 * module.encoder(batch["image"]), (1, "length")),
    ],
)
def test_what_cannot_be_measured_is_said_once_and_the_training_goes_on(embed: Any, difference: Any) -> None:
    source = EmbeddingSource(labels="label", embed=embed)
    settings: Any = {"every_n_steps": 1, "shots": 2, "source": source}
    run = trainer(TrainingDynamicsMonitor(strict=False, **settings))
    facts = "TrainingDynamicsMonitor", "training_step", *difference, "embed=..."
    with warned(UserWarning, "dynamics", "NaN", *facts) as caught:
        run.fit(Own(), mappings())
    assert len(messages_of(caught, "dynamics", "NaN")) == 1
    assert run.global_step == 4
    assert math.isnan(run.callback_metrics["dynamics/con_div"])
    with refused(ValueError, *facts):
        trainer(TrainingDynamicsMonitor(strict=True, **settings)).fit(Own(), mappings())


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"every_n_steps": 0}, ("every_n_steps=0", 1)),
        ({"shots": 0}, ("shots=0", 1)),
        ({"episodes_per_batch": 0}, ("episodes_per_batch=0", 1)),
        ({"source": EmbeddingSource(embed="bakbone")}, ("embed='bakbone'", "ProtoNet", "submodule", "backbone")),
    ],
)
def test_wrong_settings_end_the_fit_before_it_starts(settings: dict[str, Any], facts: tuple[Any, ...]) -> None:
    with refused(ValueError, "TrainingDynamicsMonitor", *facts):
        trainer(TrainingDynamicsMonitor(**settings)).fit(protonet(), episodes())


def test_unknown_shots_are_refused_before_the_fit() -> None:
    batches = EveryBatch()
    with refused(ValueError, "TrainingDynamicsMonitor", "Own", "'shots'", "shots=..."):
        trainer(TrainingDynamicsMonitor(source=EmbeddingSource(labels="label", embed="encoder")), batches).fit(
            Own(), mappings()
        )
    assert not batches.outputs


def test_nothing_is_written_without_a_logger_unless_a_path_is_given(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for settings in ({}, {"logger": logger(tmp_path), "fast_dev_run": True}):
        trainer(TrainingDynamicsMonitor(every_n_steps=1), max_steps=2, **settings).fit(protonet(), episodes())
    assert list(tmp_path.iterdir()) == []
    monitor = TrainingDynamicsMonitor(every_n_steps=2, file=str(tmp_path / "mine.json"))
    trainer(monitor, max_steps=2).fit(protonet(), episodes())
    assert DynamicsHistory.load(tmp_path / "mine.json") == monitor.history


def test_an_interrupted_run_keeps_its_history(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                raise RuntimeError("stopped")

    with refused(RuntimeError, "stopped"):
        trainer(TrainingDynamicsMonitor(every_n_steps=1), Stop(), logger=logger(tmp_path)).fit(protonet(), episodes())
    assert DynamicsHistory.load(tmp_path / "run" / "training_dynamics.json").steps == (1, 2)


def test_a_resumed_run_goes_on_with_its_history(tmp_path: Path) -> None:
    whole, first, second = (TrainingDynamicsMonitor(every_n_steps=3) for _ in range(3))
    trainer(whole, max_epochs=2).fit(protonet(), episodes(4))
    trainer(first, ModelCheckpoint(tmp_path, filename="last"), max_epochs=1).fit(protonet(), episodes(4))
    trainer(second, max_epochs=2).fit(protonet(), episodes(4), ckpt_path=str(tmp_path / "last.ckpt"))
    assert second.history.steps == whole.history.steps == (3, 6)
    assert second.history.measures[:1] == first.history.measures
    torch.testing.assert_close(second.history.values("norm_ratio"), whole.history.values("norm_ratio"))


@pytest.mark.parametrize("earlier", ["of another run", "of the user"])
def test_a_file_of_another_run_or_of_the_user_is_left_as_it_is(earlier: str, tmp_path: Path) -> None:
    """The history goes to the next name, also at the end of the second epoch, and that is said once."""
    file = tmp_path / "run" / "training_dynamics.json"
    if earlier == "of another run":
        trainer(TrainingDynamicsMonitor(every_n_steps=1), logger=logger(tmp_path), max_steps=1).fit(
            protonet(), episodes()
        )
    else:
        file.parent.mkdir()
        file.write_text("mine")
    before, monitor = file.read_bytes(), TrainingDynamicsMonitor(every_n_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(monitor, logger=logger(tmp_path), max_epochs=2).fit(protonet(), episodes(4))
    [said] = messages_of(caught, "training_dynamics-2.json")
    assert missing_facts(said, ("TrainingDynamicsMonitor", file)) == []
    assert file.read_bytes() == before
    assert DynamicsHistory.load(file.with_stem("training_dynamics-2")) == monitor.history


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_a_resumed_run_replaces_the_file_of_its_first_part_alone(tmp_path: Path) -> None:
    first, second = (TrainingDynamicsMonitor(every_n_steps=3) for _ in range(2))
    checkpoint = ModelCheckpoint(tmp_path, filename="last")
    trainer(first, checkpoint, max_epochs=1, logger=logger(tmp_path)).fit(protonet(), episodes(4))
    file = tmp_path / "run" / "training_dynamics.json"
    resumed = {"ckpt_path": str(tmp_path / "last.ckpt")}
    trainer(second, max_epochs=2, logger=logger(tmp_path)).fit(protonet(), episodes(4), **resumed)
    assert DynamicsHistory.load(file) == second.history
    assert DynamicsHistory.load(file).steps == (3, 6)
    # The file of a third run, of other weights, whose steps have the same numbers.
    other = DynamicsHistory((3, 6), (StepDynamics(1.0, 0.5, 0.9, 1.1),) * 2)
    other.save(file)
    third = trainer(TrainingDynamicsMonitor(every_n_steps=3), max_epochs=2, logger=logger(tmp_path))
    with warned(UserWarning, "TrainingDynamicsMonitor", file, "training_dynamics-2.json"):
        third.fit(protonet(), episodes(4), **resumed)
    assert DynamicsHistory.load(file) == other
    assert DynamicsHistory.load(file.with_stem("training_dynamics-2")).steps == (3, 6)


def test_a_path_that_the_user_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text("mine")
    monitor = TrainingDynamicsMonitor(every_n_steps=2, file=str(tmp_path / "mine.json"))
    trainer(monitor, max_steps=2).fit(protonet(), episodes())
    assert DynamicsHistory.load(tmp_path / "mine.json") == monitor.history


def test_a_history_of_another_centering_is_not_mixed_in() -> None:
    one, other = TrainingDynamicsMonitor(centering="coordinates"), TrainingDynamicsMonitor()
    one._history[100] = StepDynamics(1.0, 0.5, 0.9, 1.1)
    with warned(UserWarning, "TrainingDynamicsMonitor", "checkpoint", "centering='coordinates'", "'points'"):
        other.load_state_dict(one.state_dict())
    assert len(other.history) == 0


def test_two_dynamics_monitors_need_two_names(tmp_path: Path) -> None:
    one, alike = (TrainingDynamicsMonitor(every_n_steps=2, centering=each) for each in ("points", "coordinates"))
    with refused(ValueError, "TrainingDynamicsMonitors", "prefix=...", "file=..."):
        trainer(one, alike).fit(protonet(), episodes())
    other = TrainingDynamicsMonitor(every_n_steps=2, centering="coordinates", prefix="theirs", file="theirs.json")
    run = trainer(one, other, logger=logger(tmp_path), max_steps=2)
    run.fit(protonet(), episodes())
    assert one.history.values("alpha").tolist() != other.history.values("alpha").tolist()
    assert {"dynamics/alpha", "theirs/alpha"} <= set(run.callback_metrics)
    assert {"training_dynamics.json", "theirs.json"} <= {file.name for file in (tmp_path / "run").iterdir()}


def test_a_second_fit_begins_anew_and_what_forward_returns_is_said_to_be_taken_for_embeddings() -> None:
    class OnlyLoss(ProtoNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)["loss"]

    monitor = TrainingDynamicsMonitor(every_n_steps=2)
    trainer(monitor, max_steps=4).fit(protonet(), episodes())
    cure = "source=EmbeddingSource(embed='name.of.a.submodule')"
    with warned(UserWarning, "TrainingDynamicsMonitor", "OnlyLoss.forward", "training_step", cure):
        trainer(monitor, max_steps=2).fit(OnlyLoss(Backbone(), shots=SHOTS), episodes())
    assert monitor.history.steps == (2,)


def test_a_shuffled_loader_is_measured_on_what_its_batches_have() -> None:
    """Of each class that has more than the two shots the first three, as the smallest of these classes has three."""
    labels = torch.tensor([0, 1, 0, 1, 0, 1, 1, 2, 2, 3, 3, 3]).repeat(2)
    chosen = [0, 1, 2, 3, 4, 5, 9, 10, 11]
    seen: list[Tensor] = []

    class Uneven(ProtoNet):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch[0]).square().sum(dim=1).sub(1).square().mean()

    def embed(module: Any, batch: Any) -> Tensor:
        seen.append(module.backbone(batch[0]))
        return seen[-1]

    net, monitor = (
        Uneven(Backbone(), shots=2),
        TrainingDynamicsMonitor(every_n_steps=1, source=EmbeddingSource(embed=embed)),
    )
    facts = "TrainingDynamicsMonitor", "batch", "classes", "shots=2", 3, 12, "EpisodicBatchSampler"
    with warned(UserWarning, *facts) as caught:
        trainer(monitor).fit(net, DataLoader(TensorDataset(torch.randn(24, 12), labels), batch_size=12))
    assert len(messages_of(caught, "EpisodicBatchSampler")) == 1
    before, after = (part[chosen] for part in seen[:2])
    assert next(iter(monitor.history)) == (1, training_dynamics(before, after, labels[chosen], shots=2))
