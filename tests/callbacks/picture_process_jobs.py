"""Jobs of `process_jobs` with pictures in two processes: the figures of a set that is split over the processes."""

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.callbacks import panels
from tests.callbacks.models import loader, multi_label_items, retrieval, trainer
from tests.callbacks.panel_rows import IdentityNet, PanelRecorder, indexed_panels
from tests.callbacks.process_jobs import ITEMS, OwnSampler, parallel, shorter, uneven


class Words(IdentityNet):
    """Returns words for labels, and other ones in each process."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx) | {"labels": [f"kind {n}" for n in batch[1].tolist()]}


def by_index_or_value(holder: Any, place: int) -> str:
    """Show an item of a data set as its index, one of a batch as its first value."""
    return str(float(holder[0][place][0])) if isinstance(holder, list) else str(place)


def drawn_of(net: Any, loaders: Any, *, fails: bool = False, **settings: Any) -> dict[str, Any]:
    """Return the figures and messages of this process."""
    callback = indexed_panels(worst=4, mistakes=4, sample=4, k=3, images=by_index_or_value)
    if fails and torch.distributed.get_rank() == 1:
        callback._gather_kept = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    own = "ids" in settings
    with (
        mock.patch.object(panels, "retrieval_panels", PanelRecorder()) as seen,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        made = trainer(retrieval(**settings), callback, **parallel(), use_distributed_sampler=not own)
        made.validate(net, loaders, verbose=False)
    said = [str(each.message) for each in caught if "Panels" in str(each.message)]
    return {"figures": seen.figures, "said": said, "mAP": float(made.callback_metrics["val/mAP"])}


class WithIds(IdentityNet):
    """Takes batches of points, labels and ids."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch[:2], batch_idx) | {"id": batch[2]}


def answers(folder: Path) -> dict[str, Any]:
    """What this process has drawn."""
    own_folder = folder / f"pictures {torch.distributed.get_rank()}"
    own_folder.mkdir()
    os.chdir(own_folder)
    numbered = TensorDataset(*uneven().tensors, torch.arange(ITEMS))
    own = DataLoader(numbered, batch_size=4, sampler=OwnSampler())
    return {
        "words": drawn_of(Words(), loader(uneven())),
        "gallery": drawn_of(IdentityNet(), [loader(shorter()), loader(uneven())], gallery=1),
        "targets": drawn_of(IdentityNet(), loader(multi_label_items(ITEMS))),
        "own sampler": drawn_of(WithIds(), own, ids="id"),
        "fails": drawn_of(IdentityNet(), loader(uneven()), fails=True),
    }
