"""Pictures of validation queries and of the items retrieved for them, in every logger."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from lightning.pytorch import Trainer
from matplotlib.figure import Figure

from fewshot_callbacks.callbacks._item_images import ImageReader, Images, KeptImages, mixed
from fewshot_callbacks.callbacks._loggers import Drawing
from fewshot_callbacks.callbacks._pictures import PictureCallback
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, ItemSet, Label, Names
from fewshot_callbacks.distributed.torch_distributed import all_processes
from fewshot_callbacks.functional.neighbours import Neighbours
from fewshot_callbacks.plots.panels import Item, Neighbour, PanelRow, retrieval_panels
from fewshot_callbacks.plots.pictures import Scale

# Indices of some of the queries that may be shown.
Chosen = Int[np.ndarray, "chosen"]

# First part of the keys of a set, and the name of a loader.
Source = tuple[str, str]

# Queries with an irrelevant first neighbour among which the most confident mistakes are found, at most.
SEARCHED = 2000


class RetrievalPanels(PictureCallback):
    """Draws queries with their first neighbours: the worst, the most confident mistakes, and a fixed sample.

    After each evaluation of a `RetrievalMonitor`, whose report and embeddings it uses, it sends these figures to every
    logger of the Trainer (`docs/loggers.md`), at the same step as the metrics:

    - `val/worst_queries`: the queries with the lowest average precision;
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
            which is drawn as text; by default the first part of a sample, or its entry `image`, `img`, `pixel_values`
            or `text`. For data sets without an index it is a function of (batch, place in the batch).
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
        super().__init__(every_n_epochs, max_share, prefix)
        for name, value, least in (("worst", worst, 0), ("mistakes", mistakes, 0), ("sample", sample, 0), ("k", k, 1)):
            if value < least:
                raise ValueError(f"RetrievalPanels({name}={value}) must be at least {least}.")
        self.worst, self.mistakes, self.sample, self.k, self.names = worst, mistakes, sample, k, names
        self._reader = ImageReader(images, mean, std)
        self._kept: dict[Source, KeptImages] = {}
        self._shared: dict[Source, dict[int, Any]] = {}
        self._failures: dict[str, Exception] = {}

    # ---------------------------------------------------------------------------------------------------------- collecting

    def see_batch(self, prefix: str, source: str, loader: Any, positions: range, batch: Any) -> None:
        """Keep some images of a batch, if the data set has no index."""
        try:
            self._kept.setdefault((prefix, source), KeptImages(loader, self._reader)).see_batch(positions, batch)
        except Exception as error:  # a picture must not end a training
            self._warn_of(error, "Images of a batch could not be kept, and are not shown")

    def _share_kept(self) -> None:
        mine = {source: each.kept for source, each in self._kept.items() if not each.has_index}
        for part in all_processes().to_first(mine) or ():
            for source, kept in part.items():
                self._shared.setdefault(source, {}).update(kept)

    def _forget(self) -> None:
        super()._forget()
        self._kept, self._shared = {}, {}

    # ------------------------------------------------------------------------------------------------------------- drawing

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Choose the queries and find their neighbours; the figures are drawn when a logger wants them."""
        prefix, queries = evaluated.prefix, evaluated.queries
        answers = Answers.of(evaluated, self._shared.get((prefix, queries.source)))
        chosen = {
            "worst_queries": answers.worst(self.worst),
            "confident_mistakes": answers.mistakes(evaluated, self.mistakes),
            "sample_queries": answers.sample(self.sample),
        }
        limit = " whose images were kept" if (prefix, queries.source) in self._shared else ""
        titles = {
            "worst_queries": f"least average precision of {len(answers.places):,} queries{limit}",
            "confident_mistakes": f"wrong first neighbours of the highest scores{limit}",
            "sample_queries": f"{len(chosen['sample_queries'])} queries, the same in every epoch",
        }

        @functools.cache
        def show(items: ItemSet, place: int) -> Item:
            return self._item(items, place, self._shared.get((prefix, items.source)))

        def drawing(name: str) -> Figure:
            places = answers.places[chosen[name]]
            found = evaluated.nearest(places, self.k)
            rows = [
                PanelRow(
                    show(queries, place),
                    [
                        Neighbour(show(evaluated.searched, other), score, relevant, tied)
                        for other, score, relevant, tied in listed(evaluated, found, row)
                    ],
                    f"item {int(queries.positions[place]):,}, {answers.caption(query)}",
                )
                for row, (query, place) in enumerate(zip(chosen[name].tolist(), places.tolist(), strict=True))
            ]
            self._tell_unreadable()
            return retrieval_panels(rows, f"{evaluated.where}: {titles[name]}")

        return {evaluated.key(name): functools.partial(drawing, name) for name, some in chosen.items() if len(some)}

    def _item(self, items: ItemSet, place: int, kept: Mapping[int, Any] | None) -> Item:
        """Show an item: by its index in the data set, or what was kept of it."""
        position = int(items.positions[place])
        picture: np.ndarray | str | None = None
        try:
            if kept is None:
                picture = self._reader.of_data_set(items.loader.dataset, position)
            elif (image := kept.get(position)) is not None:
                picture = image if isinstance(image, str) else image.astype(np.float32) / 255
        except Exception as error:  # one image must not take the others with it
            self._failures[f"item {position} of {items.source}"] = error
        return Item(picture, items.class_name(items.labels[place], self.names))

    def _tell_unreadable(self) -> None:
        """Warn of the images of this figure that could not be read."""
        if not self._failures:
            return
        (where, error), *more = self._failures.items()
        kind = type(error).__name__
        also = f" Nor of {len(more)} more, such as {more[0][0]}." if more else ""
        self._policy.warn(
            f"RetrievalPanels: no image of {where} ({kind}: {error}).{also} (Shown once for such errors.)",
            kind=f"image: {kind}",
        )
        self._failures = {}


@dataclass(frozen=True, eq=False)
class Answers:
    """How well the queries that may be shown were answered; others are told by their index among these."""

    # place of each among all queries of the set
    places: Int[np.ndarray, "queries"]
    # NaN for a query without a relevant item
    average_precision: Float[np.ndarray, "queries"]
    # of the first relevant item; the mean over the orders of items that tie
    reciprocal_rank: Float[np.ndarray, "queries"]
    # the order in which a sample is drawn, the same in every epoch
    order: Int[np.ndarray, "queries"]

    @classmethod
    def of(cls, evaluated: EvaluatedSet, kept: Mapping[int, Any] | None) -> Answers:
        """Read a report's values, of all queries or of those whose images were kept."""
        report, drawn = evaluated.report, evaluated.report.drawn
        positions = evaluated.queries.positions.numpy()
        places = np.arange(len(positions)) if drawn is None else drawn.numpy()
        may = np.isin(positions[places], list(kept)) if kept is not None else np.ones(len(places), dtype=bool)
        precision, reciprocal = (report.per_query[name].numpy()[may] for name in ("mAP", "mrr"))
        return cls(places[may], precision, reciprocal, mixed(positions[places[may]]).argsort())

    def worst(self, count: int) -> Chosen:
        """Choose those of the least average precision that are not perfect."""
        imperfect = np.flatnonzero(self.average_precision < 1)  # not NaN
        order: Chosen = self.average_precision[imperfect].argsort(kind="stable")
        worst: Chosen = imperfect[order[:count]]
        return worst

    def mistakes(self, evaluated: EvaluatedSet, count: int) -> Chosen:
        """Choose those whose first neighbour is irrelevant and has the highest score."""
        searched: Chosen = self.order[self.reciprocal_rank[self.order] < 1][: SEARCHED if count else 0]
        if not len(searched):
            return searched
        found = evaluated.nearest(self.places[searched], 1)
        first = [(query, *listed(evaluated, found, row)[0]) for row, query in enumerate(searched.tolist())]
        wrong = sorted((-score, query) for query, _, score, is_hit, _ in first if not is_hit)
        return np.array([query for _, query in wrong[:count]], dtype=np.int64)

    def sample(self, count: int) -> Chosen:
        """Choose the sample."""
        return self.order[:count]

    def caption(self, query: int) -> str:
        """Say how well a query was answered."""
        precision, reciprocal = float(self.average_precision[query]), float(self.reciprocal_rank[query])
        if math.isnan(precision):
            return "no relevant item"
        rank = 1 / reciprocal
        about = "" if abs(rank - round(rank)) < 1e-6 * rank else "about "  # a mean over the orders of ties
        return f"AP {precision:.3f}, first hit at rank {about}{round(rank):,}"


def listed(evaluated: EvaluatedSet, found: Neighbours, row: int) -> list[tuple[int, float, bool, bool]]:
    """List the neighbours of a query: place, score, whether it is relevant, whether its score is another one's, too."""
    own, labels = evaluated.queries.labels[int(found.queries[row])], evaluated.searched.labels
    indices, scores, tied = found.indices[row].tolist(), found.scores[row].tolist(), found.tied[row].tolist()
    return [
        (place, score, _is_relevant(own, labels[place]), is_tied)
        for place, score, is_tied in zip(indices, scores, tied, strict=True)
        if place >= 0
    ]


def _is_relevant(one: Label, other: Label) -> bool:
    """Decide whether an item of one label is what a query of the other asks for: of multi-label targets, any in common."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return not set(one).isdisjoint(other)
    return one == other
