"""Base of the callbacks that draw: when they draw, what a failure does (nothing), and what is shown of an item."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from fewshot_callbacks.callbacks._conduct import FailurePolicy, Schedule, UsageError
from fewshot_callbacks.callbacks._loggers import Drawing, log_figures
from fewshot_callbacks.callbacks._viewers import EvaluatedSet, ItemSet, Names, Viewer
from fewshot_callbacks.callbacks.embeddings import describe
from fewshot_callbacks.callbacks.retrieval import RetrievalMonitor
from fewshot_callbacks.distributed.torch_distributed import all_processes, process_count
from fewshot_callbacks.plots.panels import MAX_SIDE, Scale, to_picture
from fewshot_callbacks.report import Items, Model
from fewshot_callbacks.trainer.logs import log_synced_values

SHARE_KEY = "pictures/share_of_time"

# A function of (data set, index) that returns an image, or a text; for data without an index, of (batch, place in it).
Images = Callable[[Any, int], Any]

# Entries of a mapping that hold what is shown of an item.
KEYS = ("image", "images", "img", "pixel_values", "text")

# Pixels of the longer side of an image that is kept; a panel shows 70 to 130.
KEPT_SIDE = 128


def has_index(loader: Any) -> bool:
    """Decide whether item i of a pass over a loader, by all processes, is item i of its data set."""
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    batches = getattr(loader, "batch_sampler", None)
    # By its very class, as SequentialSampler below: a class derived from it may deal items in another order.
    if batches is not None and not (type(batches) is BatchSampler and batches.sampler is sampler):
        return False
    if isinstance(sampler, DistributedSampler) and not isinstance(sampler, DistributedSamplerWrapper):
        return not sampler.shuffle and sampler.num_replicas == process_count()
    return type(sampler) is SequentialSampler and process_count() == 1


def first_part(sample: Any, arguments: str = "data set, index") -> Any:
    """Find what is shown of a sample or of a batch: its first part, or one of the entries that are named `KEYS`.

    Raises:
        ValueError: If a mapping has none of them.
    """
    if isinstance(sample, Mapping):
        key = next((key for key in KEYS if key in sample), None)
        if key is None:
            raise ValueError(
                f"there is {describe(sample)}, and none of {', '.join(map(repr, KEYS))}. Pass images, a function of "
                f"({arguments})"
            )
        return sample[key]
    return sample[0] if isinstance(sample, Sequence) and not isinstance(sample, str) and len(sample) else sample


class ImageReader:
    """Turns items into what is drawn of them.

    Args:
        images: See `Images`; by default the first part of a sample, or its entry `image`.
        mean: Of the normalisation that is undone.
        std: The same, what was divided by.
    """

    def __init__(self, images: Images | None, mean: Scale | None, std: Scale | None) -> None:
        self.images, self.mean, self.std = images, mean, std

    def of_data_set(self, dataset: Any, index: int) -> np.ndarray | str:
        """Read an item of a data set: a picture, or a text."""
        return self._shown(self.images(dataset, index) if self.images else first_part(dataset[index]))

    def of_batch(self, batch: Any, place: int) -> np.ndarray | str:
        """Read an item of a batch, as small as it is kept, in a byte for each channel of a pixel."""
        if self.images:
            image = self.images(batch, place)
        else:
            images = first_part(batch, "batch, place in the batch")
            image = images[place % len(images)]  # views follow one another
        shown = self._shown(image, KEPT_SIDE)
        return shown if isinstance(shown, str) else (255 * shown).round().astype(np.uint8)

    def _shown(self, image: Any, longest: int = MAX_SIDE) -> np.ndarray | str:
        return image if isinstance(image, str) else to_picture(image, self.mean, self.std, longest)


class PictureCallback(Viewer):
    """Draws figures of each set that a `RetrievalMonitor` has evaluated; subclasses say which.

    Args:
        every_n_epochs: Draw at most in one of this number of epochs, beginning with the first.
        max_share: Skip epochs until all pictures together have taken at most this share of the run time, in (0, 1);
            None never skips an epoch.
        prefix: Draw the sets whose keys begin with it, such as `val` or `val/t2i`; None draws all.
        names: Names of the classes; by default those of the data set.
        reader: Reads what is shown of an item.

    Raises:
        ValueError: A setting is out of range.
    """

    def __init__(
        self,
        every_n_epochs: int,
        max_share: float | None,
        prefix: str | None,
        names: Names | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        owner = type(self).__name__
        self.schedule, self.prefix, self.names = Schedule(every_n_epochs, max_share, owner), prefix, names
        self._reader = reader or ImageReader(None, None, None)
        self._policy = FailurePolicy(owner, strict=False)
        self._is_due, self._logs_share = False, True

    # ------------------------------------------------------------------------------------ to be implemented by subclasses

    @abstractmethod
    def _figures(self, trainer: Trainer, evaluated: EvaluatedSet) -> Mapping[str, Drawing]:
        """Find what is drawn; return name -> a function that draws it. Runs on the first process alone.

        Random states are put back after the functions have run.
        """

    def _picture(self, evaluated: EvaluatedSet, items: ItemSet) -> Callable[[int], Any] | None:
        """Return a function that shows an item; None where item i of the loader is not that of its data set."""
        positions, dataset = items.positions.tolist(), getattr(items.loader, "dataset", None)
        if dataset is None or not has_index(items.loader) or max(positions, default=-1) >= len(dataset):
            return None
        return lambda index: self._reader.of_data_set(dataset, positions[index])

    def _share_kept(self) -> None:
        """Bring to the first process what a subclass has kept of the batches; by default nothing. Collective."""

    def _forget(self) -> None:
        """Drop what was kept for the pictures; subclasses that keep more extend it."""
        self._is_due = False

    def _model(self, evaluated: EvaluatedSet) -> Model:
        """Describe a set as a report does, so that both show the same findings."""

        def items(each: ItemSet, name: str) -> Items:
            picture, names = self._picture(evaluated, each), each.class_names(self.names)
            return Items(each.embeddings, each.labels, name, picture, label_names=names, groups=each.groups)

        gallery = None if evaluated.gallery is None else items(evaluated.gallery, "gallery")
        queries = items(evaluated.queries, "items" if gallery is None else "queries")
        return Model(evaluated.report, queries, gallery, name=evaluated.title)

    # -------------------------------------------------------------------------------------------------------------- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin a run.

        Raises:
            UsageError: If there is no `RetrievalMonitor`, none of this prefix, or another callback draws the same.
        """
        owner = type(self).__name__
        callbacks = trainer.callbacks  # type: ignore[attr-defined] # Lightning assigns it where mypy does not look
        monitors = [callback for callback in callbacks if isinstance(callback, RetrievalMonitor)]
        if not monitors:
            raise UsageError(
                f"{owner} draws what a RetrievalMonitor has evaluated, but this Trainer has none. Add one: "
                f"Trainer(callbacks=[RetrievalMonitor(), {owner}()])."
            )
        known = sorted({each._prefix(stage) for each in monitors for stage in ("val", "test")})
        if not any(_begins(prefix, self.prefix) for prefix in known):
            raise UsageError(
                f"{owner}(prefix={self.prefix!r}): no RetrievalMonitor has this prefix; there are "
                f"{', '.join(map(repr, known))}. Pass one of these, or leave out prefix for all."
            )
        alike = [other for other in callbacks if type(other) is type(self) and other is not self]
        if any(_begins(self.prefix, other.prefix) or _begins(other.prefix, self.prefix) for other in alike):
            raise UsageError(
                f"Two {owner}s in one Trainer would draw under the same names. Give them different prefixes."
            )
        first = next(callback for callback in callbacks if isinstance(callback, PictureCallback))
        self._logs_share = first is self
        # One clock for the pictures of all callbacks, since `max_share` is a share for all of them. The first one's
        # `setup` runs first, so that its clock is new.
        self.schedule.begin(None if first is self else first.schedule.watch)
        self._policy.begin()
        self._forget()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Decide whether this epoch is drawn."""
        self._forget()
        # Decided before the first batch, whose images may have to be kept.
        self._is_due = not trainer.sanity_checking and self.schedule.is_due(trainer.current_epoch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the share of the time that all pictures have taken."""
        if self._logs_share and not trainer.sanity_checking:
            log_synced_values(pl_module, {SHARE_KEY: self.schedule.watch.share})  # largest on the process that draws

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule, stage: Any = None) -> None:
        """Forget what was kept for the pictures, also when the run was stopped."""
        self._forget()

    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    on_test_end = teardown = on_validation_end
    on_exception = on_validation_end  # type: ignore[assignment] # Lightning passes the exception by its place

    # ------------------------------------------------------------------------------------------------------------- viewing

    def wants(self, prefix: str) -> bool:
        """Decide whether the sets of this epoch whose keys begin with the prefix are to be shown."""
        return self._is_due and _begins(prefix, self.prefix)

    def see_set(self, trainer: Trainer, key: str, evaluated: EvaluatedSet | None) -> None:
        """Draw the figures of a set and log them; turn an error into a warning, shown once."""
        with self.schedule.watch.running():
            figures: Mapping[str, Drawing] = {}
            with self._policy.going_on("pictures", f"No pictures of {key}"):
                # An error of one process becomes one of all, or the others would wait for what it has kept.
                with all_processes().together():
                    self._share_kept()
                if evaluated is not None:
                    figures = self._figures(trainer, evaluated)
            log_figures(trainer, figures, self._policy)


def _begins(key: str | None, prefix: str | None) -> bool:
    """Check whether the parts of a key begin with those of a prefix; all do with None."""
    return prefix is None or (key is not None and f"{key}/".startswith(f"{prefix}/"))
