"""Jobs of real processes (see `tests.gloo_processes`): banks under several strategies."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from fewshot_callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingSource,
    GeneralizationGapMonitor,
    KnnMonitor,
    ProbeMonitor,
)
from tests.callbacks.models import DIM, FEATURES, Embeds, items, retrieval, trainer
from tests.messages import missing_facts

BANK_ITEMS, QUERIES = 41, 25


def part(data: TensorDataset, count: int) -> TensorDataset:
    return TensorDataset(*(tensor[:count] for tensor in data.tensors))


class Named(Dataset[Any]):
    """Points with labels and the name of each item."""

    def __init__(self, seed: int, count: int) -> None:
        self.points, self.labels = part(items(per_class=8, seed=seed), count).tensors
        self.name = f"set {seed}"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, str]:
        return self.points[index], self.labels[index], f"{self.name}, {index}"


class NamedStream(IterableDataset[Any]):
    """The same items in every process."""

    def __iter__(self) -> Iterator[Any]:
        return (Named(1, BANK_ITEMS)[index] for index in range(BANK_ITEMS))


class OwnPart(list):
    """The indices of this process, and the first three for all of them."""

    def __init__(self) -> None:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        super().__init__([*range(3), *range(3 + rank, BANK_ITEMS, count)])


class Sharded(Embeds):
    """Its layers are sharded as the strategy of the Trainer says; a layer that is not sharded has the same weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Identity()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, DIM))

    def configure_model(self) -> None:
        mesh = getattr(self.trainer.strategy, "device_mesh", None)
        if mesh is None or getattr(self, "is_sharded", False):
            return
        self.is_sharded = True
        if mesh["tensor_parallel"].size() > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.encoder, mesh["tensor_parallel"], plan)
        if mesh["data_parallel"].size() > 1:
            for layer in (self.encoder[0], self.encoder[2]):
                fully_shard(layer, mesh=mesh["data_parallel"])
            fully_shard(self.encoder, mesh=mesh["data_parallel"])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"embeddings": self.encoder(batch[0]), "labels": batch[1]}


def embed(module: Any, batch: Any) -> Tensor:
    return module.encoder(batch[0])


def validate(strategy: Any, bank: Any, *, with_ids: bool = False) -> dict[str, Any]:
    """What the monitors log with a bank, and what was said."""
    source = EmbeddingSource(("embeddings", "labels"), embed=embed, labels=1, ids=2 if with_ids else None)
    monitors = (
        KnnMonitor((1, 5), bank, source=source),
        ProbeMonitor(bank, source=source),
        GeneralizationGapMonitor(bank=bank, classes=None, label_groups=2, max_share=None, source=source),
        DiscriminantRatioMonitor(source=source, every_n_steps=None),
        retrieval(source=source),
    )
    devices = torch.distributed.get_world_size()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(*monitors, strategy=strategy, devices=devices, num_nodes=1)
        run.validate(Sharded(), DataLoader(Named(2, QUERIES), batch_size=6), verbose=False)
    words = [str(warning.message) for warning in caught]
    said = [said for said in words if "NaN" in said or not missing_facts(said, ("items", "loader"))]
    logged = {key: float(value) for key, value in run.callback_metrics.items() if key != "gap/share_of_time"}
    return {"said": said} | logged


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """What this process has seen."""
    count = torch.distributed.get_world_size()
    bank = Named(1, BANK_ITEMS)
    in_tens = DataLoader(bank, batch_size=10)
    seen = {"ddp": validate("ddp", in_tens)}
    if count == 1:
        return seen
    seen["shuffled"] = validate("ddp", DataLoader(bank, batch_size=7, shuffle=True))
    seen["own part"] = validate("ddp", DataLoader(bank, batch_size=4, sampler=OwnPart()))
    seen["stream"] = validate("ddp", DataLoader(NamedStream(), batch_size=10), with_ids=True)
    seen["tensor parallel"] = validate(ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2), in_tens)
    seen["sharded"] = validate(ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), in_tens)
    try:
        validate("ddp", DataLoader(NamedStream(), batch_size=10))
    except ValueError as error:
        seen["stream without ids"] = str(error)
    return seen
