"""Jobs of real processes (see `tests.gloo_processes`): fits and validations of sharded modules."""

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fewshot_callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingSource,
    GeneralizationGapMonitor,
    KnnMonitor,
    ProbeMonitor,
    TrainingDynamicsMonitor,
)
from tests.callbacks.bank_jobs import part
from tests.callbacks.models import CLASSES, FEATURES, SHOTS, EveryBatch, Net, episodes, items, loader, retrieval, trainer

DIM, QUERIES, BANK_ITEMS = 6, 25, 41
SOURCE = EmbeddingSource("encoder", labels=1)


class Large(Net):
    """A module whose encoder is divided as the test says; undivided, it has the same weights."""

    shots = SHOTS

    def __init__(self, divide: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Identity()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, DIM))
        self.classifier = nn.Linear(DIM, CLASSES)
        self.divide = divide

    def forward(self, points: Tensor) -> Tensor:
        return self.encoder(points)

    def configure_model(self) -> None:
        if self.divide is not None:
            divide, self.divide = self.divide, None
            divide(self)


def shard_whole(net: Large) -> None:
    mesh = net.device_mesh["data_parallel"]
    fully_shard(net.encoder, mesh=mesh)
    fully_shard(net.classifier, mesh=mesh)


def shard_layers(net: Large) -> None:
    mesh = net.device_mesh["data_parallel"]
    for layer in (net.encoder[0], net.encoder[2]):
        fully_shard(layer, mesh=mesh)
    shard_whole(net)


def tensor_parallel(last: Any) -> Any:
    def divide(net: Large) -> None:
        mesh = net.device_mesh["tensor_parallel"]
        parallelize_module(net.encoder, mesh, {"0": ColwiseParallel(), "2": last} if isinstance(last, RowwiseParallel) else {"2": last})
    return divide


SHARDED = {"sharded whole": shard_whole, "sharded layers": shard_layers}
PARALLEL = {
    "tensor parallel": tensor_parallel(RowwiseParallel()),
    "tensor parallel, DTensor": tensor_parallel(ColwiseParallel(use_local_output=False)),
    "tensor parallel, part": tensor_parallel(ColwiseParallel()),
}


def strategy(name: str) -> Any:
    if name in SHARDED:
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if name in PARALLEL:
        return ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
    return "ddp"


def run_of(name: str, *callbacks: Any, **settings: Any) -> Any:
    settings = {"strategy": strategy(name), "devices": torch.distributed.get_world_size(), "num_nodes": 1} | settings
    return trainer(*callbacks, **settings)


def monitors() -> list[Any]:
    bank = part(items(per_class=8, seed=1), BANK_ITEMS)
    embed = EmbeddingSource("encoder", labels=1)
    return [
        retrieval(source=embed),
        DiscriminantRatioMonitor(source=embed),
        EmbeddingHealthMonitor(source=embed, every_n_steps=1, k=2),
        KnnMonitor((1, 5), bank, source=embed),
        ProbeMonitor(bank, source=embed),
        GeneralizationGapMonitor(bank=bank, classes=None, label_groups=2, max_share=None, source=embed),
    ]


def logged(run: Any) -> dict[str, float]:
    return {key: float(value) for key, value in run.callback_metrics.items() if key != "gap/share_of_time"}


def validate(name: str) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = run_of(name, *monitors())
        net = Large((SHARDED | PARALLEL).get(name))
        try:
            run.validate(net, loader(part(items(per_class=8, seed=2), QUERIES), batch_size=6), verbose=False)
        except Exception as error:
            import traceback
            return {"error": f"{type(error).__name__}: {error}", "tb": traceback.format_exc()}
    return {"said": [str(w.message) for w in caught]} | logged(run)


def weights(net: Any) -> dict[str, Tensor]:
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in net.named_parameters()}


def fit(name: str, *callbacks: Any, data: Any = None) -> dict[str, Any]:
    torch.manual_seed(5)
    batches = EveryBatch()
    run = run_of(name, *callbacks, batches, max_epochs=2, val_check_interval=2, num_sanity_val_steps=1)
    net = Large((SHARDED | PARALLEL).get(name))
    data = loader(items(per_class=8, seed=1), batch_size=12) if data is None else data
    run.fit(net, data, loader(part(items(per_class=8, seed=2), QUERIES), batch_size=6))
    return {"weights": weights(net), "logged": logged(run), "losses": [float(b["loss"]) for b in batches.outputs], "J": batches.logged}


def of_protonet(name: str) -> Any:
    from fewshot_callbacks import EmbeddingModule, SoftAveragePrecisionLoss
    from fewshot_callbacks.data import EpisodicBatchSampler, ClassBalancedBatchSampler
    from torch.utils.data import DataLoader
    from fewshot_callbacks.protonet import ProtoNet
    out = {}
    for kind in ("proto", "embedding", "pieces"):
        torch.manual_seed(1)
        backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, DIM))
        base = ProtoNet if kind == "proto" else EmbeddingModule
        class Divided(base):
            def configure_model(self):
                divide = (SHARDED | PARALLEL).get(name)
                if divide is not None and not getattr(self, "done", False):
                    self.done = True
                    class N: encoder = self.backbone; classifier = nn.Linear(2, 2); device_mesh = self.device_mesh
                    divide(N)
        opt = lambda p: torch.optim.SGD(p, lr=0.1)
        if kind == "proto":
            from fewshot_callbacks.data import EpisodicBatchSampler
            net = Divided(backbone, shots=SHOTS, learning_rate=0.02, evaluation={"ways": 3, "shots": 1, "queries": 2, "episodes": 50})
            data = episodes(4)
        else:
            net = Divided(backbone, SoftAveragePrecisionLoss(), micro_batch=3 if kind == "pieces" else None, optimizer=opt)
            d = items(per_class=8, seed=1)
            data = DataLoader(d, batch_sampler=ClassBalancedBatchSampler(d.tensors[1], classes_per_batch=4, items_per_class=3))
        run = run_of(name, max_epochs=2)
        try:
            run.fit(net, data, loader(part(items(per_class=8, seed=2), QUERIES), batch_size=6))
        except Exception:
            import traceback
            out[kind] = traceback.format_exc(); continue
        out[kind] = weights(net), logged(run)
    return out


def answers(rank: int, folder: Path) -> dict[str, Any]:
    count = torch.distributed.get_world_size()
    if count == 1:
        return {"ddp": validate("ddp"), "proto": of_protonet("ddp")}
    seen = {name: {"validate": validate(name)} for name in ("ddp", *SHARDED, *PARALLEL)}
    for name in ("ddp", *SHARDED, "tensor parallel"):
        seen[name]["plain"] = fit(name)
        seen[name]["proto"] = of_protonet(name)
        try:
            seen[name]["monitors"] = fit(name, *monitors())
            dynamics = TrainingDynamicsMonitor(every_n_steps=1, file=None, source=EmbeddingSource(embed="encoder", labels=1))
            seen[name]["dynamics"] = fit(name, dynamics)
            seen[name]["history"] = dynamics.history.to_dict()
        except Exception as error:
            import traceback
            seen[name]["error"] = traceback.format_exc()
    return seen
