"""Jobs of real processes (see `tests.gloo_processes`): Trainers on two or three of them, with monitors attached."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, TensorDataset

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.callbacks import DiscriminantRatioMonitor, EmbeddingHealthMonitor, TrainingDynamicsMonitor
from fewshot_callbacks.data import EpisodicBatchSampler
from tests.callbacks.models import (
    TRAINING,
    Embeds,
    EveryBatch,
    EveryEpoch,
    Labelled,
    Net,
    Scripted,
    episode_items,
    gap_monitor,
    items,
    loader,
    protonet,
    retrieval,
    tagged,
    trainer,
)
from tests.callbacks.traces import all_monitors, run

ITEMS, QUALITY = 25, [0.0, 4.0, 0.3]
GROUPS = ((1, "gloo"), (2, "gloo"), (3, "gloo"))

TOUCHED: list[str] = []
"""What has changed the state of Python's random numbers."""


def parallel() -> dict[str, Any]:
    """Settings of a Trainer that joins the processes that are there."""
    return {"strategy": "ddp", "devices": torch.distributed.get_world_size(), "num_nodes": 1}


def uneven() -> TensorDataset:
    """25 items: DistributedSampler repeats the first one, so that each of two processes gets 13."""
    points, labels = items().tensors
    return TensorDataset(points[:ITEMS], labels[:ITEMS])


def shorter() -> TensorDataset:
    return items(per_class=2, seed=4)


def spoilt(data: TensorDataset) -> TensorDataset:
    return TensorDataset(data.tensors[0] * math.nan, data.tensors[1])


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


class Worded(Net):
    """Returns words for labels."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        outputs = super().validation_step(batch, batch_idx)
        return outputs | {"labels": [f"class {label:+d}" for label in batch[1].tolist()]}


class FailsOnRankOne(Net):
    """NaN embeddings, or none at all, in the process of rank 1 only."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        outputs = super().validation_step(batch, batch_idx)
        if self.global_rank == 0:
            return outputs
        return None if self.how == "nothing" else {**outputs, "embeddings": outputs["embeddings"] * math.nan}


def fails_on_rank_one(net: Net, batch: Any) -> torch.Tensor:
    """Of the training items: validation goes well, and the other process must not wait for this one."""
    if net.global_rank == 1 and len(batch[0]) != 11 and len(batch[0]) != 2:
        raise ArithmeticError("this process has failed")
    return net.embed(batch[0])


class Flagged(Net):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        points, labels = batch
        return {"embeddings": self.embed(points), "labels": labels, "gallery": points[:, 0] > 0.3}


class AsGiven(Net):
    """The points are the embeddings: the same bits in batches of any size."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": batch[0], "labels": batch[1]}


class TwoEncoders(AsGiven):
    """Two embeddings of each item, and something that some items share."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"a_embeds": batch[0], "b_embeds": batch[0].roll(1, dims=1), "camera": (batch[0][:, 0] > 0.3).long()}


class TwoViews(AsGiven):
    """Each sample gives two embeddings."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": torch.cat([batch[0], batch[0] + 0.1]), "labels": batch[1].repeat(2)}


class InBatches(Dataset[Any]):
    """Each sample is a batch of its own, of four items."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Any:
        points, labels = items().tensors
        return points[4 * number : 4 * number + 4], labels[4 * number : 4 * number + 4]


class OwnSampler(Sampler[int]):
    """Its share of the items for each process, and the first five for all of them."""

    def __iter__(self) -> Iterator[int]:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return iter([*range(5), *range(5 + rank, ITEMS, count)])

    def __len__(self) -> int:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 5 + len(range(5 + rank, ITEMS, count))


class Streamed(IterableDataset[Any]):
    """Without a length; the items of this process, of which the last has none."""

    def __iter__(self) -> Iterator[Any]:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        data = uneven()
        return (data[i] for i in range(ITEMS if rank == 0 and count == 2 else 0))


def exact(net: Net, loaders: Any, *, owns_sampler: bool = False, **settings: Any) -> dict[str, Any]:
    """What a monitor reports, to the last bit, and what was said."""
    monitor = retrieval(label_groups=2, metrics=(*DEFAULT_METRICS, "macro_mAP", "recall@precision0.5"), **settings)
    seen = validate(net, loaders, monitor, DiscriminantRatioMonitor(), use_distributed_sampler=not owns_sampler)
    report = monitor.report
    values = None if report is None else {"values": report.values, "f1": str(report.decision)}
    if report is not None and values is not None and report.grouped is not None:
        values |= {"grouped": report.grouped.at[1], "at": str(report.at_precision), "notes": list(report.notes)}
    return {"said": seen["said"], "report": values, "logged": {k: v for k, v in seen.items() if k != "said"}}


def numbered() -> TensorDataset:
    return TensorDataset(*uneven().tensors, torch.arange(ITEMS))


def validate(net: Net, loaders: Any, *monitors: Callback, **settings: Any) -> dict[str, Any]:
    made = trainer(*monitors, **parallel(), **settings)
    before = random.getstate()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.validate(net, loaders, verbose=False)
    if random.getstate() != before:
        TOUCHED.append(f"validation of a {type(net).__name__} with {[type(monitor).__name__ for monitor in monitors]}")
    words = [str(warning.message) for warning in caught]
    said = [said for said in words if "NaN" in said or "is unknown, because" in said]
    return {"said": said} | {key: float(value) for key, value in made.callback_metrics.items()}


def fit(folder: Path) -> dict[str, Any]:
    epochs, batches = EveryEpoch(), EveryBatch()
    best = ModelCheckpoint(folder / "checkpoints", monitor="val/mAP", mode="max", filename="{epoch}")
    made = trainer(retrieval(), DiscriminantRatioMonitor(), epochs, batches, best, **parallel(), max_epochs=3)
    made.fit(Scripted(QUALITY), loader(uneven()), loader(uneven()))
    steps = [(step["embeddings"].tolist(), step["labels"].tolist()) for step in batches.outputs]
    return {"mAP": epochs.values, "best": Path(best.best_model_path).name, "J": batches.logged, "steps": steps}


def dynamics(*monitors: TrainingDynamicsMonitor) -> dict[str, Any]:
    """Weights after a fit of six steps on six episodes each, and what was measured."""
    net = protonet(dropout=0.2)
    torch.manual_seed(7)
    data = episode_items()
    sampler = EpisodicBatchSampler(data.tensors[1], ways=3, shots=2, queries=3, episodes=12, seed=5)
    trainer(*monitors, **parallel()).fit(net, DataLoader(data, batch_sampler=sampler))
    weights = [parameter.detach().flatten().tolist() for parameter in net.parameters()]
    return {"weights": weights, "histories": [monitor.history.to_dict() for monitor in monitors]}


def alone() -> dict[str, Any]:
    """The state of Python's random numbers after a fit without monitors and with all, where no type checker draws."""
    states = []
    for monitors in ([], all_monitors()):
        net, _ = run(*monitors, max_epochs=1)
        states.append((random.getstate(), net.classifier.weight.tolist()))
    return {"states": states, "gap": monitors[2].gap is not None, "steps": len(monitors[3].history)}


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """What this process has seen."""
    if torch.distributed.get_world_size() == 1:
        return alone()
    random_state, two = random.getstate(), torch.distributed.get_world_size() == 2
    own = DataLoader(numbered(), batch_size=4, sampler=OwnSampler())
    everything = DataLoader(uneven(), sampler=DistributedSampler(uneven(), num_replicas=1, rank=0, shuffle=False))
    options = {"labels": 1, "source": lambda outputs, batch: (batch[0], batch[1])}
    seen: dict[str, Any] = {
        "exact": exact(AsGiven(), loader(uneven())),
        "two views": exact(TwoViews(), loader(uneven())),
        "in batches": exact(AsGiven(), DataLoader(InBatches(), batch_size=None)),
        "all to each": exact(AsGiven(), everything, owns_sampler=True),
        "ids": exact(AsGiven(), own, owns_sampler=True, ids=lambda outputs, batch: batch[2], **options),
        "no ids": exact(AsGiven(), own, owns_sampler=True, **options),
        "no data": exact(AsGiven(), DataLoader(Streamed(), batch_size=6))
        if torch.distributed.get_world_size() == 2
        else None,
    }
    monitors = retrieval, DiscriminantRatioMonitor
    seen |= {
        "one": validate(seeded(), loader(uneven()), *(monitor() for monitor in monitors)),
        "two": validate(seeded(), [loader(uneven()), loader(shorter())], *(monitor() for monitor in monitors)),
        "gallery": validate(seeded(), [loader(shorter()), loader(uneven())], retrieval(gallery=1)),
    }
    seen["health"] = validate(AsGiven(), loader(uneven()), EmbeddingHealthMonitor(k=10))
    seen["health of a list"] = (
        validate(AsGiven(), DataLoader(Streamed(), batch_size=6), EmbeddingHealthMonitor(k=10)) if two else None
    )
    torch.manual_seed(0)
    named = retrieval()
    seen["words"] = {"values": validate(Worded(), loader(uneven()), named, DiscriminantRatioMonitor())}
    seen["words"]["names"] = named.report.label_names if named.report is not None else None
    torch.manual_seed(0)
    seen["flag"] = validate(Flagged(), loader(uneven()), retrieval(gallery="gallery"))
    seen["targets"] = validate(AsGiven(), loader(tagged(ITEMS)), retrieval())
    seen["targets, gallery"] = validate(
        AsGiven(), [loader(tagged(5)), loader(tagged(ITEMS, seed=1))], retrieval(gallery=1)
    )
    seen["two encoders"] = validate(TwoEncoders(), loader(uneven()), retrieval(source=("a_embeds", "b_embeds")))
    seen["exclude"] = validate(
        TwoEncoders(), loader(uneven()), retrieval(source=lambda outputs, batch: batch, exclude="camera")
    )
    votes = retrieval(knn=(1, 4, 30), knn_bank=Labelled(TRAINING), name="train"), retrieval(knn=(1, 4), knn_bank="self")
    torch.manual_seed(0)
    seen["votes"] = validate(Embeds(), loader(uneven()), *votes)
    seen["no targets"] = validate(AsGiven(), loader(spoilt(tagged(5))), retrieval())
    if two:
        seen |= more(folder)
    seen["random is touched by"] = [] if random.getstate() == random_state else [*TOUCHED, "something"]
    if two:
        from tests.callbacks import picture_jobs

        seen["pictures"] = picture_jobs.answers(folder)
    return seen


def more(folder: Path) -> dict[str, Any]:
    """What two processes show as well as three would."""
    seen: dict[str, Any] = {}
    monitors = retrieval, DiscriminantRatioMonitor
    torch.manual_seed(0)
    monitor = gap_monitor(training_data=Labelled(TRAINING), classes=5, label_groups=2, items_per_class=7)
    seen["gap"] = validate(Embeds(), loader(uneven()), monitor)
    seen["gap"].pop("gap/share_of_time")
    failing = gap_monitor(training_data=Labelled(TRAINING), embed=fails_on_rank_one)
    seen["gap fails"] = validate(seeded(), loader(uneven()), failing)
    for how in ("nan", "nothing"):
        seen[how] = validate(FailsOnRankOne(how), loader(uneven()), *(monitor(strict=False) for monitor in monitors))
    seen["fit"] = fit(folder)
    file = str(folder / "training_dynamics.json")
    seen["dynamics"] = dynamics(TrainingDynamicsMonitor(every_n_steps=2, strict=True, file=file))
    seen["no dynamics"] = dynamics()
    try:
        validate(FailsOnRankOne("nan"), loader(uneven()), retrieval(strict=True))
    except ValueError as error:
        seen["strict"] = str(error)
    made = trainer(retrieval(), **parallel(), max_epochs=1, num_sanity_val_steps=1)
    try:
        made.fit(FailsOnRankOne("nothing"), loader(uneven()), loader(uneven()))
    except ValueError as error:
        seen["sanity check"] = str(error)
    return seen
