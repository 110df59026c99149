"""Images of items: from the data set by index, or, where it has none, kept from the batches of a seeded sample."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt64
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler

from fewshot_callbacks._trainer import items_of_batches
from fewshot_callbacks.callbacks.embeddings import describe
from fewshot_callbacks.distributed.torch_distributed import all_processes, process_count
from fewshot_callbacks.plots.pictures import Scale, to_picture

# A function of (data set, index) that returns an image, or a text.
Images = Callable[[Any, int], Any]

# Entries of a mapping that hold what is shown of an item.
KEYS = ("image", "images", "img", "pixel_values", "text")

MOST_KEPT = 1000
# Pixels of the longer side of an image that is kept; a panel shows 70 to 130.
KEPT_SIDE = 128


def mixed(seed: int, positions: Int[np.ndarray, "items"]) -> UInt64[np.ndarray, "items"]:
    """Hash positions: the items of the least hashes are a sample that is the same wherever and whenever it is drawn.

    The number of items need not be known, and the sample changes little when items are added. The hash is
    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).

    Examples:
        >>> hashes = mixed(0, np.arange(1000))
        >>> hashes.argsort()[:3]
        array([410, 821, 366])
    """
    with np.errstate(over="ignore"):
        value = positions.astype(np.uint64) + np.uint64(seed % 2**32) * np.uint64(0xD1B54A32D192ED03)
        value = (value + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def has_index(loader: Any) -> bool:
    """Decide whether item i of a pass over a loader, by all processes, is item i of its data set."""
    dataset, sampler = getattr(loader, "dataset", None), getattr(loader, "sampler", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    batches = getattr(loader, "batch_sampler", None)
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


class ItemImages:
    """The images of one loader's items.

    Args:
        loader: The loader.
        seed: Of the sample of those that are kept where the data set has no index.
        kept_mb: Bound on the memory of these, in MB.
    """

    def __init__(self, loader: Any, seed: int, kept_mb: float) -> None:
        self.loader, self.seed, self.kept_mb = loader, seed, kept_mb
        self.has_index = has_index(loader)
        self.kept: dict[int, Any] = {}
        self._order: list[tuple[int, int]] = []  # a heap: (minus the hash, position) of each that is kept
        self._batches, self._most = 0, MOST_KEPT

    def see_batch(self, positions: range, batch: Any, images_of: Callable[[Any], Any]) -> None:
        """Keep the images of a batch that belong to the sample, if there is no index.

        Args:
            positions: Index of each embedding of the batch in this process's pass over the loader.
            batch: What the step was given.
            images_of: Finds the images in a batch.
        """
        self._batches += 1
        if self.has_index and positions.stop == items_of_batches(self.loader, self._batches):
            return
        self.has_index = False  # several embeddings of an item, or several items of a sample
        processes = all_processes()
        everywhere = np.asarray(positions) * processes.count + processes.rank
        hashes = mixed(self.seed, everywhere)
        wanted = np.flatnonzero(hashes < -self._order[0][0]) if len(self._order) >= self._most else range(len(hashes))
        if not len(wanted):
            return
        images = images_of(batch)
        for number in wanted:
            image = _small_copy(images[int(number) % len(images)])  # views follow one another
            if isinstance(image, Tensor) and image.numel():
                size = image.numel() * image.element_size()
                self._most = max(1, int(min(MOST_KEPT, self.kept_mb * 1e6 / size)))
            self._keep(int(everywhere[number]), int(hashes[number]), image)

    def _keep(self, position: int, order: int, image: Any) -> None:
        heapq.heappush(self._order, (-order, position))
        self.kept[position] = image
        while len(self._order) > self._most:
            del self.kept[heapq.heappop(self._order)[1]]


def _small_copy(image: Any) -> Any:
    """Copy an image of a batch to the CPU, by means over squares of pixels if it is large."""
    if not isinstance(image, Tensor):
        return image
    image = image.detach()
    step = -(-max(image.shape[-2:], default=1) // KEPT_SIDE)
    if image.ndim == 3 and step > 1 and min(image.shape[-2:]) >= step:
        kind = image.dtype
        image = torch.nn.functional.avg_pool2d(image.float(), step)
        image = image if kind.is_floating_point else image.round().to(kind)
    return image.to("cpu", copy=True)


class ItemReader:
    """Turns items into what is drawn of them, and notes those that cannot be.

    Args:
        images: See `Images`; by default the first part of a sample, or its entry `image`.
        mean: Of the normalisation that is undone.
        std: The same, what was divided by.
    """

    def __init__(self, images: Images | None, mean: Scale | None, std: Scale | None) -> None:
        self.images, self.mean, self.std = images, mean, std
        self.failures: list[tuple[str, Exception]] = []
        """each item that could not be shown since this list was emptied last, and why"""

    def from_data_set(self, loader: Any, index: int, where: str) -> np.ndarray | str | None:
        """Read an item by its index; None if that fails.

        Args:
            loader: Its loader.
            index: Its index in the data set.
            where: Name of the loader, for messages.
        """
        try:
            dataset = loader.dataset
            return self._shown(self.images(dataset, index) if self.images else first_part(dataset[index]))
        except Exception as error:  # one image must not take the others with it
            self.failures.append((f"item {index} of {where}", error))
            return None

    def from_batch(self, image: Any, position: int, where: str) -> np.ndarray | str | None:
        """Show an image that was kept; None if that fails."""
        try:
            return self._shown(image)
        except Exception as error:
            self.failures.append((f"item {position} of {where}", error))
            return None

    def _shown(self, image: Any) -> np.ndarray | str:
        return image if isinstance(image, str) else to_picture(image, self.mean, self.std)
