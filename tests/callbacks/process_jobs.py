"""Jobs of real processes (see `tests.gloo_processes`): Trainers on two or three of them, with monitors attached."""

import math
import random
import runpy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fewshot_callbacks import DEFAULT_METRICS
from fewshot_callbacks.callbacks import (
    DiscriminantRatioMonitor,
    EmbeddingHealthMonitor,
    EmbeddingSource,
    KnnMonitor,
    ProbeMonitor,
    TrainingDynamicsMonitor,
)
from fewshot_callbacks.callbacks.embedding_source import STEP_KEYS
from fewshot_callbacks.data import EpisodicBatchSampler
from tests.callbacks.fit_states import all_monitors, states_of_fit
from tests.callbacks.models import (
    TRAINING,
    Embeds,
    EveryBatch,
    EveryEpoch,
    Labelled,
    Net,
    Returns,
    Scripted,
    Stream,
    episode_items,
    expected_ratios_of_batches,
    gap_monitor,
    items,
    loader,
    multi_label_items,
    protonet,
    retrieval,
    trainer,
)
from tests.messages import missing_facts

ITEMS, QUALITY = 25, [0.0, 4.0, 0.3]

EXACT: dict[str, Any] = {"label_groups": 2, "metrics": (*DEFAULT_METRICS, "macro_mAP", "recall@precision0.5")}
"""Settings of what is compared to the last bit."""


def parallel() -> dict[str, Any]:
    """Settings of a Trainer that joins the processes that are there."""
    return {"strategy": "ddp", "devices": torch.distributed.get_world_size(), "num_nodes": 1}


def uneven() -> TensorDataset:
    """25 items: DistributedSampler repeats the first one, so that each of two processes gets 13."""
    points, labels = items().tensors
    return TensorDataset(points[:ITEMS], labels[:ITEMS])


def shorter() -> TensorDataset:
    return items(per_class=2, seed=4)


def fails_in_second(how: str, net: Returns, points: Tensor, labels: Tensor) -> Any:
    """NaN embeddings, or none at all, in the second process only."""
    outputs = {"embeddings": net(points), "labels": labels}
    if net.global_rank == 0:
        return outputs
    return None if how == "nothing" else outputs | {"embeddings": outputs["embeddings"] * math.nan}


def fails_on_rank_one(net: Net, batch: Any) -> Tensor:
    """Of the training items: validation goes well, and the other process must not wait for this one."""
    if net.global_rank == 1 and len(batch[0]) != 11 and len(batch[0]) != 2:
        raise ArithmeticError("this process has failed")
    return net.embed(batch[0])


def flagged(net: Returns, points: Tensor, labels: Tensor) -> dict[str, Any]:
    """Words for labels, and whether an item is of the gallery."""
    words = [f"class {label:+d}" for label in labels.tolist()]
    return {"embeddings": net(points), "labels": words, "gallery": points[:, 0] > 0.3}


def of_two_encoders(net: Returns, points: Tensor, labels: Tensor) -> dict[str, Any]:
    """Two embeddings of each item, and something that some items share."""
    return {"a_embeds": points, "b_embeds": points.roll(1, dims=1), "camera": (points[:, 0] > 0.3).long()}


def of_two_views(net: Returns, points: Tensor, labels: Tensor) -> dict[str, Any]:
    """Each sample gives two embeddings."""
    return {"embeddings": torch.cat([points, points + 0.1]), "labels": labels.repeat(2)}


def of_captions(net: Returns, points: Tensor, labels: Tensor, index: Tensor) -> dict[str, Any]:
    """An embedding of each image, and of each of its three captions."""
    captions = torch.cat([points.roll(step, dims=1) for step in (1, 2, 3)])
    return {
        "a_embeds": points,
        "b_embeds": captions,
        "image": index,
        "image_of_text": index.repeat(3),
        "text": torch.cat([3 * index + step for step in range(3)]),
    }


Flagged, TwoEncoders, TwoViews = (partial(Returns, step) for step in (flagged, of_two_encoders, of_two_views))
Captions = partial(Returns, of_captions)
ReturnedPoints = partial(Returns, lambda net, points, labels, *_: {"embeddings": points, "labels": labels})
"""The points are the embeddings: the same bits in batches of any size."""


class OwnSampler(list):
    """Its share of the items for each process, and the first five for all of them."""

    def __init__(self) -> None:
        rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
        super().__init__([*range(5), *range(5 + rank, ITEMS, count)])


def streamed() -> DataLoader[Any]:
    """Without a length; the items of this process, of which all but the first have none."""
    items = ITEMS if torch.distributed.get_rank() == 0 else 0
    return DataLoader(Stream(TensorDataset(*(part[:items] for part in uneven().tensors))), batch_size=6)


def exact(net: Callable[[], Net], loaders: Any, *, owns_sampler: bool = False, **settings: Any) -> dict[str, Any]:
    """What a monitor reports, to the last bit, and what was said."""
    monitor = retrieval(**EXACT, **settings)
    seen = validate(
        net, loaders, monitor, DiscriminantRatioMonitor(**settings), use_distributed_sampler=not owns_sampler
    )
    report = monitor.report
    assert report is not None
    assert report.grouped is not None
    written = str(report.decision), str(report.at_precision), report.grouped.at[1], list(report.notes)
    return {"said": seen.pop("said"), "values": report.values, "written": written, "logged": seen}


def validate(net: Callable[[], Net], loaders: Any, *monitors: Callback, **settings: Any) -> dict[str, Any]:
    """What was logged of a module with the same weights in each process, and what was said."""
    torch.manual_seed(0)
    made = trainer(*monitors, **parallel(), **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.validate(net(), loaders, verbose=False)
    words = [str(warning.message) for warning in caught]
    said = [said for said in words if "NaN" in said or not missing_facts(said, ("items", "loader"))]
    logged = {key: float(value) for key, value in made.callback_metrics.items() if key != "gap/share_of_time"}
    return {"said": said} | logged


def fit(folder: Path) -> dict[str, Any]:
    epochs, batches = EveryEpoch(), EveryBatch()
    best = ModelCheckpoint(folder / "checkpoints", monitor="val/mAP", mode="max", filename="{epoch}")
    made = trainer(retrieval(), DiscriminantRatioMonitor(), epochs, batches, best, **parallel(), max_epochs=3)
    made.fit(Scripted(QUALITY), loader(uneven()), loader(uneven()))
    best_epoch = Path(best.best_model_path).name
    return {
        "mAP": epochs.values,
        "best": best_epoch,
        "J": batches.logged,
        "by hand": expected_ratios_of_batches(batches),
    }


def dynamics(*monitors: TrainingDynamicsMonitor) -> dict[str, Any]:
    """Weights after a fit of six steps on six episodes each, and what was measured."""
    net = protonet(dropout=0.2)
    torch.manual_seed(7)
    data = episode_items()
    sampler = EpisodicBatchSampler(data.tensors[1], ways=3, shots=2, queries=3, episodes=12, seed=5)
    trainer(*monitors, **parallel()).fit(net, DataLoader(data, batch_sampler=sampler))
    weights = [parameter.detach().flatten().tolist() for parameter in net.parameters()]
    return {"weights": weights, "histories": [monitor.history.to_dict() for monitor in monitors]}


SCRIPT = """
from tests.callbacks.models import Net, items, loader, retrieval, trainer
data = items()
data.tensors[1][0] = 1
trainer(retrieval()).validate(Net(), loader(data), verbose=False)  # this line is shown
"""


def without_type_checker(folder: Path) -> dict[str, Any]:
    """What only one process sees in which nothing checks types, draws random numbers or stands in every traceback.

    The state of Python's random numbers after a fit without monitors and with all, and where a script is warned.
    """
    states = []
    for monitors in ([], all_monitors()):
        net, _ = states_of_fit(*monitors, max_epochs=1)
        states.append((random.getstate(), net.classifier.weight.tolist()))
    script = folder / "train.py"
    script.write_text(SCRIPT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(str(script), run_name="train")
    warned = [(Path(each.filename).name, each.lineno, str(each.message)) for each in caught]
    return {"states": states, "gap": monitors[2].gap is not None, "steps": len(monitors[3].history), "warned": warned}


def numbered() -> TensorDataset:
    """Each item with its index."""
    return TensorDataset(*uneven().tensors, torch.arange(ITEMS))


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """What this process has seen."""
    count = torch.distributed.get_world_size()
    seen = without_type_checker(folder) if count == 1 else {}
    own = {"loaders": DataLoader(numbered(), batch_size=4, sampler=OwnSampler()), "owns_sampler": True}

    def both(outputs: Any, batch: Any) -> Any:
        return batch[0], batch[1]

    seen["exact"] = exact(ReturnedPoints, loader(uneven()))
    by_id = EmbeddingSource(both, labels=1, ids=lambda outputs, batch: batch[2])
    seen["ids"] = exact(ReturnedPoints, **own, source=by_id)
    seen["no data"] = exact(ReturnedPoints, streamed())
    seen["two views"] = exact(TwoViews, loader(uneven()))
    if count < 3:  # two show as well as three would
        random_state = random.getstate()
        seen |= of_sets() | {"fit": fit(folder)}
        seen["random is left alone"] = random.getstate() == random_state
    if count == 2:
        everything = DataLoader(uneven(), sampler=DistributedSampler(uneven(), num_replicas=1, rank=0, shuffle=False))
        seen["all to each"] = exact(ReturnedPoints, everything, owns_sampler=True)
        seen["no ids"] = exact(ReturnedPoints, **own, source=EmbeddingSource(both, labels=1))
        seen |= failures() | {"no dynamics": dynamics()}
        file = str(folder / "training_dynamics.json")
        seen["dynamics"] = dynamics(TrainingDynamicsMonitor(every_n_steps=2, strict=True, file=file))
        from tests.callbacks import picture_process_jobs

        seen["pictures"] = picture_process_jobs.answers(folder)
    return seen


def of_sets() -> dict[str, Any]:
    """What several processes must see as one does; samples that are repeated to even them out vote and count once."""
    targets = [loader(multi_label_items(5)), loader(multi_label_items(ITEMS, seed=1))]
    gap = gap_monitor(bank=Labelled(TRAINING), classes=5, label_groups=2, items_per_class=7)
    votes = (
        KnnMonitor((1, 4, 30), Labelled(TRAINING), name="train"),
        KnnMonitor((1, 4), "self"),
        ProbeMonitor(Labelled(TRAINING)),
    )
    words = retrieval(gallery="gallery")
    both, cameras = ("a_embeds", "b_embeds"), {"source": lambda outputs, batch: batch, "groups": "camera"}
    seen = {
        "loaders": validate(Net, [loader(uneven()), loader(shorter())], retrieval(), DiscriminantRatioMonitor()),
        "gallery": validate(Net, [loader(shorter()), loader(uneven())], retrieval(gallery=1)),
        "words and flag": validate(Flagged, loader(uneven()), words, DiscriminantRatioMonitor()),
        "targets": validate(ReturnedPoints, targets, retrieval(gallery=1)),
        "compression": validate(ReturnedPoints, loader(uneven()), retrieval(dims=3, codes=("int8", "binary"))),
        **{
            name: validate(
                Captions, loader(numbered()), retrieval(source=both, labels=("image", "image_of_text"), **ids)
            )
            for name, ids in {"captions": {"ids": ("image", "text")}, "captions without ids": {}}.items()
        },
        "two encoders": validate(TwoEncoders, loader(uneven()), retrieval(source=both)),
        "groups": validate(TwoEncoders, loader(uneven()), retrieval(**cameras)),
        "votes": validate(Embeds, loader(uneven()), *votes),
        "health": validate(ReturnedPoints, loader(uneven()), EmbeddingHealthMonitor(k=10)),
        "health of a list": validate(ReturnedPoints, streamed(), EmbeddingHealthMonitor(k=10)),
        "generalization gap": validate(Embeds, loader(uneven()), gap),
    }
    assert words.report is not None
    return seen | {"names": words.report.label_names}


def failures() -> dict[str, Any]:
    """What fails in one process, or in both."""
    monitors = retrieval, DiscriminantRatioMonitor
    seen: dict[str, Any] = {
        how: validate(
            partial(Returns, partial(fails_in_second, how)),
            loader(uneven()),
            *(monitor(strict=False) for monitor in monitors),
        )
        for how in ("nan", "nothing")
    }
    failing = gap_monitor(bank=Labelled(TRAINING), source=EmbeddingSource(STEP_KEYS, embed=fails_on_rank_one))
    seen["gap fails"] = validate(Net, loader(uneven()), failing)
    points, targets = multi_label_items(5).tensors
    spoilt = loader(TensorDataset(points * math.nan, targets))
    seen["no targets"] = validate(ReturnedPoints, spoilt, retrieval())
    with pytest.raises(ValueError, match="queries") as strict:
        validate(partial(Returns, partial(fails_in_second, "nan")), loader(uneven()), retrieval(strict=True))
    made = trainer(retrieval(), **parallel(), max_epochs=1, num_sanity_val_steps=1)
    with pytest.raises(ValueError, match="embeddings") as sanity:
        made.fit(Returns(partial(fails_in_second, "nothing")), loader(uneven()), loader(uneven()))
    return seen | {"errors": (str(strict.value), str(sanity.value))}
