"""Base class of the callbacks that draw: when they draw, and how items become images. Their errors are warnings.

`on_validation_epoch_start` decides whether an epoch is drawn, by the clock of the first process. `see_set` draws only
on the first process. `_clear` drops images from the batches, at the end of the validation or after an interruption.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from fewshot_callbacks.callbacks._conduct import FailurePolicy, Schedule, UsageError, describe
from fewshot_callbacks.callbacks._loggers import Drawing, log_figures, tell_of_files
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, ItemSet, Names, Viewer
from fewshot_callbacks.callbacks.retrieval import RetrievalMonitor
from fewshot_callbacks.distributed.torch_distributed import all_processes, process_count
from fewshot_callbacks.errors import InputError
from fewshot_callbacks.plots.panels import MAX_SIDE, Scale, to_picture
from fewshot_callbacks.report import Model, ReportItems
from fewshot_callbacks.trainer.lightning import LightningModule, Trainer, is_of_class
from fewshot_callbacks.trainer.logs import log_synced_values

SHARE_KEY = "pictures/share_of_time"

# A function of (data set, index) that returns an image or a text; for data without an index, of (batch, index in it).
Images = Callable[[Any, int], Any]

# names of mapping entries with an image or a text
KEYS = ("image", "images", "img", "pixel_values", "text")

# Longer side, in pixels, of images that are kept from batches. A panel shows 70 to 130 pixels.
KEPT_SIDE = 128


def has_index(loader: Any) -> bool:
    """Return whether item i of a pass of all processes over a loader is item i of its data set."""
    dataset = getattr(loader, "dataset", None)
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    # A derived class may deal items in another order, as below.
    if batch_sampler is not None and not (type(batch_sampler) is BatchSampler and batch_sampler.sampler is sampler):
        return False
    if isinstance(sampler, DistributedSampler) and not is_of_class(sampler, "DistributedSamplerWrapper"):
        return not sampler.shuffle and sampler.num_replicas == process_count()
    return type(sampler) is SequentialSampler and process_count() == 1


def first_part(sample: Any, arguments: str = "data set, index") -> Any:
    """Return the image or text of a sample, or images of a batch: its first part, or an entry in `KEYS`."""
    if isinstance(sample, Mapping):
        for key in KEYS:
            if key in sample:
                return sample[key]
        raise InputError(
            f"{describe(sample)} has none of the entries {', '.join(map(repr, KEYS))}. Pass as images a function of "
            f"({arguments})"
        )
    has_parts = isinstance(sample, Sequence) and not isinstance(sample, str) and len(sample) > 0
    return sample[0] if has_parts else sample


class ImageReader:
    """Reads items as images in [0, 1], or as texts.

    Args:
        images: See `Images`; by default the first part of a sample, or its entry `image`.
        mean: Mean of the images' normalisation, which is undone.
    """

    def __init__(self, images: Images | None, mean: Scale | None, std: Scale | None) -> None:
        self.images = images
        self.mean = mean
        self.std = std

    def of_data_set(self, dataset: Any, index: int) -> np.ndarray | str:
        """Return the image or text of an item of a data set."""
        image = self.images(dataset, index) if self.images else first_part(dataset[index])
        return self._convert(image, MAX_SIDE)

    def of_batch(self, batch: Any, place: int) -> np.ndarray | str:
        """Return a small 8-bit image of an item in a batch, or its text."""
        if self.images:
            image = self.images(batch, place)
        else:
            images = first_part(batch, "batch, place in the batch")
            # With several views per item, all embeddings of one view come before the next view.
            image = images[place % len(images)]
        image = self._convert(image, KEPT_SIDE)
        return image if isinstance(image, str) else (255 * image).round().astype(np.uint8)

    def _convert(self, image: Any, longest_side: int) -> np.ndarray | str:
        """Return an image in [0, 1] of at most this size; a text unchanged."""
        return image if isinstance(image, str) else to_picture(image, self.mean, self.std, longest_side)


class PictureCallback(Viewer):
    """Draws figures of each set that a `RetrievalMonitor` has evaluated. Subclasses choose the figures.

    Args:
        every_n_epochs: Draw in at most one of this number of epochs, beginning with the first.
        max_share: Skip epochs until all pictures together have taken at most this fraction of the run time, in (0, 1).
            The first second never counts. None skips no epoch.
        prefix: Draw the sets whose keys begin with this prefix, such as `val` or `val/t2i`; None draws all.
        names: Names of the classes; by default the names in the data set.
        reader: Reads what is shown of an item.

    Raises:
        ValueError: If a setting is out of range.
    """

    # whether a subclass draws figures for the loggers
    _shows_in_loggers = True

    def __init__(
        self,
        every_n_epochs: int,
        max_share: float | None,
        prefix: str | None,
        names: Names | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        owner = type(self).__name__
        self.schedule = Schedule(every_n_epochs, max_share, owner)
        self.prefix = prefix
        self.names = names
        self._reader = reader or ImageReader(None, None, None)
        self._policy = FailurePolicy(owner, strict=False)
        # whether this epoch is drawn
        self._is_due = False
        # whether this callback logs the share for all
        self._logs_share = True

    # ------------------------------------------------------------------------------------ to be implemented by subclasses

    @abstractmethod
    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Return name -> figure, or a function that draws it. Runs only on the first process; random states are restored."""

    def _picture(self, evaluated: EvaluatedSet, items: ItemSet) -> Callable[[int], Any] | None:
        """Return a function of the index of an item that reads its image; None if the data set has no index."""
        positions = items.positions.tolist()
        dataset = getattr(items.loader, "dataset", None)
        if dataset is None or not has_index(items.loader) or max(positions, default=-1) >= len(dataset):
            return None
        return lambda index: self._reader.of_data_set(dataset, positions[index])

    def _gather_kept(self) -> None:
        """Gather images from the batches on the first process; by default, do nothing. *Collective*."""

    def _clear(self) -> None:
        """Drop everything that was kept for the pictures. Subclasses extend this."""
        self._is_due = False

    def _model(self, evaluated: EvaluatedSet) -> Model:
        """Return this set as a report has it, for the same findings."""

        def items_of(side: ItemSet, name: str) -> ReportItems:
            picture = self._picture(evaluated, side)
            label_names = side.class_names(self.names)
            return ReportItems(side.embeddings, side.labels, name, picture, label_names=label_names, groups=side.groups)

        gallery = None if evaluated.gallery is None else items_of(evaluated.gallery, "gallery")
        queries = items_of(evaluated.queries, "items" if gallery is None else "queries")
        return Model(evaluated.report, queries, gallery, name=evaluated.title)

    # -------------------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run: forget the previous run."""
        owner = type(self).__name__
        callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
        monitors = [callback for callback in callbacks if isinstance(callback, RetrievalMonitor)]
        if not monitors:
            raise UsageError(
                f"{owner} draws what a RetrievalMonitor has evaluated, but this Trainer has none. Add one: "
                f"Trainer(callbacks=[RetrievalMonitor(), {owner}()])."
            )
        prefixes = sorted({monitor._prefix(key_stage) for monitor in monitors for key_stage in ("val", "test")})
        if not any(_begins(prefix, self.prefix) for prefix in prefixes):
            raise UsageError(
                f"{owner}(prefix={self.prefix!r}): no RetrievalMonitor has this prefix. The prefixes are "
                f"{', '.join(map(repr, prefixes))}. Pass one of these, or leave out prefix for all."
            )
        for other in callbacks:
            is_alike = type(other) is type(self) and other is not self
            if is_alike and (_begins(self.prefix, other.prefix) or _begins(other.prefix, self.prefix)):
                raise UsageError(
                    f"Two {owner}s in one Trainer would draw figures of the same name. Give them different prefixes of "
                    f"RetrievalMonitors, such as prefix={prefixes[0]!r} and prefix={prefixes[-1]!r}."
                )
        first = next(callback for callback in callbacks if isinstance(callback, PictureCallback))
        self._logs_share = first is self
        # All callbacks share one stopwatch, because `max_share` limits their pictures together. The first one's `setup`
        # runs first, so its stopwatch is new.
        self.schedule.begin(None if first is self else first.schedule.watch)
        self._policy.begin()
        self._clear()
        drawing = [other for other in callbacks if isinstance(other, PictureCallback) and other._shows_in_loggers]
        if drawing[:1] == [self] and stage != "predict":
            tell_of_files(trainer)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide whether this epoch is drawn. Images of its batches may be needed. *Collective*."""
        self._clear()
        self._is_due = not trainer.sanity_checking and self.schedule.is_due(trainer.current_epoch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the fraction of the time that all pictures have taken."""
        if self._logs_share and not trainer.sanity_checking:
            # The largest value is logged: it belongs to the process that draws.
            log_synced_values(pl_module, {SHARE_KEY: self.schedule.watch.share})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule, stage: Any = None) -> None:
        """Drop everything that was kept for the pictures, even after an interruption."""
        self._clear()

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    on_test_end = teardown = on_validation_end
    on_exception = on_validation_end  # type: ignore[assignment] # Lightning passes the exception by its place

    # ------------------------------------------------------------------------------------------------------------- viewing

    def wants(self, prefix: str) -> bool:
        """Return whether the sets of this epoch whose keys begin with the prefix are drawn."""
        return self._is_due and _begins(prefix, self.prefix)

    def see_set(self, trainer: Trainer, key: str, evaluated: EvaluatedSet | None) -> None:
        """Draw the figures of a set and log them. An error becomes a warning, shown once. *Collective*."""
        with self.schedule.watch.running():
            figures: Mapping[str, Drawing] = {}
            with self._policy.going_on("pictures", f"No pictures of {key}"):
                # All processes raise an error of any of them, so that none waits for images of another.
                with all_processes().together():
                    self._gather_kept()
                if evaluated is not None:
                    figures = self._figures(trainer, evaluated)
            log_figures(trainer, figures, self._policy)


def _begins(key: str | None, prefix: str | None) -> bool:
    """Return whether a key begins with the parts of a prefix; True if the prefix is None."""
    return prefix is None or (key is not None and f"{key}/".startswith(f"{prefix}/"))
