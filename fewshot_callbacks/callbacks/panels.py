"""Pictures of validation queries and of the items retrieved for them, in every logger."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64
from lightning.pytorch import Trainer
from matplotlib.figure import Figure

from fewshot_callbacks.callbacks._conduct import check_at_least
from fewshot_callbacks.callbacks._loggers import Drawing
from fewshot_callbacks.callbacks._pictures import ImageReader, Images, PictureCallback, has_index
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, ItemSet, Names
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.plots.panels import Item, Neighbour, PanelRow, Scale, retrieval_panels
from fewshot_callbacks.report import Items
from fewshot_callbacks.report.findings import confident_mistakes, worst_queries
from fewshot_callbacks.trainer.loaders import sample_count

# First part of the keys of a set, and the name of a loader.
Source = tuple[str, str]

# Queries with an irrelevant first neighbour among which the most confident mistakes are found, at most.
SEARCHED = 2000
# Images that are kept of a loader: 49 MB, at three bytes for each pixel.
MOST_KEPT = 1000


class RetrievalPanels(PictureCallback):
    """Draws queries with their first neighbours: the worst, the most confident mistakes, and a fixed sample.

    After each evaluation of a `RetrievalMonitor`, whose report and embeddings it uses, it sends these figures to every
    logger of the Trainer (`docs/loggers.md`), at the same step as the metrics:

    - `val/worst_queries`: the queries with the lowest average precision, at most three of a class;
    - `val/confident_mistakes`: the queries with the highest score of an irrelevant first neighbour, searched among at
      most 2,000 such queries;
    - `val/sample_queries`: a fixed sample, the same in every epoch, so that a logger's slider shows one query through
      time.

    Images are read from the data set by index after the evaluation. If the data set has no index, or a sampler shuffles
    it, images of a fixed sample of at most 1,000 items are kept from the batches instead, and the queries are chosen
    among these. The model is not touched. Nothing is drawn in the sanity check, and an error never ends the run.

    Args:
        worst: Number of worst queries; 0 for none.
        mistakes: Number of most confident mistakes; 0 for none.
        sample: Number of queries in the fixed sample; 0 for none.
        k: Number of neighbours of each query, at least 1.
        every_n_epochs: Draw at most in one of this number of epochs, beginning with the first.
        images: A function of (data set, index) that returns an image (a tensor, an array or a Pillow image) or a text,
            which is drawn as text; by default the first part of a sample, or its entry `image`, `images`, `img`,
            `pixel_values` or `text`. For data sets without an index it is a function of (batch, place in the batch).
        mean: Mean of the images' normalisation, which is undone for the pictures: one value, or one for each channel.
        std: Standard deviation of that normalisation, in the same form.
        names: Names of the classes, as a mapping from labels or a list for labels 0, 1, 2, ...; by default the data
            set's attribute `classes`, or the labels themselves.
        max_share: Skip epochs until all pictures together have taken at most this share of the run time, in (0, 1);
            None never skips an epoch. The share is logged as `pictures/share_of_time`.
        prefix: Draw only the sets whose keys begin with this prefix: `val`, `test`, or `val/t2i` for a `RetrievalMonitor`
            with a name; by default all.

    Raises:
        ValueError: If a setting is out of range.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from fewshot_callbacks import RetrievalMonitor
        >>> callbacks = [RetrievalMonitor(), RetrievalPanels(mean=0.5, std=0.5)]
        >>> trainer = Trainer(callbacks=callbacks, logger=False, accelerator="cpu")
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
        self.worst, self.mistakes, self.sample, self.k = worst, mistakes, sample, k
        self._kept: dict[Source, KeptImages] = {}
        self._shared: dict[Source, dict[int, Any]] = {}
        self._failures: dict[str, Exception] = {}

    # ---------------------------------------------------------------------------------------------------------- collecting

    def see_batch(self, prefix: str, source: str, loader: Any, positions: range, batch: Any) -> None:
        """Keep some images of a batch, if the data set has no index."""
        fact = (
            "Images of a batch could not be kept, and are not shown. The items of this loader have no index, so that images "
            "is a function of (batch, place in the batch)"
        )
        with self._policy.going_on("kept", fact):
            self._kept.setdefault((prefix, source), KeptImages(loader, self._reader)).see_batch(positions, batch)

    def _share_kept(self) -> None:
        mine = {source: each.kept for source, each in self._kept.items() if not each.has_index}
        for part in all_processes().to_first(mine) or ():
            for source, kept in part.items():
                self._shared.setdefault(source, {}).update(kept)

    def _forget(self) -> None:
        super()._forget()
        self._kept, self._shared = {}, {}

    # ------------------------------------------------------------------------------------------------------------- drawing

    def _picture(self, evaluated: EvaluatedSet, items: ItemSet) -> Callable[[int], Any] | None:
        kept, positions = self._shared.get((evaluated.prefix, items.source)), items.positions.tolist()
        read = super()._picture(evaluated, items) if kept is None else lambda index: kept.get(positions[index])

        def shown(index: int) -> np.ndarray | str | None:
            try:
                image = None if read is None else read(index)
            except Exception as error:  # one image must not take the others with it
                self._failures[f"item {positions[index]} of {items.source}"] = error
                return None
            if isinstance(image, np.ndarray) and image.dtype == np.uint8:  # as it was kept
                return image.astype(np.float32) / 255
            return image

        return shown

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Choose the queries and find their neighbours; the figures are drawn when a logger wants them."""
        model, report, positions = self._model(evaluated), evaluated.report, evaluated.queries.positions.numpy()
        places = np.arange(len(positions)) if report.drawn is None else report.drawn.numpy()
        kept = self._shared.get((evaluated.prefix, evaluated.queries.source))
        may = np.ones(len(places), dtype=bool) if kept is None else np.isin(positions[places], list(kept))
        order = mixed(positions[places]).argsort()  # the same in every epoch
        order = order[may[order]]
        imperfect = order[report.per_query["mrr"].numpy()[order] < 1]
        chosen = {
            "worst_queries": places[worst_queries(report, self.worst, may)].tolist(),
            "confident_mistakes": confident_mistakes(model, places[imperfect[:SEARCHED]], self.mistakes),
            "sample_queries": places[order[: self.sample]].tolist(),
        }
        limit = "" if kept is None else " whose images were kept"
        titles = {
            "worst_queries": f"least average precision of {may.sum():,} queries{limit}",
            "confident_mistakes": f"wrong first neighbours of the highest scores{limit}",
            "sample_queries": f"{len(chosen['sample_queries'])} queries, the same in every epoch",
        }
        row_of = dict(zip(places.tolist(), range(len(places)), strict=True))

        @functools.cache
        def show(items: Items, place: int) -> Item:
            picture = None if items.picture is None else items.picture(place)
            return Item(picture, items.label(items.labels[place]))

        def drawing(name: str) -> Figure:
            found = model.retrieved(model.nearest(chosen[name], self.k))
            rows = [
                PanelRow(
                    show(model.queries, place),
                    [Neighbour(show(model.searched, i), score, hit, tied) for i, score, hit, tied in neighbours],
                    f"item {int(positions[place]):,}, {caption(report, row_of[place])}",
                )
                for place, neighbours in zip(chosen[name], found, strict=True)
            ]
            self._tell_unreadable()
            return retrieval_panels(rows, f"{evaluated.title}: {titles[name]}")

        return {evaluated.key(name): functools.partial(drawing, name) for name, some in chosen.items() if some}

    def _tell_unreadable(self) -> None:
        """Warn of the images of this figure that could not be read."""
        if self._failures:
            (where, error), *more = self._failures.items()
            also = f"Nor of {len(more)} more, such as {more[0][0]}." if more else "The run goes on without it."
            with self._policy.going_on("image", f"no image of {where}", also):
                raise error
            self._failures = {}


def caption(report: RetrievalReport, query: int) -> str:
    """Say how well a query was answered."""
    precision, reciprocal = (float(report.per_query[name][query]) for name in ("mAP", "mrr"))
    if math.isnan(precision):
        return "no relevant item"
    rank = 1 / reciprocal
    about = "" if abs(rank - round(rank)) < 1e-6 * rank else "about "  # a mean over the orders of ties
    return f"AP {precision:.3f}, first hit at rank {about}{round(rank):,}"


def mixed(positions: Int[np.ndarray, "items"]) -> UInt64[np.ndarray, "items"]:
    """Hash positions: the items of the least hashes are a sample that is the same wherever and whenever it is drawn.

    The number of items need not be known, and the sample changes little when items are added. The hash is
    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).

    Examples:
        >>> hashes = mixed(np.arange(1000))
        >>> hashes.argsort()[:3]
        array([410, 821, 366])
    """
    # Overflow is meant: the hash is modulo 2^64. Without the added 1 the hash of 0 were 0, and the first item always in the
    # sample.
    with np.errstate(over="ignore"):
        value = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class KeptImages:
    """The images of a sample of one loader's items, where its data set has no index.

    Args:
        loader: The loader.
        reader: Reads them.
    """

    def __init__(self, loader: Any, reader: ImageReader) -> None:
        self.loader, self.reader = loader, reader
        self.has_index = has_index(loader)
        # position of an item in the pass of all processes -> what is drawn of it
        self.kept: dict[int, np.ndarray | str] = {}
        self._batches = 0

    def see_batch(self, positions: range, batch: Any) -> None:
        """Keep the images of a batch that belong to the sample, if there is no index.

        Args:
            positions: Index of each embedding of the batch in this process's pass over the loader.
            batch: What the step was given.
        """
        self._batches += 1
        if self.has_index and positions.stop == sample_count(self.loader, self._batches):
            return
        self.has_index = False  # several embeddings of an item, or several items of a sample
        processes = all_processes()
        # As a DistributedSampler deals: item i goes to process i modulo their number.
        everywhere = np.asarray(positions) * processes.count + processes.rank
        every = np.array([*self.kept, *everywhere])
        stays = set(every[mixed(every).argsort()[:MOST_KEPT]].tolist())
        for place, position in enumerate(everywhere.tolist()):
            if position in stays:
                self.kept[position] = self.reader.of_batch(batch, place)
        self.kept = {position: image for position, image in self.kept.items() if position in stays}
