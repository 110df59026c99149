"""What `gloo_jobs` does with pictures in two processes: what is drawn of a set of which each holds a part."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from fewshot_callbacks.callbacks import EmbeddingMap, ReportWriter, embedding_map, panels
from fewshot_callbacks.report import ReportSettings
from tests.callbacks.gloo_jobs import ITEMS, OwnSampler, parallel, shorter, uneven
from tests.callbacks.models import loader, retrieval, tagged, trainer
from tests.callbacks.pictured import AsGiven, Drawn, told


class Words(AsGiven):
    """Returns words for labels, and other ones in each process."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch, batch_idx) | {"labels": [f"kind {n}" for n in batch[1].tolist()]}


def by_index_or_value(holder: Any, place: int) -> str:
    """Show an item of a data set as its index, one of a batch as its first value."""
    return str(float(holder[0][place][0])) if isinstance(holder, list) else str(place)


def drawn_of(net: Any, loaders: Any, *, fails: bool = False, **settings: Any) -> dict[str, Any]:
    """What this process draws, and what it says."""
    seen, panels_drawn = Drawn(), panels.retrieval_panels
    callback = told(worst=4, mistakes=4, sample=4, k=3, images=by_index_or_value)
    if fails and torch.distributed.get_rank() == 1:
        callback._share_kept = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    panels.retrieval_panels = seen
    owns = settings.pop("owns_sampler", False)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = trainer(retrieval(**settings), callback, **parallel(), use_distributed_sampler=not owns)
            made.validate(net, loaders, verbose=False)
    finally:
        panels.retrieval_panels = panels_drawn
    said = [str(each.message) for each in caught if "Panels" in str(each.message)]
    return {"figures": seen.figures, "said": said, "mAP": float(made.callback_metrics["val/mAP"])}


def map_of(net: Any, loaders: Any) -> list[Any]:
    """The items of the map that this process draws."""
    seen: list[Any] = []
    drawn = embedding_map.embedding_map
    embedding_map.embedding_map = lambda found, title: seen.append(found) or drawn(found, title=title)  # type: ignore[func-returns-value]
    try:
        trainer(retrieval(), EmbeddingMap(3, 2), **parallel()).validate(net, loaders, verbose=False)
    finally:
        embedding_map.embedding_map = drawn
    return [(each.ids.tolist(), each.labels.tolist(), abs(each.points).tolist()) for each in seen]


def report_of(net: Any, loaders: Any) -> dict[str, Any]:
    """What the report holds that both processes write together."""
    monitor = retrieval()
    writer = ReportWriter(Path.cwd().parent / "together.html", settings=ReportSettings(worst=4, searchable=ITEMS))
    trainer(monitor, writer, **parallel()).validate(net, loaders, verbose=False)
    torch.distributed.barrier()
    html = (Path.cwd().parent / "together.html").read_text(encoding="utf-8")
    data = json.loads(html.partition('id="data">')[2].partition("</script>")[0])
    return {"items": {name: label for name, (label, *_) in data["items"].items()}, "panels": data["panels"]}


def numbered() -> TensorDataset:
    return TensorDataset(*uneven().tensors, torch.arange(ITEMS))


class WithIds(AsGiven):
    """Takes batches of points, labels and ids."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return super().validation_step(batch[:2], batch_idx) | {"id": batch[2]}


def answers(folder: Path) -> dict[str, Any]:
    """What this process has drawn."""
    own_folder = folder / f"pictures {torch.distributed.get_rank()}"
    own_folder.mkdir()
    os.chdir(own_folder)
    own = DataLoader(numbered(), batch_size=4, sampler=OwnSampler())
    return {
        "one set": drawn_of(AsGiven(), loader(uneven())),
        "words": drawn_of(Words(), loader(uneven())),
        "gallery": drawn_of(AsGiven(), [loader(shorter()), loader(uneven())], gallery=1),
        "targets": drawn_of(AsGiven(), loader(tagged(ITEMS))),
        "own sampler": drawn_of(WithIds(), own, ids="id", owns_sampler=True),
        "fails": drawn_of(AsGiven(), loader(uneven()), fails=True),
        "report": report_of(AsGiven(), loader(uneven())),
        "map": map_of(AsGiven(), loader(uneven())),
    }
