"""Pictures of validation queries and of the items retrieved for them, in every logger."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from lightning.pytorch import Trainer
from matplotlib.figure import Figure

from fewshot_callbacks.callbacks._chosen_queries import QueryResults
from fewshot_callbacks.callbacks._item_images import Images, ItemImages, ItemReader, first_part, mixed
from fewshot_callbacks.callbacks._loggers import Drawing
from fewshot_callbacks.callbacks._panel_rows import Answers, Shown
from fewshot_callbacks.callbacks._pictures import Names, PictureCallback, class_name
from fewshot_callbacks.callbacks._retrieved import positions_of
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, ItemSet
from fewshot_callbacks.distributed.processes import Processes
from fewshot_callbacks.functional.retrieval import RetrievalReport
from fewshot_callbacks.plots.panels import Item, retrieval_panels
from fewshot_callbacks.plots.pictures import Scale

# Queries with an irrelevant first neighbour among which the most confident mistakes are found, at most.
SEARCHED = 2000


class RetrievalPanels(PictureCallback):
    """Draws queries with their first neighbours: the worst, the most confident mistakes, and a fixed sample.

    After each evaluation of a `RetrievalMonitor`, whose report and embeddings it uses, it sends these figures to every
    logger of the Trainer (`docs/loggers.md`), at the same step as the metrics:

    - `val/worst_queries`: the queries with the lowest average precision;
    - `val/confident_mistakes`: the queries with the highest score of an irrelevant first neighbour, searched among at
      most 2,000 such queries;
    - `val/sample_queries`: a seeded sample, the same in every epoch, so that a logger's slider shows one query through
      time.

    Images are read from the data set by index after the evaluation. If the data set has no index, or a sampler shuffles
    it, images of a seeded sample of at most 1,000 items are kept from the batches instead, and the queries are chosen
    among these. The model is not touched. Nothing is drawn in the sanity check, and an error never ends the run.

    Args:
        worst: Number of worst queries; 0 for none.
        mistakes: Number of most confident mistakes; 0 for none.
        sample: Number of queries in the fixed sample; 0 for none.
        k: Number of neighbours of each query, at least 1.
        every_n_epochs: Draw at most once in this number of epochs, beginning with the first.
        images: A function of (data set, index) that returns an image (a tensor, an array or a Pillow image) or a text,
            which is drawn as text; by default the first part of a sample, or its entry `image`, `img`, `pixel_values`
            or `text`.
        batch_images: For data sets without an index, a function of a batch that returns its images or texts.
        mean: Mean of the images' normalisation, which is undone for the pictures: one value, or one for each channel.
        std: Standard deviation of that normalisation, in the same form.
        names: Names of the classes, as a mapping from labels or a list for labels 0, 1, 2, ...; by default the data
            set's attribute `classes`, or the labels themselves.
        seed: Seed of the samples.
        kept_mb: Bound on the memory of the images that are kept if there is no index, in MB.
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
        batch_images: Callable[[Any], Any] | None = None,
        mean: Scale | None = None,
        std: Scale | None = None,
        names: Names | None = None,
        seed: int = 0,
        kept_mb: float = 64,
        max_share: float | None = 0.05,
        prefix: str | None = None,
    ) -> None:
        super().__init__(every_n_epochs, max_share, prefix)
        for name, value, least in (("worst", worst, 0), ("mistakes", mistakes, 0), ("sample", sample, 0), ("k", k, 1)):
            if value < least:
                raise ValueError(f"RetrievalPanels({name}={value}) must be at least {least}.")
        self.worst, self.mistakes, self.sample, self.k = worst, mistakes, sample, k
        self.names, self.seed, self.kept_mb = names, seed, kept_mb
        self._reader = ItemReader(images, mean, std)
        self._images_of = first_part if batch_images is None else batch_images
        self._items: dict[tuple[str, int], ItemImages] = {}

    # ---------------------------------------------------------------------------------------------------------- collecting

    def see_batch(self, prefix: str, loader: int, positions: range, batch: Any) -> None:
        """Keep some images of a batch, if the data set has no index."""
        try:
            if (prefix, loader) not in self._items:
                self._items[prefix, loader] = ItemImages(list(self._loaders.values())[loader], self.seed, self.kept_mb)
            self._items[prefix, loader].see_batch(positions, batch, self._images_of)
        except Exception as error:  # a picture must not end a training
            self._warn_of(error, "Images of a batch could not be kept, and are not shown")

    def _end(self) -> None:
        super()._end()
        self._items = {}

    # ------------------------------------------------------------------------------------------------------------- drawing

    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet, processes: Processes) -> Mapping[str, Drawing]:
        """Choose the queries and find their neighbours; the figures are drawn when a logger wants them."""
        results, limit = self._results(evaluated, processes)
        candidates = results.mistaken(SEARCHED if self.mistakes else 0)
        chosen = {
            "worst_queries": results.worst(self.worst),
            "confident_mistakes": Answers.of(evaluated, candidates, 1, processes).mistakes(self.mistakes),
            "sample_queries": results.sample(self.sample),
        }
        answers = Answers.of(
            evaluated, sorted({place for places in chosen.values() for place in places}), self.k, processes
        )
        queries, neighbours = answers.needed()
        if evaluated.gallery is None:
            query = neighbour = self._shown(evaluated, evaluated.queries, queries | neighbours, processes)
        else:
            query = self._shown(evaluated, evaluated.queries, queries, processes)
            neighbour = self._shown(evaluated, evaluated.gallery, neighbours, processes)
        where = f"{evaluated.prefix}{evaluated.suffix}, epoch {trainer.current_epoch}"
        titles = {
            "worst_queries": f"{where}: least average precision of {len(results):,} queries{limit}",
            "confident_mistakes": f"{where}: wrong first neighbours of the highest scores{limit}",
            "sample_queries": f"{where}: {len(chosen['sample_queries'])} queries, the same in every epoch",
        }

        def drawing(name: str) -> Callable[[], Figure]:
            def draw() -> Figure:
                rows = [answers.row(place, results.caption(place), query, neighbour) for place in chosen[name]]
                self._tell_unreadable()
                return retrieval_panels(rows, titles[name])

            return draw

        return {evaluated.key(name): drawing(name) for name, places in chosen.items() if places}

    def _results(self, evaluated: EvaluatedSet, processes: Processes) -> tuple[QueryResults, str]:
        """Gather the results of the queries that may be shown, and words on what these are. Collective."""
        positions = positions_of(evaluated.queries, processes).numpy()
        drawn = evaluated.report.drawn if isinstance(evaluated.report, RetrievalReport) else None
        places = np.arange(len(positions)) if drawn is None else drawn.numpy()
        positions = positions[places]
        shown, limit = np.ones(len(places), dtype=bool), ""
        items = self._items.get((evaluated.prefix, evaluated.queries.loader))
        everywhere = processes.gather(None if items is None else (items.has_index, list(items.kept)))
        if any(part is not None and not part[0] for part in everywhere):
            shown = np.isin(positions, [position for part in everywhere if part is not None for position in part[1]])
            limit = " whose images were kept"
        per_query = evaluated.report.per_query
        return QueryResults.of(per_query, places, mixed(self.seed, positions), shown), limit

    def _shown(self, evaluated: EvaluatedSet, items: ItemSet, needed: set[int], processes: Processes) -> Shown:
        """Return a function that shows the items at these positions. Collective."""
        name, loader = self._loader_of(items)
        own = self._items.get((evaluated.prefix, items.loader))
        mine = None if own is None or own.has_index else {at: own.kept[at] for at in needed & own.kept.keys()}
        everywhere = [part for part in processes.gather(mine) if part is not None]
        kept = {position: image for part in everywhere for position, image in part.items()}

        @functools.cache
        def picture(position: int) -> np.ndarray | str | None:
            if not everywhere:
                return self._reader.from_data_set(loader, position, name)
            return self._reader.from_batch(kept[position], position, name) if position in kept else None

        return lambda position, label: Item(picture(position), class_name(label, self.names, loader))

    def _tell_unreadable(self) -> None:
        failures, self._reader.failures = self._reader.failures, []
        if failures:
            (where, error), more = failures[0], len(failures) - 1
            others = "" if not more else f" {more} other{'s' if more > 1 else ''} of this figure: "
            others += ", ".join(place for place, _ in failures[1:4]) + (", ..." if more > 3 else "") + "." * bool(more)
            self._policy.warn(
                f"{self._policy.owner}: no image of {where} ({type(error).__name__}: {error}).{others} (Shown once for such "
                "errors.)",
                kind=f"image: {type(error).__name__}",
            )
