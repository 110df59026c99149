"""Jobs of real processes (see `tests.gloo_processes`): fits and validations of sharded and tensor-parallel modules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from fewshot_callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingModule,
    EmbeddingSource,
    GeneralizationGapMonitor,
    KnnMonitor,
    ProbeMonitor,
    SoftAveragePrecisionLoss,
    TrainingDynamicsMonitor,
)
from fewshot_callbacks.data import ClassBalancedBatchSampler
from fewshot_callbacks.functional import evaluate_retrieval
from tests.callbacks.bank_jobs import part
from tests.callbacks.models import (
    CLASSES,
    FEATURES,
    SHOTS,
    EveryBatch,
    Net,
    items,
    loader,
    protonet,
    retrieval,
    trainer,
)
from tests.messages import missing_facts

DIM = 6
TRAINING, VALIDATION = items(per_class=8, seed=1), part(items(per_class=8, seed=2), 25)
BANK = part(TRAINING, 41)


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, DIM))


def shard(net: LightningModule) -> None:
    """The outermost module has weights of its own, which FSDP2 leaves whole after a forward pass."""
    for name in ("encoder", "backbone", "classifier"):
        if hasattr(net, name):
            fully_shard(getattr(net, name), mesh=net.device_mesh["data_parallel"])


def tensor_parallel(**plan: ParallelStyle) -> Callable[[LightningModule], None]:
    def divide(net: LightningModule) -> None:
        divided = net.encoder if hasattr(net, "encoder") else net.backbone
        parallelize_module(divided, net.device_mesh["tensor_parallel"], {name[1:]: how for name, how in plan.items()})

    return divide


DIVISIONS = {
    "sharded": shard,
    "tensor parallel": tensor_parallel(_0=ColwiseParallel(), _2=RowwiseParallel()),
    "DTensor": tensor_parallel(_2=ColwiseParallel(use_local_output=False)),
    "part": tensor_parallel(_2=ColwiseParallel()),
}


class Divided:
    """A mixin: the strategy of the Trainer decides how the weights are sharded."""

    division = ""

    def configure_model(self) -> None:
        if self.division:
            DIVISIONS[self.division](self)
        self.division = ""


class Large(Divided, Net):
    shots = SHOTS

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Identity()
        self.encoder = encoder()
        self.classifier = nn.Linear(DIM, CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        return self.encoder(points)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Lightning 2.6.6 cannot resume from one file without a state of the optimiser.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class LargeEmbedding(Divided, EmbeddingModule):
    pass


class LargeProto(Divided, type(protonet())):
    pass


def run_of(name: str, *callbacks: Any, whole_file: bool = False, **settings: Any) -> Any:
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    if name not in ("ddp", "sharded"):
        sizes = {"data_parallel_size": 1, "tensor_parallel_size": 2}
    strategy = "ddp" if name == "ddp" else ModelParallelStrategy(**sizes, save_distributed_checkpoint=not whole_file)
    devices = torch.distributed.get_world_size()
    return trainer(*callbacks, strategy=strategy, devices=devices, num_nodes=1, **settings)


def divided(net: Any, name: str) -> Any:
    net.division = "" if name == "ddp" else name
    return net


def logged(run: Any) -> dict[str, float]:
    return {key: float(value) for key, value in run.callback_metrics.items() if key != "gap/share_of_time"}


def monitors() -> list[Any]:
    source = EmbeddingSource("encoder", labels=1)
    return [
        retrieval(source=source),
        DiscriminantRatioMonitor(source=source),
        EmbeddingHealthMonitor(source=source, every_n_steps=1, k=2),
        KnnMonitor((1, 5), BANK, source=source),
        ProbeMonitor(BANK, source=source),
        GeneralizationGapMonitor(bank=BANK, classes=None, label_groups=2, max_share=None, source=source),
    ]


def validate(name: str) -> dict[str, float]:
    run = run_of(name, *monitors())
    run.validate(divided(Large(), name), loader(VALIDATION, batch_size=6), verbose=False)
    return logged(run)


def refusal(name: str) -> str:
    """Return the error of a monitor for sharded embeddings."""
    try:
        run_of(name, retrieval()).validate(divided(Large(), name), loader(VALIDATION), verbose=False)
    except ValueError as error:
        return str(error)
    return ""


def weights_of(net: nn.Module) -> list[Tensor]:
    return [(w.full_tensor() if hasattr(w, "full_tensor") else w).detach().clone() for w in net.parameters()]


def fit(name: str, *callbacks: Any) -> dict[str, Any]:
    """Weights, losses and what was logged."""
    torch.manual_seed(5)
    batches, net = EveryBatch(), divided(Large(), name)
    run = run_of(name, *callbacks, batches, max_epochs=2, val_check_interval=2, num_sanity_val_steps=1)
    run.fit(net, loader(TRAINING, batch_size=12), loader(VALIDATION, batch_size=6))
    losses = [float(step["loss"]) for step in batches.outputs]
    return {"weights": weights_of(net), "losses": losses, "J": batches.logged, "logged": logged(run)}


def dynamics() -> TrainingDynamicsMonitor:
    return TrainingDynamicsMonitor(every_n_steps=1, file=None, source=EmbeddingSource(embed="encoder", labels=1))


def few_fits(name: str) -> dict[str, Any]:
    """Fits with and without the monitor that embeds before and after each step."""
    return {"plain": fit(name), "watched": fit(name, retrieval(source="encoder"), dynamics())}


def of_own_modules(name: str) -> dict[str, Any]:
    """An `EmbeddingModule` after some steps, and the accuracy of a `ProtoNet`."""
    loss = SoftAveragePrecisionLoss()
    net = divided(LargeEmbedding(encoder(), loss, optimizer=lambda w: torch.optim.SGD(w, lr=1e-3)), name)
    sampler = ClassBalancedBatchSampler(TRAINING.tensors[1], classes_per_batch=4, items_per_class=3)
    run = run_of(name, max_epochs=1)
    run.fit(net, DataLoader(TRAINING, batch_sampler=sampler))
    torch.manual_seed(0)
    evaluation = {"ways": 3, "shots": 1, "queries": 2, "episodes": 50}
    proto = divided(LargeProto(encoder(), shots=1, evaluation=evaluation), name)
    scored = run_of(name)
    scored.validate(proto, loader(VALIDATION, batch_size=6), verbose=False)
    return {"weights": weights_of(net), "loss": float(run.callback_metrics["train/loss"])} | {"proto": logged(scored)}


def functions_refuse() -> bool:
    """Whether a function refuses a DTensor, of which each process has a part."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    points, labels = VALIDATION.tensors
    embeddings = distribute_tensor(points, init_device_mesh("cpu", (2,)), [Shard(1)])
    try:
        evaluate_retrieval(embeddings, labels)
    except ValueError as error:
        return not missing_facts(str(error), ("queries", "DTensor", "queries.full_tensor()"))
    return False


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """What this process has seen."""
    if torch.distributed.get_world_size() == 1:
        return {"validate": validate("ddp"), "own": of_own_modules("ddp")}
    return {
        "validate": {name: validate(name) for name in ("sharded", "DTensor")},
        "part": refusal("part"),
        "fits": {"sharded": few_fits("sharded")},
        "own": {"tensor parallel": of_own_modules("tensor parallel")},
        "functions refuse": functions_refuse(),
    }
