"""Jobs of real processes (see `tests.gloo_processes`): monitors that share one collection of each validation."""

import itertools
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks import EmbeddingSource, KnnMonitor, Monitor, TrialList, VerificationMonitor
from tests.callbacks.models import TRAINING, Labelled, items, loader, retrieval, trainer
from tests.callbacks.process_jobs import ReturnedPoints, parallel, uneven
from tests.callbacks.silhouette import SilhouetteMonitor

TRIAL_METRICS = ("eer", "min_dcf@0.01", "tar@far0.1")


def points_of(module: Any, batch: Any) -> Tensor:
    """The points are the embeddings, the same bits in batches of any size."""
    return batch[0]


def paths(outputs: Any, batch: Any) -> list[str]:
    """The path of each item of `items()`, found by its points."""
    points = items().tensors[0]
    indices = [int((points == row).all(dim=1).nonzero()[0]) for row in batch[0]]
    return [f"folder/{index:02}.png" for index in indices]


def trials_of(count: int, folds: bool = False) -> TrialList:
    """All pairs of the first items of `items()`, whose names are those of their files."""
    labels = items().tensors[1].tolist()
    pairs = list(itertools.combinations(range(count), 2))
    names = [tuple(f"{index:02}" for index in side) for side in zip(*pairs, strict=True)]
    people = [tuple(str(labels[index]) for index in side) for side in zip(*pairs, strict=True)]
    return TrialList(
        same=tuple(labels[one] == labels[two] for one, two in pairs),
        first=people[0],
        second=people[1],
        folds=tuple(str(trial % 5) for trial in range(len(pairs))) if folds else None,
        items=(names[0], names[1]),
    )


class Fails(Monitor):
    """Fails on the first process, where alone it is called."""

    names = ("fails",)

    def measure(self, items: Any) -> Any:
        raise ArithmeticError("the first process has failed")


def monitors() -> list[Callback]:
    source = EmbeddingSource(embed=points_of, source=("embeddings", "labels"))
    return [
        retrieval(source=source),
        KnnMonitor((1, 4), Labelled(TRAINING), source=source),
        VerificationMonitor(trials_of(25), paths, metrics=TRIAL_METRICS, source=source),
        SilhouetteMonitor(source=source),
        Fails(source=source, strict=False),
    ]


def logged(callbacks: list[Callback], loaders: Any) -> dict[str, float]:
    run = trainer(*callbacks, **parallel())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.validate(ReturnedPoints(), loaders, verbose=False)
    return {key: float(value) for key, value in run.callback_metrics.items()}


def with_rounded_repeats() -> DataLoader[Any]:
    """25 items, the first five of them once more with embeddings that differ a little, and the index of each."""
    points, labels = uneven().tensors
    repeated = TensorDataset(
        torch.cat([points, points[:5] + 1e-3]), torch.cat([labels, labels[:5]]), torch.arange(30) % 25
    )
    return loader(repeated, 4)


def numbers(outputs: Any, batch: Any) -> list[str]:
    return [f"{index:02}" for index in batch[2].tolist()]


def two_loaders() -> list[DataLoader[Any]]:
    """The items of the list in two loaders, of which both have some."""
    first, second = (items(), uneven())
    return [loader(first, 7), loader(second, 5)]


def answers(rank: int, folder: Path) -> dict[str, Any]:
    """What this process has logged."""
    forwards, backwards, alone = monitors(), monitors()[::-1], {}
    for monitor in monitors():
        alone |= logged([monitor], loader(uneven()))
    seen = {
        "forwards": logged(forwards, loader(uneven())),
        "backwards": logged(backwards, loader(uneven())),
        "alone": alone,
        "again": logged(forwards, loader(uneven())),
    }
    verification = VerificationMonitor(trials_of(36), paths, metrics=TRIAL_METRICS)
    seen["two loaders"] = logged([verification], two_loaders())
    once = VerificationMonitor(trials_of(25), numbers, metrics=TRIAL_METRICS)
    logged([once], with_rounded_repeats())
    assert once.report is not None
    assert verification.report is not None
    seen["repeats"] = (dict(once.report.values), dict(once.report.thresholds))
    seen["intervals"] = str(verification.report)
    assert all(math.isnan(seen[name].pop("val/fails")) for name in ("forwards", "backwards", "alone", "again"))
    torch.distributed.barrier()
    return seen
