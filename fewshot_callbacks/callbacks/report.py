"""The HTML report of every evaluated set, from a fit or a test."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from fewshot_callbacks.callbacks._failures import UsageError
from fewshot_callbacks.callbacks._item_images import Images, first_part, has_index
from fewshot_callbacks.callbacks._loggers import Drawing
from fewshot_callbacks.callbacks._pictures import Names, PictureCallback, class_name
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, ItemSet
from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.plots.pictures import Scale, to_picture
from fewshot_callbacks.report import Items, ReportSettings, write_report


class ReportWriter(PictureCallback):
    """Writes each set that a `RetrievalMonitor` has evaluated as one HTML file, as `fewshot report` does.

    The file holds the metrics, a threshold to drag, the weakest classes, failures, suspects and near duplicates; see
    docs/report.md. Pictures come from the data set, if item i of the loader is item i of it; else there are none. Several
    processes gather the embeddings, and the first one writes. Of multi-label targets, and of an evaluation with
    `max_queries`, there is no report, and a warning says so. The sanity check is left out; no error ends a run.

    Args:
        path: of the file; {epoch}, {step}, {prefix} and {suffix} (of the metrics) are filled in. A relative path begins in
            the folder of the first logger, or else in the Trainer's `default_root_dir`. Without {epoch} the file is that of
            the last evaluation.
        images: a function of (data set, index) that returns an image, or a text; by default the first part of a sample, or
            its entry `image`.
        mean: of the normalisation of images that is undone.
        std: the same, what was divided by.
        names: label -> name of the class, or the names by number; by default those that the data set has as `classes`.
        every_n_epochs: write at most once in this number of epochs, the first time included.
        max_share: skip epochs until all pictures and reports together take no more than this share of the time; None never
            skips.
        prefix: write the sets of the `RetrievalMonitor` whose keys begin with it, such as "test"; by default all.
        settings: how much a report shows.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from fewshot_callbacks import RetrievalMonitor
        >>> callbacks = [RetrievalMonitor(), ReportWriter("report-{epoch}.html")]
        >>> trainer = Trainer(callbacks=callbacks, logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "report-{prefix}{suffix}.html",
        *,
        images: Images | None = None,
        mean: Scale | None = None,
        std: Scale | None = None,
        names: Names | None = None,
        every_n_epochs: int = 1,
        max_share: float | None = 0.05,
        prefix: str | None = None,
        settings: ReportSettings | None = None,
    ) -> None:
        super().__init__(every_n_epochs, max_share, prefix)
        self.path, self.images, self.mean, self.std = os.fspath(path), images, mean, std
        self.names, self.settings = names, settings or ReportSettings()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run.

        Raises:
            UsageError: if there is no `RetrievalMonitor` to show, or the path cannot be filled in.
        """
        super().setup(trainer, pl_module, stage)
        try:
            self.path.format(epoch=0, step=0, prefix="", suffix="")
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(
                f"ReportWriter(path={self.path!r}) cannot be filled in ({type(error).__name__}: {error}). There are "
                "{epoch}, {step}, {prefix} and {suffix}."
            ) from error

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet, processes: Processes) -> Mapping[str, Drawing]:
        """Write the report; there is no figure for the loggers."""
        report = evaluated.report
        if not isinstance(report, RetrievalReport):
            raise ValueError("a report shows items with one label each, and these have several")
        names = ("items",) if evaluated.gallery is None else ("queries", "gallery")
        sets = (evaluated.queries, evaluated.gallery)
        items = [
            self._items(each, name, processes) for each, name in zip(sets, names, strict=False) if each is not None
        ]
        if processes.rank == 0:
            suffix = evaluated.suffix.replace("/", "_")
            filled = self.path.format(
                epoch=trainer.current_epoch, step=trainer.global_step, prefix=evaluated.prefix, suffix=suffix
            )
            path = Path((trainer.log_dir if trainer.loggers else None) or trainer.default_root_dir) / filled
            path.parent.mkdir(parents=True, exist_ok=True)
            where = f"{evaluated.prefix}{evaluated.suffix}, epoch {trainer.current_epoch}"
            written = write_report(path, report, *items, title=f"Report of {where}", name=where, settings=self.settings)
            rank_zero_info(f"ReportWriter: {written.path}")
        return {}

    def _items(self, items: ItemSet, name: str, processes: Processes) -> Items:
        """Gather a set of items in the order of its places. Collective."""
        shard = items.shard
        codes = shard.labels.tolist()
        labels = codes if shard.words is None else [shard.words[code] for code in codes]
        everywhere = processes.gather((shard.places, shard.embeddings, shard.positions, labels))
        order = torch.cat([places for places, *_ in everywhere]).argsort()
        embeddings = torch.cat([rows for _, rows, *_ in everywhere])[order]
        positions = torch.cat([each for *_, each, _ in everywhere])[order].tolist()
        every = [label for *_, part in everywhere for label in part]
        ordered = [every[place] for place in order.tolist()]
        _, loader = self._loader_of(items)
        named = {label: class_name(label, self.names, loader) for label in set(ordered)}
        shows = has_index(loader) and len(positions) > 0 and max(positions) < len(loader.dataset)

        def picture(index: int) -> Any:
            dataset = loader.dataset
            image = self.images(dataset, positions[index]) if self.images else first_part(dataset[positions[index]])
            return image if isinstance(image, str) else to_picture(image, self.mean, self.std)

        return Items(embeddings, ordered, name, picture if shows else None, label_names=named)
