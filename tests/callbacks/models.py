"""Tiny data, modules and Trainers shared by the tests of the callbacks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fewshot_callbacks.callbacks import EmbeddingSource, GeneralizationGapMonitor, RetrievalMonitor
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS
from fewshot_callbacks.data import EpisodicBatchSampler
from fewshot_callbacks.functional import RetrievalReport, discriminant_ratio, evaluate_retrieval
from fewshot_callbacks.protonet import ProtoNet
from tests.functional.variance_ratio_reference import logged_by_definition
from tests.messages import missing_facts

FEATURES, DIM, CLASSES = 12, 5, 6


def items(per_class: int = 6, seed: int = 3) -> TensorDataset:
    """Return noisy points around one centre for each class, two of a class in a row; the labels are not 0 ... C-1."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(2).repeat(per_class // 2)
    centres = torch.eye(CLASSES, FEATURES)
    points = centres[labels] + 0.7 * torch.randn(len(labels), FEATURES, generator=generator)
    return TensorDataset(points, 10 * labels - 7)


def loader(data: TensorDataset | None = None, batch_size: int = 11, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(items() if data is None else data, batch_size=batch_size, shuffle=shuffle)


class Net(LightningModule):
    """Trains for real; its encoder has all parts that a monitor could disturb: batch norm, dropout, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, DIM))
        self.classifier = nn.Linear(DIM, CLASSES)

    def embed(self, points: Tensor) -> Tensor:
        return self.encoder(self.frozen(points))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        points, labels = batch
        embeddings = self.embed(points)
        loss = nn.functional.cross_entropy(self.classifier(embeddings), (labels + 7) // 10)
        return {"loss": loss, "embeddings": embeddings, "labels": labels}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        points, labels = batch
        return {"embeddings": self.embed(points), "labels": labels}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.validation_step(batch, batch_idx, dataloader_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def by_hand(self, data: TensorDataset) -> tuple[Tensor, Tensor]:
        """Return the embeddings of a data set, computed without a Trainer, and its labels."""
        was_training = self.training
        self.eval()
        with torch.no_grad():
            embeddings = self.embed(data.tensors[0])
        self.train(was_training)
        return embeddings, data.tensors[1]


class Scripted(Net):
    """Its validation embeddings are as good as the script says: noise plus `quality[epoch]` times the class."""

    def __init__(self, quality: Sequence[float]) -> None:
        super().__init__()
        self.quality = quality

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        points, labels = batch
        return {"embeddings": scripted(points, labels, self.quality[self.current_epoch]), "labels": labels}


def scripted(points: Tensor, labels: Tensor, quality: float) -> Tensor:
    """Return embeddings of a chosen quality: 0 is noise, NaN is a diverged model."""
    one_hot = nn.functional.one_hot((labels + 7) // 10, CLASSES).to(points.dtype)
    noise = points.roll(3, dims=1)[:, :CLASSES].sin()
    return noise + quality * one_hot


def with_source(settings: dict[str, Any], default: Any = None) -> dict[str, Any]:
    """Return settings whose arguments of an `EmbeddingSource` are one; `default` is its first argument."""
    arguments = {name: value for name, value in settings.items() if name in ("labels", "embed", "ids", "spill_to")}
    if not arguments:
        return settings
    others = {name: value for name, value in settings.items() if name not in arguments}
    return others | {"source": EmbeddingSource(others.get("source", default), **arguments)}


def retrieval(**settings: Any) -> RetrievalMonitor:
    """Return a monitor without Grouped Recall, for which six classes are too few."""
    return RetrievalMonitor(**({"label_groups": None} | with_source(settings)))


def expected_metrics(embeddings: Tensor, labels: Tensor, *gallery: Tensor, **settings: Any) -> dict[str, float]:
    """Return what a `RetrievalMonitor` must log of a set, without the prefix."""
    report = evaluate_retrieval(embeddings, labels, *gallery, **({"label_groups": None} | settings))
    return report.metrics() | number_of_unmatched(report)


def number_of_unmatched(report: RetrievalReport) -> dict[str, float]:
    """Return the number of queries without a match by its name; empty if there are none, since it is then not logged."""
    return {"queries_without_match": float(report.queries_without_match)} if report.queries_without_match else {}


def expected_ratios(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """Return what a `DiscriminantRatioMonitor` must log of a set, without the prefix."""
    return {"J": float(discriminant_ratio(embeddings, labels))} | logged_by_definition(embeddings, labels)


def trainer(*callbacks: Callback, **settings: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    checkpoints = any("Checkpoint" in type(callback).__name__ for callback in callbacks)
    defaults = quiet | {"max_epochs": 1, "num_sanity_val_steps": 0, "enable_checkpointing": checkpoints}
    return Trainer(**(defaults | settings), callbacks=list(callbacks))


def messages_of(warnings: Any, *facts: Any) -> list[str]:
    """Return the messages of caught warnings that name each fact, without one of torch itself."""
    messages = [str(warning.message) for warning in warnings if "treespec" not in str(warning.message)]
    return [message for message in messages if not missing_facts(message, facts)]


def log_of_validation(monitor: Any, net: LightningModule, loaders: Any = None, **settings: Any) -> dict[str, float]:
    """Return key -> value of all that a validation with a monitor, or with several, logs."""
    run = trainer(*(monitor if isinstance(monitor, tuple) else [monitor]), **settings)
    run.validate(net, loader(VALIDATION) if loaders is None else loaders, verbose=False)
    return {key: float(value) for key, value in run.callback_metrics.items()}


def with_prefix(values: dict[str, float], prefix: str = "val", end: str = "") -> dict[str, float]:
    return {f"{prefix}/{name}{end}": value for name, value in values.items()}


def close(values: dict[str, float], **tolerance: float) -> Any:
    return pytest.approx(values, **({"rel": 1e-5, "nan_ok": True} | tolerance))


class EveryEpoch(Callback):
    """Keeps what ModelCheckpoint and EarlyStopping see at the end of each validation."""

    def __init__(self, key: str = "val/mAP") -> None:
        self.key = key
        self.values: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.values.append(float(trainer.callback_metrics[self.key]))


class EveryBatch(Callback):
    """Keeps each training batch: what the step returned and what was logged after it. List it behind the monitor."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.shown: list[float] = []  # in the progress bar
        self.logged: list[float] = []  # for callbacks

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.outputs.append(outputs)
        self.shown.append(float(trainer.progress_bar_metrics.get("train/J", -1.0)))
        self.logged.append(float(trainer.callback_metrics.get("train/J", -1.0)))


class SaidBefore(Callback):
    """Keeps what was warned of before the first training batch: `with pytest.warns(...) as callback.caught`."""

    def __init__(self) -> None:
        self.caught: Any = []
        self.said: list[str] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 0:
            self.said = messages_of(self.caught)


def expected_ratios_of_batches(batches: EveryBatch) -> list[float]:
    """Return J of each training batch, as a `DiscriminantRatioMonitor` must log it."""
    return [float(discriminant_ratio(step["embeddings"], step["labels"])) for step in batches.outputs]


def count_hooks(module: nn.Module) -> int:
    """Return the number of forward hooks on a module and all its submodules."""
    return sum(len(part._forward_hooks) for part in module.modules())


class Labelled(Dataset):
    """Points with their labels in an attribute, as torchvision's data sets have them; counts what is read."""

    def __init__(self, data: TensorDataset, name: str = "targets") -> None:
        self.points, labels = data.tensors
        setattr(self, name, labels.tolist())
        self.given = labels
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.points[index], int(self.given[index])


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


class Embeds(Net):
    """A module whose forward gives embeddings, as most have it."""

    def forward(self, points: Tensor) -> Tensor:
        return self.embed(points)


class Returns(Embeds):
    """Returns from a validation step what a function makes of the module and the parts of the batch."""

    def __init__(self, returns: Callable[..., Any]) -> None:
        super().__init__()
        self.returns = returns

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.returns(self, *batch)


TRAINING, VALIDATION = items(per_class=8, seed=1), items(per_class=6, seed=2)


KEYS = {
    f"gap/{side}{metric}@1{end}"
    for metric in ("grouped_recall", "recall")
    for side, end in (("", ""), ("", "_low"), ("", "_high"), ("train_", ""), ("val_", ""))
}


def gap_monitor(**settings: Any) -> GeneralizationGapMonitor:
    defaults = {"bank": Labelled(TRAINING), "classes": None, "label_groups": 3, "max_share": None}
    return GeneralizationGapMonitor(**(defaults | with_source(settings, STEP_KEYS)))


SHOTS = 2


def episode_items(classes: int = 4, per_class: int = 9) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(classes).repeat(per_class)
    points = torch.randn(classes, 12, generator=generator)[labels] + torch.randn(len(labels), 12, generator=generator)
    return TensorDataset(points, 10 * labels - 7)


def episodes(count: int = 8, together: int = 1) -> DataLoader[Any]:
    labels, sizes = episode_items().tensors[1], {"ways": 3, "shots": SHOTS, "queries": 3}
    sampler = EpisodicBatchSampler(labels, **sizes, episodes=count, seed=5, episodes_per_batch=together)
    return DataLoader(episode_items(), batch_sampler=sampler)


class Backbone(nn.Module):
    """Batch norm, and if wanted dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(dropout), nn.Linear(10, 6)
        )

    def forward(self, points: Tensor) -> Tensor:
        return self.layers(points)


def protonet(dropout: float = 0.0, **settings: Any) -> ProtoNet:
    torch.manual_seed(1)
    return ProtoNet(**({"backbone": Backbone(dropout), "shots": SHOTS, "learning_rate": 0.02} | settings))


def are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_equal, one, other))
    return bool(one == other)


LABELS = 5


def multi_label_items(items: int = 40, seed: int = 0) -> TensorDataset:
    """Points near the sum of the directions of their labels; the first item has no label."""
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(items, LABELS, generator=generator) < 0.3).long()
    targets[0] = 0
    points = targets.float() @ torch.eye(FEATURES)[:LABELS]
    return TensorDataset(points + 0.3 * torch.randn(items, FEATURES, generator=generator), targets)


def logged_by(run: Trainer) -> dict[str, float]:
    """Return key -> value of all that a run has logged, without the share of time and values of training batches."""
    skip = "gap/share_of_time", "train/J", "train/variance_ratio"
    return {key: float(value) for key, value in run.callback_metrics.items() if key not in skip}
