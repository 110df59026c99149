"""Images of items: from the data set by index, or, where it has none, kept from the batches of a seeded sample."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from fewshot_callbacks._trainer import items_of_batches
from fewshot_callbacks.callbacks.embeddings import describe
from fewshot_callbacks.distributed.torch_distributed import all_processes, process_count
from fewshot_callbacks.plots.pictures import LONGEST, Scale, to_picture

# A function of (data set, index) that returns an image, or a text; for data without an index, of (batch, place in it).
Images = Callable[[Any, int], Any]

# Entries of a mapping that hold what is shown of an item.
KEYS = ("image", "images", "img", "pixel_values", "text")

# Pixels of the longer side of an image that is kept; a panel shows 70 to 130.
KEPT_SIDE = 128
# Images that are kept of a loader: 49 MB, at three bytes for each pixel.
MOST_KEPT = 1000


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


def first_part(sample: Any) -> Any:
    """Find what is shown of a sample or of a batch: its first part, or one of the entries that are named `KEYS`.

    Raises:
        ValueError: If a mapping has none of them.
    """
    if isinstance(sample, Mapping):
        key = next((key for key in KEYS if key in sample), None)
        if key is None:
            raise ValueError(
                f"there is {describe(sample)}, and none of {', '.join(map(repr, KEYS))}. Pass images, a function of (data "
                "set, index)"
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
            images = first_part(batch)
            image = images[place % len(images)]  # views follow one another
        shown = self._shown(image, KEPT_SIDE)
        return shown if isinstance(shown, str) else (255 * shown).round().astype(np.uint8)

    def _shown(self, image: Any, longest: int = LONGEST) -> np.ndarray | str:
        return image if isinstance(image, str) else to_picture(image, self.mean, self.std, longest)


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
        self._order: list[tuple[int, int]] = []  # a heap: (minus the hash, position) of each that is kept
        self._batches = 0

    def see_batch(self, positions: range, batch: Any) -> None:
        """Keep the images of a batch that belong to the sample, if there is no index.

        Args:
            positions: Index of each embedding of the batch in this process's pass over the loader.
            batch: What the step was given.
        """
        self._batches += 1
        if self.has_index and positions.stop == items_of_batches(self.loader, self._batches):
            return
        self.has_index = False  # several embeddings of an item, or several items of a sample
        processes = all_processes()
        # As a DistributedSampler deals: item i goes to process i modulo their number.
        everywhere = np.asarray(positions) * processes.count + processes.rank
        for place, (position, order) in enumerate(zip(everywhere.tolist(), mixed(everywhere).tolist(), strict=True)):
            if len(self.kept) == MOST_KEPT and -order < self._order[0][0]:
                continue
            self.kept[position] = self.reader.of_batch(batch, place)
            heapq.heappush(self._order, (-order, position))
            if len(self.kept) > MOST_KEPT:
                del self.kept[heapq.heappop(self._order)[1]]
