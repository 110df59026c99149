"""Figures of validation queries with their nearest items, in every logger."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64
from matplotlib.figure import Figure

from fewshot_callbacks.callbacks._conduct import check_at_least
from fewshot_callbacks.callbacks._loggers import Drawing
from fewshot_callbacks.callbacks._pictures import ImageReader, Images, PictureCallback, has_index
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, ItemSet, Names
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.plots.panels import Item, Neighbour, PanelRow, Scale, retrieval_panels
from fewshot_callbacks.report import ReportItems
from fewshot_callbacks.report.findings import Model, confident_mistakes, worst_queries
from fewshot_callbacks.trainer.lightning import Trainer
from fewshot_callbacks.trainer.loaders import sample_count

# (first part of the keys of a set, name of a loader)
Source = tuple[str, str]

# The most confident mistakes are searched among at most this number of queries with an irrelevant first neighbour.
SEARCHED_QUERIES = 2000
# Largest number of images that are kept per loader: 49 MB, at three bytes per pixel.
MAX_KEPT = 1000


class RetrievalPanels(PictureCallback):
    """Draws queries with their nearest items: the worst queries, the most confident mistakes, and a fixed sample.

    It needs a `RetrievalMonitor` in the same Trainer, and draws from its report and embeddings. It sends these figures
    to every logger (`docs/callbacks/loggers.md`), at the same step as the metrics. Without a logger they are files in
    `pictures/`.

    - `val/worst_queries`: the queries with the lowest average precision, at most three of a class
    - `val/confident_mistakes`: the queries whose irrelevant first neighbour has the highest score, searched among at
      most 2,000 such queries
    - `val/sample_queries`: a fixed sample, the same in every epoch, so that a logger's slider shows a query over time

    Images are read from the data set by index after the evaluation. If the data set has no index, or a sampler shuffles
    it, images of a fixed sample of at most 1,000 items are kept from the batches, and queries are chosen among them.
    Nothing is drawn in the sanity check. An error never ends the run. Your module is not changed.

    Examples:
        >>> from pathlib import Path
        >>> import torch
        >>> from fewshot_callbacks import RetrievalMonitor
        >>> from lightning.pytorch import LightningModule, Trainer
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> class Model(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.encoder = torch.nn.Identity()
        ...     def validation_step(self, batch, batch_idx):
        ...         self.encoder(batch[0])
        >>> items = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
        >>> loader = DataLoader(TensorDataset(items, torch.arange(12) // 3), batch_size=4)
        >>> panels = RetrievalPanels(worst=1, mistakes=0, sample=1, k=2, images=lambda dataset, index: f"item {index}")
        >>> callbacks = [RetrievalMonitor(source="encoder"), panels]
        >>> from tempfile import TemporaryDirectory
        >>> options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
        >>> with TemporaryDirectory() as folder:
        ...     trainer = Trainer(callbacks=callbacks, accelerator="cpu", default_root_dir=folder, **options)
        ...     _ = trainer.validate(Model(), loader, verbose=False)
        ...     sorted(path.name for path in Path(folder, "pictures/val").iterdir())
        ['sample_queries', 'worst_queries']

    Args:
        worst: Number of worst queries; 0 for none.
        mistakes: Number of most confident mistakes; 0 for none.
        sample: Number of queries in the fixed sample; 0 for none.
        k: Number of neighbours of each query, at least 1.
        every_n_epochs: Draw in at most one of this number of epochs, beginning with the first.
        images: A function of (data set, index) that returns an image (a tensor, an array or a Pillow image), or a text
            that is drawn instead. By default the first part of a sample, or its entry `image`, `images`, `img`,
            `pixel_values` or `text`. For a data set without an index, a function of (batch, place in the batch).
        mean: Mean of the images' normalisation, which is undone for the figures: one value, or one for each channel.
        std: Standard deviation of that normalisation, in the same form.
        names: Names of the classes: a mapping from labels, or a list for the labels 0, 1, 2, ... By default the data
            set's attribute `classes`, or the labels themselves.
        max_share: Skip epochs until all pictures and reports together have taken at most this fraction of the run time,
            in (0, 1). The first second never counts. None skips no epoch. `pictures/share_of_time` logs the fraction.
        prefix: Draw only the sets whose keys begin with this prefix: `val`, `test`, or `val/t2i` for a
            `RetrievalMonitor` with a name. By default all sets.

    Raises:
        ValueError: If a setting is out of range.
    """

    def __init__(
        self,
        worst: int = 8,
        mistakes: int = 8,
        sample: int = 8,
        k: int = 5,
        *,
        every_n_epochs: int = 1,
        images: Images | None = None,
        mean: Scale | None = None,
        std: Scale | None = None,
        names: Names | None = None,
        max_share: float | None = 0.05,
        prefix: str | None = None,
    ) -> None:
        super().__init__(every_n_epochs, max_share, prefix, names, ImageReader(images, mean, std))
        check_at_least(0, "RetrievalPanels", worst=worst, mistakes=mistakes, sample=sample)
        check_at_least(1, "RetrievalPanels", k=k)
        self.worst = worst
        self.mistakes = mistakes
        self.sample = sample
        self.k = k
        # images that this process has kept from the batches of this validation
        self._kept: dict[Source, KeptImages] = {}
        # position -> image, from all processes; only on the first process, for loaders without an index
        self._gathered: dict[Source, dict[int, Any]] = {}
        # item -> why its image could not be read, since the last figure
        self._failures: dict[str, Exception] = {}

    # ---------------------------------------------------------------------------------------------------------- collecting

    def see_batch(self, prefix: str, source: str, loader: Any, positions: range, batch: Any) -> None:
        """Keep images of a batch that belong to the sample, if the data set has no index."""
        fact = (
            "Images of a batch could not be kept, and are not shown. The items of this loader have no index, so pass as "
            "images a function of (batch, place in the batch)"
        )
        with self._policy.going_on("kept", fact):
            if (prefix, source) not in self._kept:
                self._kept[prefix, source] = KeptImages(loader, self._reader)
            self._kept[prefix, source].see_batch(positions, batch)

    def _gather_kept(self) -> None:
        images = {source: kept.images for source, kept in self._kept.items() if not kept.has_index}
        by_rank = all_processes().to_first(images)
        for images_of_rank in by_rank or ():
            for source, images_of_source in images_of_rank.items():
                self._gathered.setdefault(source, {}).update(images_of_source)

    def _clear(self) -> None:
        super()._clear()
        self._kept = {}
        self._gathered = {}

    # ------------------------------------------------------------------------------------------------------------- drawing

    def _picture(self, evaluated: EvaluatedSet, items: ItemSet) -> Callable[[int], Any] | None:
        """Return a function of the index of an item that returns its image."""
        kept = self._gathered.get((evaluated.prefix, items.source))
        positions = items.positions.tolist()
        read = super()._picture(evaluated, items) if kept is None else lambda index: kept.get(positions[index])

        def read_or_note(index: int) -> np.ndarray | str | None:
            try:
                image = None if read is None else read(index)
            except Exception as error:  # an unreadable image must not affect others
                self._failures[f"item {positions[index]} of {items.source}"] = error
                return None
            if isinstance(image, np.ndarray) and image.dtype == np.uint8:
                # an image from a batch, see `ImageReader.of_batch`
                return image.astype(np.float32) / 255
            return image

        return read_or_note

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Return name -> figure. Queries are chosen now; figures are drawn when a logger needs them."""
        model = self._model(evaluated)
        report = evaluated.report
        positions = evaluated.queries.positions.numpy()
        chosen, titles = self._choose_queries(model, evaluated)
        # The report has a row per evaluated query: with `max_queries` only a sample of the items.
        row_of_query = {query: row for row, query in enumerate(_evaluated_queries(report, len(positions)).tolist())}

        @functools.cache
        def panel_item(items: ReportItems, index: int) -> Item:
            picture = None if items.picture is None else items.picture(index)
            return Item(picture, items.label(items.labels[index]))

        def draw(name: str) -> Figure:
            retrieved = model.retrieved(model.nearest(chosen[name], self.k))
            rows = []
            for query, neighbours in zip(chosen[name], retrieved, strict=True):
                panels = [
                    Neighbour(panel_item(model.searched, index), score, is_hit, is_tied)
                    for index, score, is_hit, is_tied in neighbours
                ]
                text = f"item {int(positions[query]):,}, {caption(report, row_of_query[query])}"
                rows.append(PanelRow(panel_item(model.queries, query), panels, text))
            self._warn_of_unreadable_images()
            return retrieval_panels(rows, f"{evaluated.title}: {titles[name]}")

        return {evaluated.key(name): functools.partial(draw, name) for name, queries in chosen.items() if queries}

    def _choose_queries(self, model: Model, evaluated: EvaluatedSet) -> tuple[dict[str, list[int]], dict[str, str]]:
        """Return name of a figure -> indices of its queries, and name of a figure -> title."""
        report = evaluated.report
        queries = _evaluated_queries(report, len(evaluated.queries.positions))
        positions = evaluated.queries.positions.numpy()[queries]
        kept = self._gathered.get((evaluated.prefix, evaluated.queries.source))
        has_image = np.ones(len(queries), dtype=bool) if kept is None else np.isin(positions, list(kept))
        # A random order, the same in every epoch.
        order = mixed(positions).argsort()
        order = order[has_image[order]]
        is_imperfect = report.per_query["mrr"].numpy()[order] < 1
        searched = queries[order[is_imperfect][:SEARCHED_QUERIES]]
        chosen = {
            "worst_queries": queries[worst_queries(report, self.worst, has_image)].tolist(),
            "confident_mistakes": confident_mistakes(model, searched, self.mistakes),
            "sample_queries": queries[order[: self.sample]].tolist(),
        }
        limit = "" if kept is None else " whose images were kept"
        titles = {
            "worst_queries": f"lowest average precision of {has_image.sum():,} queries{limit}",
            "confident_mistakes": f"wrong first neighbours with the highest scores{limit}",
            "sample_queries": f"{len(chosen['sample_queries'])} queries, the same in every epoch",
        }
        return chosen, titles

    def _warn_of_unreadable_images(self) -> None:
        """Warn of images of this figure that could not be read."""
        if not self._failures:
            return
        (item, error), *others = self._failures.items()
        remedy = "The run continues without it."
        if others:
            remedy = f"{len(others)} more images could not be read, such as {others[0][0]}."
        with self._policy.going_on("image", f"the image of {item} could not be read", remedy):
            raise error
        self._failures = {}


def _evaluated_queries(report: RetrievalReport, items: int) -> Int[np.ndarray, "queries"]:
    """Return the indices of the evaluated queries: all items, or a sample."""
    return np.arange(items) if report.drawn is None else report.drawn.numpy()


def caption(report: RetrievalReport, row: int) -> str:
    """Return the average precision and the first rank of the query in a row of a report, in words."""
    precision = float(report.per_query["mAP"][row])
    if math.isnan(precision):
        return "no relevant item"
    first_rank = 1 / float(report.per_query["mrr"][row])
    # A mean over the orders of ties is not a whole number.
    is_whole = abs(first_rank - round(first_rank)) < 1e-6 * first_rank
    about = "" if is_whole else "about "
    return f"AP {precision:.3f}, first hit at rank {about}{round(first_rank):,}"


def mixed(positions: Int[np.ndarray, "items"]) -> UInt64[np.ndarray, "items"]:
    """Return a hash of each position. The items with the lowest hashes are a sample that is the same wherever it is drawn.

    The number of items need not be known, and the sample changes little when items are added. The hash is
    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).

    Examples:
        >>> hashes = mixed(np.arange(1000))
        >>> hashes.argsort()[:3]
        array([410, 821, 366])
    """
    # The hash is modulo 2^64, so it overflows. Without the added 1 the hash of 0 is 0, and the first item is always in the
    # sample.
    with np.errstate(over="ignore"):
        value = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class KeptImages:
    """Keeps the images of a sample of a loader's items, if its data set has no index.

    Args:
        loader: The loader.
        reader: Reads images from a batch.
    """

    def __init__(self, loader: Any, reader: ImageReader) -> None:
        self.loader = loader
        self.reader = reader
        # whether images are read from the data set; then none are kept
        self.has_index = has_index(loader)
        # position of an item in the pass of all processes over the data -> its image or text
        self.images: dict[int, np.ndarray | str] = {}
        self._batches = 0

    def see_batch(self, positions: range, batch: Any) -> None:
        """Keep the images of a batch that belong to the sample, if there is no index.

        Args:
            positions: Index of each embedding of the batch in this process's pass over the loader.
            batch: What the step was called with.
        """
        self._batches += 1
        if self.has_index and positions.stop == sample_count(self.loader, self._batches):
            return
        # If the numbers differ, an item has several embeddings, or a sample has several items.
        self.has_index = False
        processes = all_processes()
        # A DistributedSampler deals items to the processes in turn.
        batch_positions = np.asarray(positions) * processes.count + processes.rank
        candidates = np.array([*self.images, *batch_positions])
        sample = set(candidates[mixed(candidates).argsort()[:MAX_KEPT]].tolist())
        for place, position in enumerate(batch_positions.tolist()):
            if position in sample:
                self.images[position] = self.reader.of_batch(batch, place)
        self.images = {position: image for position, image in self.images.items() if position in sample}
